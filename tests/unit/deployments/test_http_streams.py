"""Streams that do not go straight: waiting, failing, leaving, draining."""

import asyncio
import dataclasses
import json

import pytest

from models.errors import DrainingError, QueueFullError
from tests.unit.deployments.fakes import (
    LIMITS,
    AsgiCall,
    EndlessModel,
    admission,
    chat_body,
    completion_body,
    delta,
    end,
    fail_with,
    make_ingress,
    open_client,
    read_json_events,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

HASTY = dataclasses.replace(LIMITS, header_wait_s=0.02, keepalive_s=0.02)


async def within_limit(event):
    async with asyncio.timeout(5):
        await event.wait()


async def test_an_error_behind_the_headers_is_one_event_and_the_stream_is_not_done():
    ingress, handle = make_ingress(fail_with(QueueFullError(1, 1)))
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(stream=True))

    events, is_complete = read_json_events(response.text)
    assert response.status_code == 200
    assert not is_complete
    assert events[-1]["error"]["code"] == "queue_full"
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert events[-2]["choices"][0]["delta"] == {"content": "Hello"}
    assert handle.streams[0].is_cancelled


async def test_an_unknown_error_behind_the_headers_tells_nothing_of_its_cause(caplog):
    ingress, _ = make_ingress(fail_with(KeyError("secret")))
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(stream=True))

    events, is_complete = read_json_events(response.text)
    assert not is_complete
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_an_error_behind_the_first_token_fails_a_whole_answer_with_a_status():
    ingress, _ = make_ingress(fail_with(QueueFullError(1, 1)))
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body())

    assert response.status_code == 429


@pytest.mark.parametrize("messages", [[], [[delta("a", finish="stop")]], [[delta("a"), end()]]])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stream_that_breaks_off_is_an_error(messages, is_stream):
    async def script(call):
        yield [admission()]
        for message in messages:
            yield message

    ingress, _ = make_ingress(script)
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(stream=is_stream))

    if is_stream:
        events, is_complete = read_json_events(response.text)
        assert not is_complete
        assert events[-1]["error"]["code"] == "generation_failed"
    else:
        assert response.json()["error"]["code"] == "generation_failed"


async def test_a_stream_that_begins_without_an_admission_is_an_error():
    async def script(call):
        yield [delta("a")]

    ingress, _ = make_ingress(script)
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(stream=True))

    assert response.status_code == 503


async def test_a_choice_that_failed_ends_the_answer_with_an_error():
    async def script(call):
        yield [admission()]
        yield [delta("a", finish="error"), end()]

    ingress, _ = make_ingress(script)
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(stream=True))

    events, is_complete = read_json_events(response.text)
    assert not is_complete
    assert events[-1]["error"]["code"] == "generation_failed"


async def test_a_client_that_leaves_a_stream_ends_the_generation():
    model = EndlessModel()
    ingress, handle = make_ingress(model)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))
    await call.read_until("Hello")

    call.leave()

    await within_limit(model.has_ended)
    await call.read_rest()
    assert handle.streams[0].is_cancelled


async def test_a_client_that_leaves_before_the_first_token_ends_the_generation():
    model = EndlessModel(is_admitting=False)
    ingress, _ = make_ingress(model)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))
    await within_limit(model.has_begun)

    call.leave()

    await within_limit(model.has_ended)


async def test_a_client_that_leaves_while_a_whole_answer_is_made_ends_the_generation():
    model = EndlessModel()
    ingress, _ = make_ingress(model)
    call = AsgiCall(ingress, CHAT, chat_body())
    await within_limit(model.has_begun)

    call.leave()

    await within_limit(model.has_ended)


async def test_a_client_that_leaves_ends_every_prompt_of_its_request():
    models = []

    def script(call):
        models.append(EndlessModel())
        return models[-1](call)

    ingress, _ = make_ingress(script)
    call = AsgiCall(ingress, COMPLETIONS, completion_body(prompt=["a", "b", "c"], stream=True))
    await call.read_until("Hello")

    call.leave()

    for model in models:
        await within_limit(model.has_ended)
    assert len(models) == 3


async def test_a_request_that_serve_cancels_ends_the_generation():
    model = EndlessModel()
    ingress, _ = make_ingress(model)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))
    await call.read_until("Hello")

    call.task.cancel()

    await within_limit(model.has_ended)
    with pytest.raises(asyncio.CancelledError):
        await call.task


