"""The headers that every answer has: whose it is, which API it speaks, how long it took."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "x-request-id"
PROCESSING_MS_HEADER = "openai-processing-ms"
VERSION_HEADER = "openai-version"

# The version of OpenAI's API that its own servers name, and whose clients Medley serves.
API_VERSION = "2020-10-01"

# What may stand in a log and in an error. It is a caller's text.
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class ResponseHeaders:
    """ASGI middleware that sees to the headers of every answer.

    A request goes on with exactly one ``x-request-id``: the caller's, if it is well-formed and
    short, else a new one. ``openai-processing-ms`` is the time until the headers went out.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_behind_serve: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap an application.

        Args:
            app: answers.
            is_behind_serve: Serve hands the requests over. It adds ``x-request-id`` to every
                answer by itself (the caller's, whatever that is), and a second one is not wanted.
            clock: seconds, monotonic.
        """
        self._app = app
        self._is_behind_serve = is_behind_serve
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_s = self._clock()
        scope = dict(scope)
        request_id = _settle_request_id(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": list(message.get("headers", ()))}
                headers = MutableHeaders(scope=message)
                if not self._is_behind_serve:
                    headers[REQUEST_ID_HEADER] = request_id
                headers[PROCESSING_MS_HEADER] = str(round((self._clock() - arrival_s) * 1000))
                headers[VERSION_HEADER] = API_VERSION
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _settle_request_id(scope: Scope) -> str:
    """Leave one request id in a scope's headers, and return it."""
    scope["headers"] = list(scope["headers"])
    headers = MutableHeaders(scope=scope)
    given = headers.get(REQUEST_ID_HEADER, "")
    request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
    headers[REQUEST_ID_HEADER] = request_id
    return request_id
