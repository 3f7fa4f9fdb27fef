"""First tokens of adapters that lie on the disk, beside those of one that is loaded."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from models.engine.async_engine import AsyncEngine
from models.requests import GenerationRequest, TokenDelta, TokenPrompt
from sampling.params import SamplingParams
from tests.benchmarks.closed_loop import TokenIds


def time_cold_extra_ms(
    engine: AsyncEngine, folders: Sequence[Path], prompts: Sequence[TokenIds]
) -> float:
    """Return the median milliseconds by which a cold adapter's first token comes later.

    Each cold adapter is asked for between two requests for the first, warm one; the difference is
    taken to their mean.

    Args:
        engine: started, idle; its adapter ids are the folders' names.
        folders: of adapters that were never asked for; the first becomes the warm one.
        prompts: none like another, three for each folder.
    """
    return asyncio.run(_time(engine, folders, prompts))


async def _time(engine: AsyncEngine, folders: Sequence[Path], prompts: Sequence[TokenIds]) -> float:
    warm, *cold = folders
    left = iter(prompts)
    await _first_token_ms(engine, warm.name, next(left))
    extra_ms = []
    for folder in cold:
        drop_cached_pages(folder)
        before_ms = await _first_token_ms(engine, warm.name, next(left))
        cold_ms = await _first_token_ms(engine, folder.name, next(left))
        after_ms = await _first_token_ms(engine, warm.name, next(left))
        extra_ms.append(cold_ms - (before_ms + after_ms) / 2)
    return statistics.median(extra_ms)


async def _first_token_ms(engine: AsyncEngine, adapter_id: str, prompt: TokenIds) -> float:
    request = GenerationRequest(
        request_id=f"cold-{time.monotonic_ns()}",
        prompt=TokenPrompt(token_ids=tuple(prompt)),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        seed=0,
        is_max_tokens_explicit=True,
        adapter_id=adapter_id,
    )
    asked_at_s = time.monotonic()
    first_token_ms = None
    async for events in engine.generate(request):
        if first_token_ms is None and any(isinstance(event, TokenDelta) for event in events):
            first_token_ms = 1000 * (time.monotonic() - asked_at_s)
    assert first_token_ms is not None
    return first_token_ms


def drop_cached_pages(folder: Path) -> None:
    """Have the system read a folder's files from the disk next time."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
