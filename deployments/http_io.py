"""Reads JSON bodies within limits and sends JSON, errors and event streams. Knows no models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send

from deployments import sse
from deployments.http_errors import (
    DEFAULT_PARAM_NAMES,
    BodyTooLargeError,
    UnsupportedMediaTypeError,
    describe_error,
)
from models.errors import InvalidRequestError

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")

_REQUEST_ID_HEADER = "x-request-id"
_JSON = "application/json"

Headers = Iterable[tuple[str, str]]


async def read_json(request: Request, max_body_bytes: int) -> Any:
    """Read a request's JSON body.

    Args:
        request: not read yet.
        max_body_bytes: more is refused while it is read.

    Raises:
        UnsupportedMediaTypeError: it is declared to be something else.
        BodyTooLargeError: it is too large.
        InvalidRequestError: it is not JSON.
    """
    _check_content_type(request.headers.get("content-type"))
    declared_size = request.headers.get("content-length", "")
    if declared_size.isdecimal() and int(declared_size) > max_body_bytes:
        raise BodyTooLargeError(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_body_bytes:
            raise BodyTooLargeError(max_body_bytes)
        body += chunk
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError("", f"the request body is not valid JSON: {error}") from None


def check_body(body: object, max_body_bytes: int) -> None:
    """Check a body that came as Python objects by the rules of one that came as JSON.

    Args:
        body: what a caller of a handle passed.
        max_body_bytes: more is refused.

    Raises:
        BodyTooLargeError: as JSON it is too large.
        InvalidRequestError: it cannot be written as JSON.
    """
    try:
        size_bytes = len(orjson.dumps(body))
    except TypeError as error:
        raise InvalidRequestError("", f"the body is not JSON: {error}") from None
    if size_bytes > max_body_bytes:
        raise InvalidRequestError("", str(BodyTooLargeError(max_body_bytes)))


def get_request_id(request: Request, fallback: str = "") -> str:
    """Return the id that Serve's proxy gave the request, or took over from the caller."""
    return request.headers.get(_REQUEST_ID_HEADER, fallback)


def make_json_response(body: Any, headers: Headers = ()) -> Response:
    """Return a 200 reply."""
    return Response(orjson.dumps(body), media_type=_JSON, headers=dict(headers))


def make_error_response(
    error: Exception,
    request_id: str,
    param_names: Mapping[str, str] = DEFAULT_PARAM_NAMES,
    validation_status: int = HTTPStatus.BAD_REQUEST,
) -> Response:
    """Return the reply that tells an error; one of ours is written to the log.

    Args:
        error: as caught, unwrapped from Ray's.
        request_id: appears in the reply and in the log.
        param_names: see ``describe_error``.
        validation_status: of a wrong value.
    """
    problem = describe_error(error, param_names).with_validation_status(validation_status)
    if problem.is_fault_of_ours:
        _logger.error("request %s failed", request_id, exc_info=error)
    return Response(
        problem.to_body(request_id),
        status_code=problem.status,
        media_type=_JSON,
        headers=dict(problem.headers),
    )


class EventStreamWriter:
    """Writes one event stream: headers, events, comments in the silence between, the end.

    Lifetime: ``start`` once, ``write`` any number of times, ``close`` once in any case.

    Owner: the request's task. The comments come from a task of their own; every message is a
    whole event, so they never tear one apart.
    """

    def __init__(self, send: Send, keepalive_s: float) -> None:
        """Write nothing yet.

        Args:
            send: of the ASGI request.
            keepalive_s: seconds of silence after which a comment is sent.
        """
        self._send = send
        self._keepalive_s = keepalive_s
        self._is_silent = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """Whether the headers are out, so that an error can only be an event."""
        return self._keeper is not None

    async def start(self, headers: Headers = ()) -> None:
        """Send status and headers."""
        lines = [
            ("content-type", sse.CONTENT_TYPE),
            ("cache-control", "no-cache"),
            # proxies such as nginx then pass every event on at once
            ("x-accel-buffering", "no"),
            *headers,
        ]
        raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        self._keeper = asyncio.create_task(self._keep_alive())
        await self._send({"type": "http.response.start", "status": 200, "headers": raw_headers})

    async def write(self, data: bytes) -> None:
        """Send whole events."""
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """End the response, if it has begun."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def abandon(self) -> None:
        """Send no more comments: the client has left."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def write_error(
        self, error: Exception, request_id: str, param_names: Mapping[str, str]
    ) -> None:
        """Send the event that tells why the stream ends here."""
        problem = describe_error(error, param_names)
        if problem.is_fault_of_ours:
            _logger.error("stream %s failed", request_id, exc_info=error)
        await self.write(sse.frame(problem.to_event()))

    async def _keep_alive(self) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(self._keepalive_s)
            if self._is_silent:
                await self._send(
                    {"type": "http.response.body", "body": sse.PING, "more_body": True}
                )


async def run_until_disconnect(work: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Run the answer to a request whose body is read; cancel it if the client leaves.

    Args:
        work: sends the answer.
        receive: of the ASGI request.
    """
    answer = asyncio.ensure_future(work())
    departure = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            answer.result()
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != _JSON and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(content_type[:128])
