"""One HTTP request that generates: whole or as an event stream, with all ways it can end."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments import sse
from deployments.answers import AnswerEvents
from deployments.generation import OpenGeneration
from deployments.http_io import (
    EventStreamWriter,
    make_error_response,
    make_json_response,
    run_until_disconnect,
)
from deployments.metering import Meter
from deployments.service import GenerationService, begin_prompts, join_adapter_versions
from deployments.translate import Job

_IGNORED_FIELDS_HEADER = "x-medley-ignored-fields"
_ADAPTER_VERSION_HEADER = "x-medley-adapter-version"


class GenerationExchange:
    """The answer to one request, as an ASGI application of its own.

    An error before the headers is an HTTP status; after them it is one event, and the stream ends
    without ``[DONE]``, which means complete. A client that leaves cancels the generation.
    """

    def __init__(
        self, service: GenerationService, job: Job, request_id: str, meter: Meter | None = None
    ) -> None:
        """Do nothing yet.

        Args:
            service: opens the generation.
            job: what to answer.
            request_id: appears in errors and in the log.
            meter: counts the tokens, if anybody wants that; it has begun.
        """
        self._service = service
        self._job = job
        self._request_id = request_id
        self._meter = meter
        ignored = ", ".join(job.ignored_fields)
        self._headers = [(_IGNORED_FIELDS_HEADER, ignored)] if ignored else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the request's body has been read."""
        answer = self._answer_stream if self._job.is_stream else self._answer_whole

        async def work() -> None:
            await answer(scope, receive, send)

        await run_until_disconnect(work, receive)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._service.collect(self._job, self._meter)
            response = make_json_response(
                answer.body, [*self._headers, *_tell_version(answer.adapter_version)]
            )
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            response = self._explain(error)
        await response(scope, receive, send)

    async def _answer_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventStreamWriter(send, self._service.limits.keepalive_s)
        try:
            with self._service.open(self._job, self._meter) as generation:
                await self._stream(generation, writer)
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            param_names = self._job.param_names
            if not writer.is_started:
                response = self._explain(error)
                await response(scope, receive, send)
                return
            await writer.write_error(error, self._request_id, param_names)
        finally:
            writer.abandon()
        await writer.close()

    def _explain(self, error: Exception) -> Response:
        return make_error_response(
            error,
            self._request_id,
            self._job.param_names,
            self._service.limits.validation_status,
        )

    async def _stream(self, generation: OpenGeneration, writer: EventStreamWriter) -> None:
        job = self._job
        admission = asyncio.ensure_future(generation.admit())
        try:
            # A refusal in this time is an HTTP status; later it can only be an event.
            await asyncio.wait({admission}, timeout=self._service.limits.header_wait_s)
            version = join_adapter_versions(admission.result()) if admission.done() else ""
            await writer.start([*self._headers, *_tell_version(version)])
            admissions = await admission
        finally:
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)
        encoder = sse.EventEncoder(self._service.make_reply(job, admissions[0]))
        events = AnswerEvents[bytes](encoder, job.form, begin_prompts(job, admissions))
        if opening := events.open():
            await writer.write(b"".join(opening))
        async with contextlib.aclosing(generation.messages()) as messages:
            async for prompt_index, message in messages:
                if frames := events.add(prompt_index, message):
                    await writer.write(b"".join(frames))
        await writer.write(b"".join([*events.finish(), sse.DONE]))


def _tell_version(version: str) -> list[tuple[str, str]]:
    return [(_ADAPTER_VERSION_HEADER, version)] if version else []
