"""The replica's front, over a real engine without a model."""

import asyncio
import gc
import json
import sys
import time
import types

import pytest

from deployments.model_replica import ModelReplica
from models.config import EngineConfig
from models.engine.adapter_desk import AdapterStatus
from models.engine.async_engine import AsyncEngine
from models.errors import (
    AdapterNotFoundError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
)
from models.requests import AdapterRef
from sampling.errors import InvalidSamplingParamsError
from tests.unit.models.engine.fakes import ByteText, EchoRunner, GatedRunner, make_engine

pytestmark = pytest.mark.anyio


class Spelling(ByteText):
    def token_text(self, token_id):
        return f"<{token_id}>", bytes([token_id % 256])


class SlowSpelling(Spelling):
    def encode(self, prompt):
        time.sleep(0.2)
        return super().encode(prompt)


@pytest.fixture
async def make_replica(monkeypatch):
    """Replicas whose constructor gets an engine that draws what the prompt says."""
    opened = []

    def make(runner=None, text=None, **options):
        def build_engine(config, *, cache_folder, progress):
            progress("built")
            return AsyncEngine(make_engine(runner), text or Spelling())

        build = types.SimpleNamespace(build_engine=build_engine)
        monkeypatch.setitem(sys.modules, "models.engine.build", build)
        opened.append((ModelReplica(EngineConfig(), "~/cache", **options), runner))
        return opened[-1][0]

    yield make

    for replica, runner in opened:
        if isinstance(runner, GatedRunner):
            runner.permit(10_000)
        if (stopping := replica.__del__()) is not None:
            await stopping


def make_call(text="abc", **fields):
    return {
        "request_id": "r",
        "prompt": {"kind": "text", "text": text},
        "sampling": {"temperature": 0.0},
        "is_max_tokens_explicit": False,
        "seed": 1,
        "num_choices": 1,
        "stop": [],
        "is_stop_included": False,
        "is_special_token_skipped": True,
        "bad_words": [],
        "cache_salt": None,
        "timeout_s": None,
        "num_prompt_logprobs": None,
        "is_prompt_reported": False,
        **fields,
    }


async def wait_for_stats(replica, condition):
    async with asyncio.timeout(5):
        while not condition(stats := await replica.stats()):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    return stats


async def read(replica, call):
    return [message async for message in replica.generate(call)]


async def test_a_stream_is_an_admission_then_deltas_then_an_end(make_replica):
    first, *rest = await read(make_replica(), make_call())

    records = [record for message in rest for record in message]
    assert [record["kind"] for record in first] == ["admission"]
    assert first[0]["num_prompt_tokens"] == 3
    assert {record["kind"] for record in records[:-1]} == {"delta"}
    assert records[-1]["kind"] == "end"
    assert [record["finish_reason"] for record in records[:-1]].count("stop") == 1


async def test_log_probabilities_are_spelled(make_replica):
    messages = await read(
        make_replica(), make_call(sampling={"temperature": 0.0, "num_top_logprobs": 0})
    )

    logprobs = [
        logprob
        for message in messages
        for record in message
        if record["kind"] == "delta"
        for logprob in record["logprobs"]
    ]
    assert logprobs
    assert all(logprob["token"] == f"<{logprob['token_id']}>" for logprob in logprobs)


async def test_log_probabilities_are_spelled_as_the_adapter_spells_them(make_replica):
    class OwnSpelling(Spelling):
        def token_text(self, token_id):
            return f"own {token_id}", b""

    replica = make_replica()
    generate = replica._engine.generate

    async def generate_with_own_text(request, *, tell_text):
        async for events in generate(request):
            tell_text(OwnSpelling())
            yield events

    replica._engine.generate = generate_with_own_text
    call = make_call(sampling={"temperature": 0.0, "num_top_logprobs": 0})

    messages = await read(replica, call)

    deltas = [record for message in messages for record in message if record["kind"] == "delta"]
    tokens = {logprob["token"] for delta in deltas for logprob in delta["logprobs"]}
    assert tokens
    assert all(token.startswith("own ") for token in tokens)


