"""The ingress deployment: HTTP in front of the models, and the same for Python handles.

Loads no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette

from deployments.access import Access, AccessConfig
from deployments.admin_key import AdminKey
from deployments.admin_service import AdminService
from deployments.budget_actor import Budgets, connect_budgets
from deployments.http_io import check_body
from deployments.prompt_log import PromptLog, PromptLogConfig
from deployments.refusal_log import quiet_refusals
from deployments.routes import build_http_app
from deployments.service import GenerationService, ModelHandle, ServiceLimits
from deployments.tokenizer_service import TokenizerService
from deployments.translate import Job

_SEED_BITS = 63

Body = dict[str, Any]


def _now_s() -> int:
    return int(datetime.datetime.now(datetime.UTC).timestamp())


def _draw_seed() -> int:
    return secrets.randbits(_SEED_BITS)


class Ingress:
    """What Serve runs behind its HTTP proxy, and what ``serve.get_app_handle`` reaches.

    Handle methods validate as HTTP does and raise the same errors; there is no status to map. What
    HTTP tells in a header stands in the answer: if fields of the body have no effect, the answer
    (of a stream the first event) has their names as ``ignored_fields``; if an adapter is named, it
    has the version of its weights as ``adapter_version``.

    Owner: the replica's event loop.
    """

    def __init__(
        self,
        limits: ServiceLimits,
        handles: Mapping[str, ModelHandle],
        *,
        admin_key: AdminKey | None = None,
        prompt_log: PromptLogConfig | None = None,
        access: AccessConfig | None = None,
        draw_seed: Callable[[], int] = _draw_seed,
        now_s: Callable[[], int] = _now_s,
    ) -> None:
        """Start the service.

        Args:
            limits: of requests.
            handles: model id -> handle of its deployment.
            admin_key: opens the admin routes; without one there are none.
            prompt_log: where requests are logged that agree to it; None logs none.
            access: who may ask over HTTP; None lets everybody, but no web pages.
            draw_seed: gives seeds in [0, 2**63) to requests without one.
            now_s: Unix time in seconds.
        """
        quiet_refusals()
        self._service = GenerationService(
            limits,
            handles,
            draw_seed,
            now_s,
            None if prompt_log is None else PromptLog(prompt_log, f"requests-{os.getpid()}"),
        )
        self._tokenizers = TokenizerService(handles, self._service.directory, limits.request)
        self._access = None
        if access is not None and access.keys_path is not None:
            self._access = Access(access.keys_path, access.default_max_tokens, _connect_budgets)
        self._cors_origins = () if access is None else access.cors_origins
        self._admin = (
            None
            if admin_key is None
            else AdminService(admin_key, limits.adapter_model_ids, handles, self._service.directory)
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the ASGI application; Serve asks for it in the replica."""
        return build_http_app(
            self._service,
            self._tokenizers,
            self._admin,
            access=self._access,
            cors_origins=self._cors_origins,
            is_behind_serve=_is_serve_replica(),
        )

    async def chat(self, body: Body) -> Body:
        """Answer a chat request whole.

        Args:
            body: as for POST /v1/chat/completions; ``stream`` does not count.

        Returns:
            The ``chat.completion`` object.

        Raises:
            ModelServiceError, SamplingError: what HTTP would tell as an error.
        """
        return await self._collect(body, is_chat=True)

    async def complete(self, body: Body) -> Body:
        """Answer a completion request whole.

        Args:
            body: as for POST /v1/completions; ``stream`` does not count.

        Returns:
            The ``text_completion`` object.

        Raises:
            ModelServiceError, SamplingError: what HTTP would tell as an error.
        """
        return await self._collect(body, is_chat=False)

    async def stream_chat(self, body: Body) -> AsyncIterator[Body]:
        """Answer a chat request as a stream.

        Args:
            body: as for POST /v1/chat/completions; ``stream`` does not count.

        Yields:
            The ``chat.completion.chunk`` objects; the iteration ends when they are complete.

        Raises:
            ModelServiceError, SamplingError: what HTTP would tell as an error.
        """
        async with contextlib.aclosing(self._stream(body, is_chat=True)) as events:
            async for event in events:
                yield event

    async def stream_complete(self, body: Body) -> AsyncIterator[Body]:
        """Answer a completion request as a stream.

        Args:
            body: as for POST /v1/completions; ``stream`` does not count.

        Yields:
            The ``text_completion`` objects; the iteration ends when they are complete.

        Raises:
            ModelServiceError, SamplingError: what HTTP would tell as an error.
        """
        async with contextlib.aclosing(self._stream(body, is_chat=False)) as events:
            async for event in events:
                yield event

    async def begin_shutdown(self, grace_s: float) -> int:
        """Take no more requests and end the open ones in order.

        Args:
            grace_s: seconds that they get to finish; then each gets its terminal error.

        Returns:
            How many did not finish in time.
        """
        num_cut = await self._service.drain(grace_s)
        if self._access is not None:
            await self._access.close()
        return num_cut

    async def _collect(self, body: Body, *, is_chat: bool) -> Body:
        job = await self._make_job(body, is_chat=is_chat, is_stream=False)
        answer = await self._service.collect(job)
        version = answer.adapter_version
        told = {"adapter_version": version} if version else {}
        return {**answer.body, **told, **_tell_ignored(job)}

    async def _stream(self, body: Body, *, is_chat: bool) -> AsyncGenerator[Body, None]:
        job = await self._make_job(body, is_chat=is_chat, is_stream=True)
        untold = _tell_ignored(job)
        async with contextlib.aclosing(self._service.stream(job)) as events:
            async for event in events:
                yield {**event, **untold}
                untold = {}

    async def _make_job(self, body: Body, *, is_chat: bool, is_stream: bool) -> Job:
        check_body(body, self._service.limits.max_body_bytes)
        if isinstance(body, dict):
            body = {**body, "stream": is_stream}
            if not is_stream:
                body.pop("stream_options", None)
        return await self._service.make_job(body, is_chat=is_chat)


def _connect_budgets(is_successor: bool) -> Budgets:
    application = serve.get_replica_context().app_name
    return connect_budgets(application, is_successor=is_successor)


def _is_serve_replica() -> bool:
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def _tell_ignored(job: Job) -> Body:
    """Return what an answer says of fields without effect; nothing if all had one."""
    return {"ignored_fields": list(job.ignored_fields)} if job.ignored_fields else {}
