"""Loads on an AsyncEngine in this process: no Ray, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from models.config import EngineConfig
from models.engine.async_engine import AsyncEngine
from models.engine.build import build_engine
from models.requests import Admission, GenerationEnd, GenerationRequest, TokenDelta, TokenPrompt
from sampling.params import SamplingParams
from tests.benchmarks.closed_loop import Answer, LoadResult, TokenIds, run_closed_loop


class EngineClients:
    """Clients of one engine that runs between loads, idle.

    Owner: one thread; every load has an event loop of its own.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._request_ids = itertools.count()

    def run(self, prompts: Sequence[TokenIds], num_clients: int, num_new_tokens: int) -> LoadResult:
        """Ask all prompts, greedily, for answers of an exact length."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)

        async def ask(prompt: TokenIds) -> Answer:
            return await self._ask(prompt, sampling)

        return asyncio.run(run_closed_loop(prompts, num_clients, ask))

    async def _ask(self, prompt: TokenIds, sampling: SamplingParams) -> Answer:
        request = GenerationRequest(
            request_id=f"bench-{next(self._request_ids)}",
            prompt=TokenPrompt(token_ids=tuple(prompt)),
            sampling=sampling,
            seed=0,
            is_max_tokens_explicit=True,
        )
        asked_at_s = time.monotonic()
        first_token_s = num_cached_tokens = num_tokens = None
        async for events in self._engine.generate(request):
            for event in events:
                if isinstance(event, Admission):
                    num_cached_tokens = event.num_cached_tokens
                elif isinstance(event, TokenDelta) and first_token_s is None:
                    first_token_s = time.monotonic() - asked_at_s
                elif isinstance(event, GenerationEnd):
                    num_tokens = event.usage.num_completion_tokens
        assert first_token_s is not None
        assert num_tokens is not None
        assert num_cached_tokens is not None
        return Answer(
            first_token_s=first_token_s, num_tokens=num_tokens, num_cached_tokens=num_cached_tokens
        )


@contextlib.contextmanager
def running_engine(config: EngineConfig, cache_folder: Path) -> Iterator[EngineClients]:
    """Build an engine as a model replica does; end it behind the context."""
    engine = build_engine(config, cache_folder=cache_folder, progress=lambda _: None)
    engine.start()
    try:
        yield EngineClients(engine)
    finally:
        asyncio.run(engine.shutdown(drain_timeout_s=0.0))
