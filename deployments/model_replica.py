"""The deployment that holds one model: a thin front of its AsyncEngine. Decides nothing.

The engine, and with it torch, is imported by the constructor only, so that whoever names the
deployment (the builder, the ingress) stays light.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.adapter_metrics import AdapterMetrics, AdapterReading
from deployments.admin_service import AdapterAction
from deployments.calls import GenerationCall, to_generation_request
from deployments.encoding import encode_messages
from deployments.records import Message
from deployments.refusal_log import quiet_refusals
from deployments.tokenizer_calls import DetokenizeCall, TokenizeCall, TokensRecord
from deployments.tokenizer_desk import TokenizerDesk
from models.config import EngineConfig
from models.text.bad_words import encode_bad_words

if TYPE_CHECKING:
    from models.engine.async_engine import AsyncEngine

# Serve writes this logger to the replica's log file; the launcher shows these lines.
_logger = logging.getLogger("ray.serve")
_PROGRESS = "progress: %s"


class ModelReplica:
    """One replica of a model.

    Owner: the replica's event loop.

    Lifetime: the constructor returns with the engine running; Serve calls ``__del__`` when it has
    waited for the open requests.
    """

    def __init__(
        self, config: EngineConfig, cache_folder: str, request_timeout_s: float = 0.0
    ) -> None:
        """Load the model and start its engine.

        Args:
            config: all of the engine.
            cache_folder: where converted models are kept.
            request_timeout_s: time limit of requests that name none; 0 sets no limit.

        Raises:
            ConfigError: the model cannot be served as configured.
        """
        from models.engine.build import build_engine

        quiet_refusals()
        folder = Path(cache_folder).expanduser()
        self._default_timeout_s = request_timeout_s or None
        self._engine: AsyncEngine = build_engine(
            config, cache_folder=folder, progress=_report_progress
        )
        self._tokenizers = TokenizerDesk(self._engine.text, self._engine.adapters)
        self._is_stopped = False
        self._engine.start()
        # Of the engine, not of this object: whoever lets go of it must find nothing that holds it.
        self._metrics = AdapterMetrics(
            config.model.model_id, functools.partial(_read_adapters, self._engine)
        )
        if config.adapters.is_enabled:
            self._metrics.start()

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Message, None]:
        """Yield the messages of one prompt; ``deployments.records`` has their schema.

        Args:
            call: as an ingress built it.

        Raises:
            ModelServiceError, SamplingError: whatever refused or ended the generation.
        """
        text = self._engine.text
        bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
        if call["bad_words"]:
            bad_words_token_ids = await asyncio.to_thread(
                encode_bad_words, call["bad_words"], text.encode
            )
        request = to_generation_request(
            call,
            bad_words_token_ids=bad_words_token_ids,
            default_timeout_s=self._default_timeout_s,
        )
        # An adapter may spell its tokens in its own way.
        spellers = [text]
        batches = self._engine.generate(request, tell_text=spellers.append)
        async with contextlib.aclosing(batches):
            async for events in batches:
                for message in encode_messages(events, spellers[-1]):
                    yield message

    async def tokenize(self, call: TokenizeCall) -> TokensRecord:
        """Return the token ids of a prompt; raises as ``TokenizerDesk.tokenize`` does."""
        return await self._tokenizers.tokenize(call)

    async def detokenize(self, call: DetokenizeCall) -> str:
        """Return the text of token ids; raises as ``TokenizerDesk.detokenize`` does."""
        return await self._tokenizers.detokenize(call)

    async def list_adapters(self) -> list[str]:
        """Return the ids of the adapters that can be named, sorted and bounded."""
        return list(await self._engine.adapters.list_ids())

    async def adapter_status(self) -> dict[str, Any]:
        """Return which adapters this replica holds, and how they are used."""
        adapters = [dataclasses.asdict(status) for status in self._engine.adapters.status()]
        return {"replica_id": _replica_id(), "adapters": adapters}

    async def act_on_adapter(self, action: str, adapter_id: str) -> dict[str, Any]:
        """Load, pin, unpin or unload an adapter in this replica.

        Args:
            action: a value of ``deployments.admin_service.AdapterAction``.
            adapter_id: which.

        Returns:
            This replica's id and, of a load, the version that was loaded.

        Raises:
            ModelServiceError: why it cannot be done.
        """
        desk = self._engine.adapters
        version = None
        match AdapterAction(action):
            case AdapterAction.LOAD:
                version = (await desk.prefetch(adapter_id)).version
            case AdapterAction.PIN:
                desk.pin(adapter_id)
            case AdapterAction.UNPIN:
                desk.unpin(adapter_id)
            case AdapterAction.UNLOAD:
                desk.unload(adapter_id)
        return {"replica_id": _replica_id(), "version": version}

    async def ping(self) -> None:
        """Answer, if the engine is well.

        Raises:
            EngineDeadError: it is not.
        """
        self._engine.check_health()

    async def stats(self) -> dict[str, Any]:
        """Return the state and the totals of the engine."""
        return dataclasses.asdict(self._engine.stats())

    def check_health(self) -> None:
        """Tell Serve whether this replica must be replaced.

        Raises:
            EngineDeadError: it must.
        """
        self._engine.check_health()

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Stop the engine. Serve awaits the result; Python, which cannot, finds it done."""
        if getattr(self, "_is_stopped", True):
            return None
        self._is_stopped = True
        self._metrics.stop()
        self._tokenizers.close()
        return self._engine.shutdown(drain_timeout_s=0.0)


def _read_adapters(engine: AsyncEngine) -> AdapterReading:
    adapters = engine.adapters
    return AdapterReading(
        totals=adapters.totals(),
        host_bytes=adapters.host_bytes,
        num_resident=len(engine.stats().resident_adapters),
    )


def _replica_id() -> str:
    """Return Serve's name of this replica; "" outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return ""


def _report_progress(line: str) -> None:
    _logger.info(_PROGRESS, line)
