"""The same service where HAProxy stands in for Serve's own proxy."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.integration.process_tags import ProcessTag
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 60


class ServingProcess:
    """The process, its address, and what it says of its engine."""

    def __init__(self, process, tag):
        self._process = process
        self._tag = tag
        self.url = self._read("url:")

    def listeners(self):
        """Return the names of its processes that accept connections to the address."""
        port = int(self.url.rpartition(":")[2])
        return {
            process.name()
            for process in self._tag.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }

    def stats(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._read("stats:"))

    def _read(self, mark):
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        raise AssertionError("the serving process ended")


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    tag = ProcessTag()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.serving_process",
            tmp_path_factory.mktemp("tiny"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            **tag.environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield ServingProcess(process, tag)
        process.stdin.close()
        process.wait(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def client(serving):
    with openai.OpenAI(
        base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as opened:
        yield opened


def wait_for_running(serving, num_running):
    end_s = time.monotonic() + 10
    while (stats := serving.stats())["num_running"] != num_running:
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)


def complete(client, **fields):
    return client.completions.create(
        model=TINY_ID,
        prompt="abc",
        temperature=0,
        extra_body={"ignore_eos": True},
        **{"max_tokens": 30, **fields},
    )


def test_haproxy_and_nobody_else_listens_on_the_port(serving):
    assert serving.listeners() == {"haproxy"}


def test_a_stream_has_the_text_of_the_whole_answer(client):
    whole = complete(client)

    chunks = list(complete(client, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_keep_their_status_and_shape(serving, client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, max_tokens=10**6)
    assert caught.value.body["code"] == "context_length_exceeded"
    missing = httpx.get(f"{serving.url}/nothing", timeout=LIMIT_S)
    assert missing.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place(serving, is_stream):
    body = {
        "model": TINY_ID,
        "prompt": "abc",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": is_stream,
    }
    with httpx.Client(timeout=httpx.Timeout(LIMIT_S, read=1.0)) as leaving:
        if is_stream:
            with leaving.stream("POST", f"{serving.url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                wait_for_running(serving, 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{serving.url}/v1/completions", json=body)

    wait_for_running(serving, 0)
