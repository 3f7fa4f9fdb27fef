"""The headers of every answer, whatever it is."""

import uuid

import httpx
import pytest
from starlette.responses import PlainTextResponse

from deployments.response_headers import API_VERSION, ResponseHeaders
from models.errors import EngineDeadError
from tests.unit.deployments.fakes import (
    chat_body,
    fail_with,
    make_ingress,
    open_client,
    refuse_with,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def ask(headers=(), is_behind_serve=False, clock=None):
    """The answer of an application that tells which request ids it got."""

    async def app(scope, receive, send):
        ids = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        await PlainTextResponse(",".join(ids))(scope, receive, send)

    options = {} if clock is None else {"clock": clock}
    wrapped = ResponseHeaders(app, is_behind_serve=is_behind_serve, **options)
    transport = httpx.ASGITransport(wrapped)
    async with httpx.AsyncClient(transport=transport, base_url="http://medley") as client:
        return await client.get("/", headers=list(headers))


@pytest.mark.parametrize("given", ["a", "7f1c2d", "trace:1/2=@user.name+x-y_z", "x" * 128])
async def test_a_short_well_formed_request_id_is_echoed(given):
    response = await ask([("x-request-id", given)])

    assert response.headers.get_list("x-request-id") == [given]
    assert response.text == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a,b", "<b>", '"', "é", "{}"])
async def test_another_one_is_replaced(given):
    response = await ask([("x-request-id", given.encode())])

    (told,) = response.headers.get_list("x-request-id")
    assert str(uuid.UUID(told)) == told
    assert response.text == told


async def test_of_several_request_ids_one_is_left():
    response = await ask([("x-request-id", "first"), ("x-request-id", "second")])

    assert response.headers.get_list("x-request-id") == [response.text]


async def test_without_one_every_request_gets_its_own():
    ids = {(await ask()).headers["x-request-id"] for _ in range(3)}

    assert len(ids) == 3


async def test_behind_serve_which_adds_the_request_id_there_is_no_second_one():
    response = await ask([("x-request-id", "abc")], is_behind_serve=True)

    assert "x-request-id" not in response.headers
    assert response.text == "abc"


async def test_the_time_is_told_in_milliseconds():
    times_s = iter([10.0, 10.0425])

    response = await ask(clock=lambda: next(times_s))

    assert response.headers["openai-processing-ms"] in ("42", "43")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, chat_body(), 200),
        ("POST", CHAT, chat_body(stream=True), 200),
        ("POST", CHAT, chat_body(n=0), 400),
        ("POST", CHAT, "text", 400),
        ("GET", "/nowhere", None, 404),
        ("PUT", CHAT, None, 405),
        ("GET", "/health", None, 200),
        ("HEAD", "/health", None, 200),
        ("GET", "/docs", None, 200),
    ],
)
async def test_every_answer_has_them_once(method, path, body, status):
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        response = await client.request(method, path, json=body, headers={"x-request-id": "mine"})

    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert response.headers.get_list("openai-version") == [API_VERSION]
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_an_error_tells_the_id_that_its_header_has():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body(n=0), headers={"x-request-id": "a b"})

    assert response.json()["request_id"] == response.headers["x-request-id"] != "a b"


async def test_a_failure_of_ours_has_them_too():
    ingress, _ = make_ingress(refuse_with(RuntimeError("secret")))
    async with open_client(ingress) as client:
        response = await client.post(CHAT, json=chat_body())

    assert response.status_code == 500
    assert response.json()["request_id"] == response.headers["x-request-id"]


async def test_a_stream_that_fails_has_told_its_id_before():
    ingress, _ = make_ingress(fail_with(EngineDeadError("gone")))
    async with open_client(ingress) as client:
        response = await client.post(
            CHAT, json=chat_body(stream=True), headers={"x-request-id": "mine"}
        )

    assert response.headers["x-request-id"] == "mine"
    assert '"error"' in response.text
