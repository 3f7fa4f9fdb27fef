"""Budgets over HTTP: what is charged, when it is given back, what answers tell of it."""

import asyncio
import time

import pytest

from deployments.spending import Unit
from models.errors import InvalidRequestError, QueueFullError
from tests.unit.deployments.access_setup import open_gate, read_error, record
from tests.unit.deployments.fakes import (
    MODEL_ID,
    AsgiCall,
    EndlessModel,
    FakeHandle,
    admission,
    completion_body,
    delta,
    end,
    fail_with,
    refuse_with,
)

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


def with_script(script):
    return {MODEL_ID: FakeHandle(script)}


async def settle(gate, **expected):
    """Wait until the ledger has heard of everything."""
    async with asyncio.timeout(5):
        while True:
            used = {unit.value: gate.budgets.used("alice", unit) for unit in Unit}
            if all(used[unit] == amount for unit, amount in expected.items()):
                return
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("deployments.budget_client._INTERVAL_S", 0.05)


ALL = {"tokens_per_minute": 1000, "requests_per_minute": 10, "max_running_requests": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_charged_and_the_rest_given_back(monkeypatch, tmp_path, stream):
    async with open_gate(monkeypatch, tmp_path, record("alice", **ALL)) as gate:
        body = completion_body(max_tokens=500, stream=stream)
        answer = await gate.post(PATH, body)

        assert answer.status_code == 200
        # 3 of the prompt, 2 of the answer.
        await settle(gate, tokens=5, requests=1, running_requests=0)


async def test_a_request_without_max_tokens_reserves_the_models_default(monkeypatch, tmp_path):
    key = record("alice", tokens_per_minute=150)
    async with open_gate(monkeypatch, tmp_path, key) as gate:
        one = await gate.post(PATH, completion_body())
        too_many = await gate.post(PATH, completion_body(n=2))
        chat = await gate.post(
            "/v1/chat/completions",
            {"model": MODEL_ID, "messages": [{"role": "user", "content": "x" * 400}]},
        )

    assert one.status_code == 200
    assert read_error(too_many)["code"] == "request_over_budget"
    # 100 for the answer, about 100 for the prompt.
    assert read_error(chat)["code"] == "request_over_budget"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_without_requests_left_gets_a_429_before_any_header(
    monkeypatch, tmp_path, stream
):
    key = record("alice", requests_per_minute=2)
    async with open_gate(monkeypatch, tmp_path, key, record("bob")) as gate:
        answers = [
            await gate.post(PATH, completion_body(stream=stream, max_tokens=5)) for _ in range(3)
        ]
        other = await gate.post(PATH, completion_body(max_tokens=5), "bob")

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    refused = answers[-1]
    error = read_error(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests a minute" in error["message"]
    assert 55 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["content-type"] == "application/json"
    assert refused.json()["id"] == "too_many_requests"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(gate.calls) == 3
    assert other.status_code == 200


async def test_a_key_without_tokens_left_waits_for_the_window(monkeypatch, tmp_path):
    async def long_answer(call):
        yield [admission(num_prompt_tokens=300)]
        yield [delta("x", finish="length"), end(prompt=300, completion=500)]

    key = record("alice", tokens_per_minute=1000)
    async with open_gate(monkeypatch, tmp_path, key, handles=with_script(long_answer)) as gate:
        first = await gate.post(PATH, completion_body(max_tokens=500))
        await settle(gate, tokens=800)
        small = await gate.post(PATH, completion_body(max_tokens=500))
        tiny = await gate.post(PATH, completion_body(max_tokens=150))

    assert first.status_code == 200
    assert small.status_code == 429
    assert "1000 tokens a minute" in read_error(small)["message"]
    assert tiny.status_code == 200


async def test_a_request_larger_than_the_whole_budget_is_not_to_be_repeated(monkeypatch, tmp_path):
    key = record("alice", tokens_per_minute=1000)
    async with open_gate(monkeypatch, tmp_path, key) as gate:
        answer = await gate.post(PATH, completion_body(max_tokens=1000))

    assert answer.status_code == 429
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert read_error(answer)["param"] == "max_tokens"
    assert gate.calls == []


async def test_running_requests_are_limited_and_one_that_ends_makes_room(monkeypatch, tmp_path):
    model = EndlessModel()
    key = record("alice", max_running_requests=1)
    async with open_gate(monkeypatch, tmp_path, key, handles=with_script(model)) as gate:
        call = AsgiCall(
            gate.ingress,
            PATH,
            completion_body(stream=True),
            headers={"authorization": "Bearer alice-key"},
        )
        await call.read_until("Hello")
        refused = await gate.post(PATH, completion_body())
        call.leave()
        await call.read_rest()
        await settle(gate, running_requests=0)
        gate.handles[MODEL_ID].script = FakeHandle().script
        accepted = await gate.post(PATH, completion_body())

    assert refused.status_code == 429
    assert "1 running requests" in read_error(refused)["message"]
    assert refused.headers["retry-after"] == "1"
    assert accepted.status_code == 200


async def test_a_client_that_leaves_pays_for_what_it_got(monkeypatch, tmp_path):
    key = record("alice", **ALL)
    async with open_gate(monkeypatch, tmp_path, key, handles=with_script(EndlessModel())) as gate:
        call = AsgiCall(
            gate.ingress,
            PATH,
            completion_body(stream=True, max_tokens=500),
            headers={"authorization": "Bearer alice-key"},
        )
        await call.read_until("Hello")
        # Its prompt has been counted, and all of its answer is reserved.
        await settle(gate, running_requests=1)
        assert gate.budgets.used("alice", Unit.TOKENS) >= 503
        call.leave()
        await call.read_rest()

        # 3 of the prompt and the one token that it has seen.
        await settle(gate, tokens=4, requests=1, running_requests=0)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("prompt", "is bad"), QueueFullError(1, 1), RuntimeError("x")]
)
async def test_a_request_that_no_engine_admitted_has_never_been(monkeypatch, tmp_path, error):
    key = record("alice", **ALL)
    async with open_gate(monkeypatch, tmp_path, key, handles=with_script(refuse_with(error))) as g:
        whole = await g.post(PATH, completion_body())
        stream = await g.post(PATH, completion_body(stream=True))

        assert whole.status_code == stream.status_code >= 400
        await settle(g, tokens=0, requests=0, running_requests=0)


