"""The same service for callers of a Python handle."""

import dataclasses

import pytest
from ray.exceptions import ActorDiedError

from models.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
)
from sampling.errors import InvalidSamplingParamsError
from tests.unit.deployments.fakes import (
    LIMITS,
    EndlessModel,
    chat_body,
    completion_body,
    fail_with,
    make_ingress,
    open_client,
    read_json_events,
    refuse_with,
)

pytestmark = pytest.mark.anyio

IDS = ("id",)


def without_ids(event):
    return {key: value for key, value in event.items() if key not in IDS}


async def test_a_chat_call_answers_as_http_does():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        over_http = (await client.post("/v1/chat/completions", json=chat_body())).json()

    assert without_ids(await ingress.chat(chat_body())) == without_ids(over_http)


async def test_a_completion_call_answers_as_http_does():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        over_http = (await client.post("/v1/completions", json=completion_body())).json()

    assert without_ids(await ingress.complete(completion_body())) == without_ids(over_http)


@pytest.mark.parametrize("include_usage", [True, False])
async def test_streaming_calls_yield_the_events_of_http(include_usage):
    ingress, _ = make_ingress()
    options = {"stream_options": {"include_usage": include_usage}, "n": 2}
    cases = (
        (ingress.stream_chat, "/v1/chat/completions", chat_body(**options)),
        (ingress.stream_complete, "/v1/completions", completion_body(**options)),
    )
    for call, path, body in cases:
        async with open_client(ingress) as client:
            response = await client.post(path, json={**body, "stream": True})
        events, _ = read_json_events(response.text)

        called = [event async for event in call(body)]

        assert [without_ids(event) for event in called] == [without_ids(e) for e in events]


async def test_fields_without_effect_are_named_in_the_answer_of_a_call():
    ingress, _ = make_ingress()
    ignored = {"frobnicate": 1, "a\r\nb": 1, "x" * 200: 1, "tools": []}

    for call, stream, body in (
        (ingress.chat, ingress.stream_chat, chat_body(**ignored)),
        (ingress.complete, ingress.stream_complete, completion_body(**ignored)),
    ):
        first, *rest = [event async for event in stream(body)]

        assert (await call(body))["ignored_fields"] == ["frobnicate"]
        assert first["ignored_fields"] == ["frobnicate"]
        assert rest
        assert all("ignored_fields" not in event for event in rest)


async def test_an_answer_to_fields_that_all_count_names_none():
    ingress, _ = make_ingress()

    assert "ignored_fields" not in await ingress.chat(chat_body(user="u", tools=[]))


async def test_the_stream_field_does_not_count_for_a_call():
    ingress, _ = make_ingress()

    whole = await ingress.chat(chat_body(stream=True, stream_options={"include_usage": True}))
    events = [event async for event in ingress.stream_chat(chat_body(stream=False))]

    assert whole["object"] == "chat.completion"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (chat_body(messages=[]), InvalidRequestError),
        (chat_body(model="other"), ModelNotFoundError),
        (chat_body(peft="../x"), InvalidRequestError),
        (chat_body(peft="a", adapter_id="b"), InvalidRequestError),
        (chat_body(top_p=2), InvalidSamplingParamsError),
        (chat_body(temperature=float("nan")), InvalidRequestError),
        (chat_body(n=2**70), InvalidRequestError),
        (chat_body(user="\ud800"), InvalidRequestError),
        (chat_body(user=object()), InvalidRequestError),
        (chat_body(user="x" * 30_000), InvalidRequestError),
        ("text", InvalidRequestError),
        (None, InvalidRequestError),
    ],
)
async def test_a_bad_call_raises_the_error_that_http_tells(body, error):
    ingress, handle = make_ingress()

    with pytest.raises(error):
        await ingress.chat(body)
    with pytest.raises(error):
        await anext(ingress.stream_chat(body))
    assert handle.calls == []


async def test_a_body_nested_without_end_is_the_callers_error():
    ingress, _ = make_ingress()
    nested = []
    for _ in range(100_000):
        nested = [nested]

    with pytest.raises(InvalidRequestError):
        await ingress.chat(chat_body(x=nested))


async def test_an_error_of_the_replica_is_raised_as_it_is():
    ingress, _ = make_ingress(refuse_with(QueueFullError(3, 3)))

    with pytest.raises(QueueFullError):
        await ingress.chat(chat_body())


async def test_a_replica_that_died_is_raised_as_an_error_of_ours():
    ingress, _ = make_ingress(fail_with(ActorDiedError()))

    with pytest.raises(EngineDeadError):
        async for _ in ingress.stream_chat(chat_body()):
            pass


async def test_a_caller_that_stops_iterating_ends_the_generation():
    model = EndlessModel()
    ingress, handle = make_ingress(model)
    stream = ingress.stream_chat(chat_body())
    await anext(stream)

    await stream.aclose()

    assert handle.streams[0].is_cancelled


async def test_limits_hold_for_calls():
    ingress, _ = make_ingress(limits=dataclasses.replace(LIMITS, max_body_bytes=50))

    with pytest.raises(InvalidRequestError):
        await ingress.complete(completion_body(prompt="x" * 60))
