"""Many mixed requests through an AsyncEngine, in a process whose memory nothing else touches.

``run_engine_soak`` starts it. A test's own process is no place to watch memory: what earlier tests
have freed would hide what the engine keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from models.config import EngineConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from models.engine.async_engine import AsyncEngine
from models.engine.build import EngineParts, assemble
from models.loading.loader import load_model
from models.requests import GenerationEnd, GenerationRequest, TokenPrompt
from models.text.tokenizer import Text
from sampling.params import SamplingParams
from tests.harness import TokenText, make_parts
from tests.soak.mixed_load import Bounds, MixedRequest, mixed_requests
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

# oneDNN and torch each keep what they compiled for a shape, 0.3 MB of it in bfloat16, until they
# have met 1,024 shapes: hundreds of megabytes that take hours to gather. With little room for
# them, memory comes to rest early, and what grows behind that is ours.
SMALL_KERNEL_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}

_ROOT = Path(__file__).parents[2]
_IDLE_LIMIT_S = 30.0
_TINY_BOUNDS = Bounds(vocabulary_size=VOCABULARY_SIZE, longest_prompt_tokens=64, most_new_tokens=24)
BUNDLED_BOUNDS = Bounds(vocabulary_size=49_000, longest_prompt_tokens=400, most_new_tokens=64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoakOrder:
    """How much of what.

    Attributes:
        model_path: folder of a converted model, or "" for a tiny random one.
        num_spells: times that the engine works and comes to rest.
        num_requests_per_spell: requests in between.
        num_clients: how many are open at the same time.
    """

    model_path: str
    num_spells: int
    num_requests_per_spell: int
    num_clients: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left while nothing is open.

    Attributes:
        rss_bytes: resident memory of the process.
        num_objects: containers that Python's garbage collector knows, garbage excluded.
        num_held_blocks: KV blocks that are not free.
        num_streams: streams that the engine knows.
        num_rows: sequences whose sampling state the runner holds; those of the last step are
            dropped with the next one.
        num_requests: answered since the begin, to their ends or left.
        num_left: of these, left by their clients.
        num_cached_tokens: found in the prefix cache since the begin.
        num_preemptions: since the begin.
    """

    rss_bytes: int
    num_objects: int
    num_held_blocks: int
    num_streams: int
    num_rows: int
    num_requests: int
    num_left: int
    num_cached_tokens: int
    num_preemptions: int


def run_engine_soak(order: SoakOrder, *, timeout_s: float) -> list[Rest]:
    """Run an order in a process of its own; return what was left at each rest."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=_ROOT,
        env={**os.environ, **SMALL_KERNEL_CACHES},
        input=json.dumps(dataclasses.asdict(order)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("the run failed, see above")
    return [Rest(**rest) for rest in json.loads(done.stdout)]


class _Soak:
    """The clients of one engine."""

    def __init__(self, parts: EngineParts, engine: AsyncEngine, requests: Iterator[MixedRequest]):
        self._parts = parts
        self._engine = engine
        self._requests = requests
        self._num_requests = 0
        self._num_left = 0
        self._num_cached_tokens = 0

    async def work(self, num_requests: int, num_clients: int) -> Rest:
        """Put so many requests, then come to rest."""
        waiting = itertools.islice(self._requests, num_requests)

        async def client() -> None:
            for request in waiting:
                await self._ask(request)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        await self._wait_until_idle()
        rest = self._look()
        sys.stderr.write(f"{rest}\n")
        return rest

    async def _ask(self, mixed: MixedRequest) -> None:
        self._num_requests += 1
        request = GenerationRequest(
            request_id=f"soak-{self._num_requests}",
            prompt=TokenPrompt(token_ids=mixed.prompt_token_ids),
            sampling=SamplingParams(
                temperature=mixed.temperature,
                max_tokens=mixed.num_new_tokens,
                num_top_logprobs=mixed.num_top_logprobs,
                ignore_eos=True,
            ),
            seed=self._num_requests,
            is_max_tokens_explicit=True,
            num_choices=mixed.num_choices,
        )
        num_parts = 0
        async with contextlib.aclosing(self._engine.generate(request)) as batches:
            async for events in batches:
                if isinstance(events[-1], GenerationEnd):
                    usage = events[-1].usage
                    self._num_cached_tokens += usage.num_cached_tokens
                    expected = mixed.num_new_tokens * mixed.num_choices
                    assert usage.num_completion_tokens == expected, usage
                    return
                num_parts += 1
                if num_parts == mixed.num_parts_taken:
                    self._num_left += 1
                    return
        raise AssertionError("the stream ended without its end")

    async def _wait_until_idle(self) -> None:
        end_s = time.monotonic() + _IDLE_LIMIT_S
        while (stats := self._engine.stats()).num_running or stats.num_waiting:
            assert time.monotonic() < end_s, stats
            await asyncio.sleep(0.01)

    def _look(self) -> Rest:
        self._parts.engine.check_invariants()
        gc.collect()
        # Before memory is looked at: this makes a list of megabytes, the first time as later.
        num_objects = len(gc.get_objects())
        stats = self._engine.stats()
        return Rest(
            num_objects=num_objects,
            rss_bytes=psutil.Process().memory_info().rss,
            num_held_blocks=stats.num_blocks - stats.num_free_blocks,
            num_streams=self._engine.num_streams,
            num_rows=self._parts.runner.num_sequences,
            num_requests=self._num_requests,
            num_left=self._num_left,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=stats.num_preemptions,
        )


async def _run(order: SoakOrder) -> list[Rest]:
    torch.set_num_threads(len(os.sched_getaffinity(0)) if order.model_path else 1)
    parts, text = _assemble(order.model_path)
    bounds = BUNDLED_BOUNDS if order.model_path else _TINY_BOUNDS
    engine = AsyncEngine(parts.engine, text)
    engine.start()
    try:
        soak = _Soak(parts, engine, mixed_requests(bounds))
        return [
            await soak.work(order.num_requests_per_spell, order.num_clients)
            for _ in range(order.num_spells)
        ]
    finally:
        await engine.shutdown(drain_timeout_s=0.0)


def _assemble(model_path: str) -> tuple[EngineParts, Text | TokenText]:
    """Return an engine whose KV pool is too small for all clients, so that it has to preempt."""
    if not model_path:
        llama = next(family for family in FAMILIES if family.name == "llama")
        text = TokenText()
        model = make_model(llama, dtype=torch.float32)
        return make_parts(model, num_blocks=72, max_num_batched_tokens=64, text=text), text
    loaded = load_model(ModelConfig(), model_path, lambda _: None)
    tokenizer = Text.load(model_path, vocabulary_size=loaded.vocabulary_size)
    config = EngineConfig(
        kv_cache=KVCacheConfig(budget_bytes=48 << 20),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    return assemble(loaded, tokenizer, config), tokenizer


def main() -> None:
    """Read a SoakOrder from standard input, run it, print the rests."""
    order = SoakOrder(**json.load(sys.stdin))
    rests = asyncio.run(_run(order))
    json.dump([dataclasses.asdict(rest) for rest in rests], sys.stdout)


if __name__ == "__main__":
    main()