async def test_headers_and_comments_go_out_when_the_admission_takes_long():
    gate = asyncio.Event()

    async def script(call):
        await gate.wait()
        yield [admission()]
        yield [delta("late", finish="stop"), end()]

    ingress, _ = make_ingress(script, limits=HASTY)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))

    start = await call.next_message()
    waiting = await call.read_until(": ping\n\n: ping\n\n")
    gate.set()
    events, is_complete = read_json_events(waiting + await call.read_rest())

    assert start["status"] == 200
    assert is_complete
    assert events[1]["choices"][0]["delta"] == {"content": "late"}


async def test_a_refusal_behind_early_headers_is_an_event():
    gate = asyncio.Event()

    async def script(call):
        await gate.wait()
        raise QueueFullError(1, 1)
        yield

    ingress, _ = make_ingress(script, limits=HASTY)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))
    waiting = await call.read_until(": ping")
    gate.set()

    rest = (waiting + await call.read_rest()).split(": ping\n\n")[-1]

    assert json.loads(rest.removeprefix("data: "))["error"]["code"] == "queue_full"


async def test_comments_come_while_a_stream_waits_for_its_next_token():
    gate = asyncio.Event()

    async def script(call):
        yield [admission()]
        yield [delta("one")]
        await gate.wait()
        yield [delta("two", finish="stop"), end()]

    ingress, _ = make_ingress(script, limits=HASTY)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))

    text = await call.read_until("one")
    text += await call.read_until(": ping\n\n")
    gate.set()
    text += await call.read_rest()

    assert read_json_events(text)[1]


async def test_no_comment_comes_behind_the_end():
    ingress, _ = make_ingress(limits=HASTY)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))

    text = await call.read_rest()
    await asyncio.sleep(HASTY.keepalive_s * 3)

    assert text.endswith("data: [DONE]\n\n")
    assert call.sent.empty()


async def test_draining_refuses_new_requests_with_a_503():
    ingress, handle = make_ingress()

    num_cut = await ingress.begin_shutdown(0.0)

    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body())
        health = await client.get("/health")
    assert num_cut == 0
    assert health.status_code == 503
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    assert handle.calls == []
    with pytest.raises(DrainingError):
        await ingress.chat(chat_body())


async def test_draining_lets_open_streams_finish():
    gate = asyncio.Event()

    async def script(call):
        yield [admission()]
        yield [delta("one")]
        await gate.wait()
        yield [delta("two", finish="stop"), end()]

    ingress, _ = make_ingress(script)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))
    text = await call.read_until("one")

    draining = asyncio.ensure_future(ingress.begin_shutdown(5.0))
    await asyncio.sleep(0.01)
    assert not draining.done()
    gate.set()

    assert await draining == 0
    assert read_json_events(text + await call.read_rest())[1]


async def test_draining_ends_streams_behind_the_grace_time_with_an_error_event():
    model = EndlessModel()
    ingress, _ = make_ingress(model)
    calls = [AsgiCall(ingress, CHAT, chat_body(stream=True)) for _ in range(2)]
    texts = [await call.read_until("Hello") for call in calls]

    num_cut = await ingress.begin_shutdown(0.05)

    assert num_cut == 2
    for call, text in zip(calls, texts, strict=True):
        events, is_complete = read_json_events(text + await call.read_rest())
        assert not is_complete
        assert events[-1]["error"]["code"] == "draining"


async def test_draining_ends_whole_answers_behind_the_grace_time_with_a_503():
    model = EndlessModel()
    ingress, _ = make_ingress(model)
    call = AsgiCall(ingress, CHAT, chat_body())
    await within_limit(model.has_begun)

    num_cut = await ingress.begin_shutdown(0.01)

    assert num_cut == 1
    assert (await call.next_message())["status"] == 503


async def test_draining_ends_the_streams_of_handles_with_the_error():
    ingress, _ = make_ingress(EndlessModel())
    stream = ingress.stream_chat(chat_body())
    await anext(stream)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    await ingress.begin_shutdown(0.0)

    with pytest.raises(DrainingError):
        await waiting


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_prompt_that_fails_behind_its_first_token_ends_the_whole_request(is_stream):
    async def script(call):
        yield [admission()]
        yield [delta("Hello")]
        if call["prompt"]["text"] == "bad":
            raise QueueFullError(1, 1)
        await asyncio.sleep(3600)

    ingress, handle = make_ingress(script)
    body = completion_body(prompt=["good", "bad"], stream=is_stream)
    async with open_client(ingress) as client:
        response = await client.post(COMPLETIONS, json=body)

    if is_stream:
        events, is_complete = read_json_events(response.text)
        assert not is_complete
        assert events[-1]["error"]["code"] == "queue_full"
    else:
        assert response.status_code == 429
    assert [stream.is_cancelled for stream in handle.streams] == [True, True]
