"""Requests whose own time limit passes, before the first byte of the answer and behind it."""

import asyncio

import pytest

from models.errors import DeadlineExceededError
from tests.unit.deployments.fakes import (
    admission,
    chat_body,
    completion_body,
    delta,
    make_ingress,
    open_client,
    read_json_events,
)

pytestmark = pytest.mark.anyio

ROUTES = (("/v1/chat/completions", chat_body), ("/v1/completions", completion_body))


def keep_until_the_deadline(is_admitting):
    """A model that keeps a call for as long as it may take, with or without a first text."""

    async def script(call):
        if is_admitting:
            yield [admission()]
            yield [delta("Hello")]
        await asyncio.sleep(call["timeout_s"])
        raise DeadlineExceededError(call["timeout_s"])

    return script


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("is_stream", "is_admitting"), [(False, False), (False, True), (True, False)]
)
async def test_a_deadline_that_passes_before_the_first_byte_is_a_408(
    is_stream, is_admitting, path, body
):
    ingress, handle = make_ingress(keep_until_the_deadline(is_admitting))
    async with open_client(ingress) as client:
        response = await client.post(path, json=body(stream=is_stream, timeout_s=0.01))

    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert handle.streams[0].is_cancelled


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_deadline_that_passes_behind_the_first_byte_is_the_last_event(path, body):
    ingress, handle = make_ingress(keep_until_the_deadline(is_admitting=True))
    async with open_client(ingress) as client:
        response = await client.post(path, json=body(stream=True, timeout_s=0.01))

    events, is_complete = read_json_events(response.text)
    assert response.status_code == 200
    assert not is_complete
    assert "choices" in events[-2]
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "0.01 s" in events[-1]["error"]["message"]
    assert handle.streams[0].is_cancelled
