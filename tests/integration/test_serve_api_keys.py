"""Keys and budgets over two ingress replicas of a real service, and the death of their actor."""

import collections
import contextlib
import os
import signal
import time

import httpx
import psutil
import pytest
import yaml

from deployments.api_keys import hash_key
from tests.integration.serving import run_serving_process
from tests.integration.tiny_service_model import TINY_ID, save_tiny_model

pytestmark = pytest.mark.integration

LIMIT_S = 60
NUM_INGRESSES = 2
BODY = {"model": TINY_ID, "prompt": "abc", "max_tokens": 2, "ignore_eos": True}
KEYS = {
    "free": {},
    "ten": {"requests_per_minute": 10},
    "twenty": {"requests_per_minute": 20},
    "tokens": {"tokens_per_minute": 100},
    "one-at-a-time": {"max_running_requests": 1},
    "plenty": {"requests_per_minute": 100_000, "tokens_per_minute": 10_000_000},
}


def record(name, **fields):
    return {"name": name, "sha256": hash_key(f"{name}-key").hex(), **fields}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A service of its own, with keys and two ingress replicas: the shared one has neither."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(yaml.safe_dump([record(name, **fields) for name, fields in KEYS.items()]))
    arguments = {
        "cache_folder": str(folder),
        "shutdown_grace_s": 2.0,
        "ingress_replicas": NUM_INGRESSES,
        "api_keys_file": str(keys),
        "model": str(folder),
        "model_id": TINY_ID,
        "dtype": "float32",
        "kv_budget_bytes": 16 << 20,
        "max_num_seqs": 8,
        "num_threads": 1,
        "num_cpus": 0.2,
    }
    with run_serving_process(arguments) as service:
        yield service, keys


@pytest.fixture
def url(keyed):
    service, _ = keyed
    return f"{service.url}/v1/completions"


def post(url, name, **fields):
    headers = {"authorization": f"Bearer {name}-key"}
    return httpx.post(url, json={**BODY, **fields}, headers=headers, timeout=LIMIT_S)


@pytest.fixture
def find_processes(keyed):
    """Find processes of this service by the beginning of their title."""
    service, _ = keyed

    def find(title):
        found = []
        for process in service.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    return find


def statuses(answers):
    return collections.Counter(answer.status_code for answer in answers)


def test_a_key_is_wanted_and_the_health_check_wants_none(keyed, url):
    service, _ = keyed
    assert httpx.post(url, json=BODY, timeout=LIMIT_S).status_code == 401
    assert post(url, "unknown").status_code == 401
    assert post(url, "free").status_code == 200
    assert httpx.get(f"{service.url}/health", timeout=LIMIT_S).status_code == 200


def test_both_replicas_together_serve_what_one_budget_allows(url, find_processes):
    answers = [post(url, "ten") for _ in range(30)]

    assert len(find_processes("ray::ServeReplica:medley:Ingress")) == NUM_INGRESSES
    assert statuses(answers)[429] == 30 - statuses(answers)[200]
    # One that one replica has leased may be missing while the other is asked; none is too many.
    assert 9 <= statuses(answers)[200] <= 10
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-limit-requests"] == "10"
    assert refused.headers["x-ratelimit-remaining-requests"] in ("0", "1")


def test_tokens_are_counted_over_both_replicas(url):
    # Every one has 3 tokens of prompt and 2 of answer.
    answers = [post(url, "tokens") for _ in range(30)]

    served = statuses(answers)[200]
    assert 18 <= served <= 20
    assert "100 tokens a minute" in answers[-1].json()["error"]["message"]


def test_one_running_request_at_a_time_means_in_all_replicas(url):
    headers = {"authorization": "Bearer one-at-a-time-key"}
    body = {**BODY, "stream": True, "max_tokens": 4000}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as stream:
        # Whoever lets go of the lines closes the stream.
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        during = [post(url, "one-at-a-time") for _ in range(8)]
    end_s = time.monotonic() + 10
    while (after := post(url, "one-at-a-time").status_code) == 429 and time.monotonic() < end_s:
        time.sleep(0.1)

    assert statuses(during) == {429: 8}
    assert after == 200


def test_after_the_death_of_the_actor_the_budget_still_holds_and_nobody_fails(url, find_processes):
    before = [post(url, "twenty") for _ in range(8)]
    (actor,) = find_processes("ray::BudgetActor")

    os.kill(actor.pid, signal.SIGKILL)
    psutil.wait_procs([actor], timeout=LIMIT_S)
    after = []
    end_s = time.monotonic() + LIMIT_S
    while statuses(after)[429] < 5 and time.monotonic() < end_s:
        after.append(post(url, "twenty"))
    others = [post(url, "plenty") for _ in range(10)]

    assert statuses(before) == {200: 8}
    # 503 is what a request gets that cannot wait for a new actor: a client repeats it.
    assert set(statuses(after)) <= {200, 429, 503}
    served = 8 + statuses(after)[200]
    slack = NUM_INGRESSES * (20 // 20)
    assert 20 - slack <= served <= 20 + slack
    assert statuses(others) == {200: 10}
    (successor,) = find_processes("ray::BudgetActor")
    assert successor.pid != actor.pid


def test_new_keys_hold_in_every_replica_without_a_restart(keyed, url, find_processes):
    _, keys = keyed
    with_new_key = [*yaml.safe_load(keys.read_text()), record("new", models=["other"])]
    pids = {process.pid for process in find_processes("ray::ServeReplica:medley:Ingress")}

    keys.write_text(yaml.safe_dump(with_new_key))
    end_s = time.monotonic() + 10
    while statuses(answers := [post(url, "new") for _ in range(8)]) != {403: 8}:
        assert time.monotonic() < end_s, statuses(answers)
        time.sleep(0.2)

    assert {p.pid for p in find_processes("ray::ServeReplica:medley:Ingress")} == pids