async def test_a_prompt_is_reported_and_scored_before_any_text(make_replica):
    runner = EchoRunner()
    call = make_call(
        "né",
        sampling={"temperature": 0.0, "max_tokens": 0},
        is_max_tokens_explicit=True,
        num_choices=2,
        num_prompt_logprobs=1,
        is_prompt_reported=True,
    )

    first, *rest = await read(make_replica(runner), call)

    (admission,) = first
    records = [record for message in rest for record in message]
    scored = [record for record in records if record["kind"] == "prompt_logprobs"]
    logprobs = [logprob for record in scored for logprob in record["logprobs"]]
    assert admission["prompt_text"] == "né"
    assert admission["first_prompt_token"] == "<110>"
    assert scored[0]["start"] == 1
    assert [logprob["token"] for logprob in logprobs] == ["<195>", "<169>"]
    assert [len(logprob["top"]) for logprob in logprobs] == [1, 1]
    assert [record["kind"] for record in records[len(scored) :]] == ["delta", "delta", "end"]


async def test_bad_words_reach_the_engine_as_tokens_with_and_without_a_space(make_replica):
    runner = EchoRunner()

    await read(make_replica(runner), make_call(bad_words=["no", " no", "x"]))

    (joining,) = runner.joined
    # a byte each: what ends with another one is banned with that
    assert joining.sampling.bad_words_token_ids == (tuple(b"no"), tuple(b"x"))


async def test_a_bad_word_that_makes_no_token_is_refused_by_name(make_replica):
    class Silent(Spelling):
        def encode(self, prompt):
            if "\u200b" in prompt.text:
                raise InvalidRequestError("prompt", "must have at least one token")
            return super().encode(prompt)

    with pytest.raises(InvalidRequestError) as caught:
        await read(make_replica(text=Silent()), make_call(bad_words=["\u200b"]))

    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_choices": 1000}, InvalidRequestError),
        ({"sampling": {"logit_bias": [[10**6, 1.0]]}}, InvalidSamplingParamsError),
        ({"sampling": {"top_p": 2.0}}, InvalidSamplingParamsError),
    ],
)
async def test_a_call_that_cannot_be_served_raises_our_errors(make_replica, fields, error):
    with pytest.raises(error):
        await read(make_replica(), make_call(**fields))


@pytest.mark.parametrize(
    ("own_s", "default_s", "limit_s"), [(0.01, 0.0, 0.01), (None, 0.02, 0.02), (0.01, 60.0, 0.01)]
)
async def test_a_request_ends_at_its_own_time_limit_or_else_at_the_models(
    make_replica, own_s, default_s, limit_s
):
    replica = make_replica(text=SlowSpelling(), request_timeout_s=default_s)

    with pytest.raises(DeadlineExceededError) as caught:
        await read(replica, make_call(timeout_s=own_s))

    assert caught.value.timeout_s == limit_s


@pytest.mark.parametrize(("own_s", "default_s"), [(None, 0.0), (60.0, 0.01)])
async def test_a_request_without_a_limit_or_with_a_wider_one_has_its_time(
    make_replica, own_s, default_s
):
    replica = make_replica(text=SlowSpelling(), request_timeout_s=default_s)

    assert await read(replica, make_call(timeout_s=own_s))


async def test_a_caller_that_leaves_aborts_its_request(make_replica):
    runner = GatedRunner()
    replica = make_replica(runner)
    stream = replica.generate(make_call("abcdef"))
    await anext(stream)
    runner.permit()
    await anext(stream)
    await wait_for_stats(replica, lambda stats: stats["num_running"] == 1)

    await stream.aclose()
    runner.permit(10_000)

    stats = await wait_for_stats(
        replica, lambda stats: stats["num_running"] == stats["num_waiting"] == 0
    )
    assert stats["num_free_blocks"] == stats["num_blocks"]