async def test_a_request_that_fails_on_its_way_pays_for_what_was_made(monkeypatch, tmp_path):
    handles = with_script(fail_with(RuntimeError("x")))
    key = record("alice", **ALL)
    async with open_gate(monkeypatch, tmp_path, key, handles=handles) as gate:
        await gate.post(PATH, completion_body(stream=True))

        await settle(gate, tokens=4, requests=1, running_requests=0)


async def test_a_request_that_is_refused_by_its_form_costs_nothing(monkeypatch, tmp_path):
    async with open_gate(monkeypatch, tmp_path, record("alice", **ALL)) as gate:
        bad = await gate.post(PATH, completion_body(temperature=-1))
        unknown = await gate.post(PATH, completion_body(model="nothing"))
        await gate.get("/v1/models")

        assert (bad.status_code, unknown.status_code) == (400, 404)
        assert gate.ingress._access._budgets._task is None


async def test_several_prompts_and_choices_are_reserved_and_charged_together(monkeypatch, tmp_path):
    key = record("alice", tokens_per_minute=1000)
    async with open_gate(monkeypatch, tmp_path, key) as gate:
        over = await gate.post(PATH, completion_body(prompt=["a", "b"], n=3, max_tokens=180))
        answer = await gate.post(PATH, completion_body(prompt=["a", "b"], n=3, max_tokens=100))

        assert read_error(over)["code"] == "request_over_budget"
        assert answer.status_code == 200
        # Two prompts of 3, six choices of 2.
        await settle(gate, tokens=18)


async def test_every_answer_to_a_key_with_limits_tells_how_they_stand(monkeypatch, tmp_path):
    async with open_gate(monkeypatch, tmp_path, record("alice", **ALL)) as gate:
        before = await gate.get("/v1/models")
        body = completion_body(max_tokens=100)
        whole = await gate.post(PATH, body)
        stream = await gate.post(PATH, {**body, "stream": True})
        bad = await gate.post(PATH, completion_body(temperature=-1))

    for answer in (before, whole, stream, bad):
        assert answer.headers["x-ratelimit-limit-requests"] == "10"
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        assert answer.headers["ratelimit-limit"] == "10"
        assert (
            answer.headers["ratelimit-remaining"]
            == answer.headers["x-ratelimit-remaining-requests"]
        )
        assert "running" not in str(answer.headers)
    assert before.headers["x-ratelimit-remaining-requests"] == "10"
    assert before.headers["x-ratelimit-reset-requests"] == "0s"
    assert whole.headers["x-ratelimit-remaining-requests"] == "9"
    assert stream.headers["x-ratelimit-remaining-requests"] == "8"
    # While a stream runs its whole reservation is gone: 100, and 3 of the prompt.
    assert int(stream.headers["x-ratelimit-remaining-tokens"]) <= 1000 - 103
    assert whole.headers["x-ratelimit-reset-tokens"] in ("1m0s", "1m1s")
    reset_s = int(whole.headers["ratelimit-reset"]) - time.time()
    assert 55 <= reset_s <= 62


async def test_a_key_with_one_limit_tells_of_that_one(monkeypatch, tmp_path):
    key = record("alice", tokens_per_minute=1000)
    async with open_gate(monkeypatch, tmp_path, key) as gate:
        answer = await gate.post(PATH, completion_body())

    assert "x-ratelimit-limit-tokens" in answer.headers
    assert "x-ratelimit-limit-requests" not in answer.headers
    assert "ratelimit-limit" not in answer.headers


async def test_a_budget_that_cannot_be_reached_is_a_503(monkeypatch, tmp_path):
    monkeypatch.setattr("deployments.budget_client._RETRY_S", 0.05)

    async def fail(ask):
        raise ConnectionError

    async with open_gate(monkeypatch, tmp_path, record("alice", **ALL)) as gate:
        gate.budgets.answer = fail
        monkeypatch.setattr(gate.ingress._access._budgets, "_wait_s", 0.2)
        answer = await gate.post(PATH, completion_body())

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert read_error(answer)["code"] == "budgets_unavailable"
