"""A replica or its step loop that dies: what clients see, and that the service recovers."""

import json
import time

import httpx
import psutil
import pytest

from tests.integration.faulty_processor import FATAL_BIAS
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

LIMIT_S = 60
# A replica takes some 10 s to start on a quiet machine.
REPLACEMENT_LIMIT_S = 120


def find_replica(service):
    (replica,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:medley:model-{TINY_ID}")
    ]
    return replica


def wait_until_healthy(service):
    end_s = time.monotonic() + REPLACEMENT_LIMIT_S
    while httpx.get(f"{service.url}/health", timeout=LIMIT_S).status_code != 200:
        assert time.monotonic() < end_s
        time.sleep(0.2)


def test_a_replica_that_is_killed_ends_its_stream_in_words_and_is_replaced(service):
    url = f"{service.url}/v1/completions"
    body = {"model": TINY_ID, "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=LIMIT_S) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        find_replica(service).kill()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    health = httpx.get(f"{service.url}/health", timeout=LIMIT_S)
    wait_until_healthy(service)
    answer = httpx.post(url, json={**body, "max_tokens": 5}, timeout=LIMIT_S)

    *pieces, last = events
    assert all("choices" in json.loads(piece) for piece in pieces)
    assert json.loads(last)["error"]["code"] == "engine_unavailable"
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "engine_unavailable"
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_step_loop_that_dies_tells_every_stream_and_its_replica_is_replaced(service):
    url = f"{service.url}/v1/completions"
    body = {"model": TINY_ID, "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    pid = find_replica(service).pid
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=LIMIT_S) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        fatal = httpx.post(url, json={**body, "logit_bias": {"65": FATAL_BIAS}}, timeout=LIMIT_S)
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    wait_until_replaced(service, pid)
    answer = httpx.post(url, json={**body, "max_tokens": 5}, timeout=LIMIT_S)

    *pieces, last = events
    assert all("choices" in json.loads(piece) for piece in pieces)
    assert json.loads(last)["error"]["code"] == "engine_unavailable"
    assert (fatal.status_code, fatal.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "a fault that a test injects" not in fatal.text
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 5


def wait_until_replaced(service, pid):
    """Wait until Serve has found the replica unhealthy and another one answers."""
    end_s = time.monotonic() + REPLACEMENT_LIMIT_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < end_s
        time.sleep(0.2)
    wait_until_healthy(service)