async def test_a_replica_is_well_until_it_is_stopped(make_replica):
    replica = make_replica()
    replica.check_health()
    await replica.ping()

    await replica.__del__()

    with pytest.raises(EngineDeadError):
        replica.check_health()
    with pytest.raises(EngineDeadError):
        await replica.ping()


async def test_a_stopped_replica_is_collected_without_a_warning(make_replica):
    replica = make_replica()
    await replica.__del__()

    assert replica.__del__() is None
    del replica
    gc.collect()


class Desk:
    """An AdapterDesk that remembers what it was told."""

    def __init__(self):
        self.told = []

    async def list_ids(self):
        return ("a", "org/b")

    async def prefetch(self, adapter_id):
        if adapter_id == "nobody":
            raise AdapterNotFoundError(adapter_id)
        self.told.append(("prefetch", adapter_id))
        return AdapterRef(adapter_id, "v1")

    def pin(self, adapter_id):
        self.told.append(("pin", adapter_id))

    def unpin(self, adapter_id):
        self.told.append(("unpin", adapter_id))

    def unload(self, adapter_id):
        self.told.append(("unload", adapter_id))

    def status(self):
        return (
            AdapterStatus(
                adapter_id="a",
                version="v1",
                tier="device",
                num_bytes=10,
                num_hits=2,
                last_used_s=0.5,
                num_in_flight=1,
                is_pinned=True,
            ),
        )


@pytest.fixture
def desk(monkeypatch):
    desk = Desk()
    monkeypatch.setattr(AsyncEngine, "adapters", property(lambda _: desk))
    return desk


@pytest.mark.parametrize(
    ("action", "told", "version"),
    [
        ("load", "prefetch", "v1"),
        ("pin", "pin", None),
        ("unpin", "unpin", None),
        ("unload", "unload", None),
    ],
)
async def test_an_action_reaches_the_engines_adapters(make_replica, desk, action, told, version):
    done = await make_replica().act_on_adapter(action, "org/b")

    assert done == {"replica_id": "", "version": version}
    assert desk.told == [(told, "org/b")]


async def test_an_action_that_fails_raises_our_error(make_replica, desk):
    with pytest.raises(AdapterNotFoundError):
        await make_replica().act_on_adapter("load", "nobody")


async def test_adapters_and_their_state_are_told_in_plain_values(make_replica, desk):
    replica = make_replica()

    status = await replica.adapter_status()

    assert await replica.list_adapters() == ["a", "org/b"]
    assert status == {
        "replica_id": "",
        "adapters": [
            {
                "adapter_id": "a",
                "version": "v1",
                "tier": "device",
                "num_bytes": 10,
                "num_hits": 2,
                "last_used_s": 0.5,
                "num_in_flight": 1,
                "is_pinned": True,
            }
        ],
    }
    assert json.loads(json.dumps(status)) == status


async def test_an_adapter_of_an_engine_without_adapters_is_unknown(make_replica):
    with pytest.raises(AdapterNotFoundError):
        await read(make_replica(), make_call(adapter_id="a"))
    with pytest.raises(AdapterNotFoundError):
        await make_replica().act_on_adapter("load", "a")
    assert await make_replica().list_adapters() == []


async def test_a_replica_makes_tokens_of_text_and_text_of_tokens(make_replica):
    replica = make_replica()
    call = {"prompt": {"kind": "text", "text": "ab"}, "adapter_id": None, "has_texts": True}

    record = await replica.tokenize(call)

    assert record == {"token_ids": [97, 98], "texts": ["<97>", "<98>"]}
    assert await replica.detokenize({"token_ids": [97, 98], "adapter_id": None}) == "ab"
    with pytest.raises(AdapterNotFoundError):
        await replica.tokenize({**call, "adapter_id": "nobody"})
