"""The run and the table of ``make bench-adapters``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from models.config import AdapterConfig, EngineConfig
from models.engine.adapter_build import build_adapter_desk
from models.engine.async_engine import AsyncEngine
from models.engine.build import EngineParts, assemble, plan_num_threads, resolve_model_path
from models.loading.loader import LoadedModel, load_model
from models.text.adapter_text import AdapterTexts
from models.text.tokenizer import Text
from tests.benchmarks.adapter_cold import time_cold_extra_ms
from tests.benchmarks.adapter_speed import Comparison, Job, compare
from tests.benchmarks.adapter_workload import (
    RANK,
    AdapterShelf,
    AdapterSizes,
    Choice,
    Mix,
    make_mixes,
)
from tests.benchmarks.table import Row, describe_machine, format_table
from tests.benchmarks.workload import PromptSource, Sizes

_NUM_WARM_UP_TOKENS = 2
_NUM_WARM_UP_PROMPT_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Built:
    """An engine that is not started, and what it was built from."""

    config: EngineConfig
    loaded: LoadedModel
    text: Text
    parts: EngineParts


def run_adapter_bench(cache_folder: Path, say: Callable[[str], None], sizes: AdapterSizes) -> str:
    """Measure all; return the table with what its figures are on top."""
    load_before = os.getloadavg()[0]
    prompts = PromptSource(Sizes(num_prompt_tokens=sizes.num_prompt_tokens))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        say("two engines, one with adapters")
        plain = _build(AdapterConfig(), cache_folder)
        adapted = _build(AdapterConfig(path=str(root)), cache_folder)
        assert adapted.parts.adapters is not None
        shelf = AdapterShelf(adapted.parts.adapters.modules)
        mixes = make_mixes(sizes)
        found = {}
        for mix in mixes:
            say(mix.name)
            found[mix.name] = _compare(plain, adapted, mix, shelf, prompts, sizes)
        say("cold adapters")
        folders = [root / f"cold-{number}" for number in range(sizes.num_cold + 1)]
        for number, folder in enumerate(folders):
            shelf.save(Choice(number=number), folder)
        num_file_bytes = sum(path.stat().st_size for path in folders[0].iterdir())
        cold_ms = _time_cold(adapted, folders, prompts)
    rows = [row for name, each in found.items() for row in _rows(name, each, sizes.num_clients)]
    rows.append(
        Row(name="first token, cold adapter minus warm one", unit="ms", values={1: cold_ms})
    )
    about = _describe(sizes, load_before, num_file_bytes)
    return "\n\n".join([describe_machine(), about, format_table(rows, (1, sizes.num_clients))])


def make_adapter_page(report: str) -> str:
    """Return the page of the documentation that keeps a report."""
    return (
        "# Speed with adapters\n\nPrinted by `make bench-adapters`; `make bench-adapters SAVE=1` "
        f"writes this page.\n\n{report}\n"
    )


def _build(adapters: AdapterConfig, cache_folder: Path) -> _Built:
    config = EngineConfig(adapters=adapters)
    torch.set_num_threads(plan_num_threads(config.model))
    path = resolve_model_path(config.model, cache_folder, lambda _: None)
    loaded = load_model(config.model, path, lambda _: None)
    text = Text.load(path, chat_template="", vocabulary_size=loaded.vocabulary_size)
    return _Built(config, loaded, text, assemble(loaded, text, config))


def _compare(
    plain: _Built,
    adapted: _Built,
    mix: Mix,
    shelf: AdapterShelf,
    prompts: PromptSource,
    sizes: AdapterSizes,
) -> Comparison:
    jobs = [
        Job(
            prompt=prompt,
            num_new_tokens=length,
            adapter=None if choice is None else shelf.get(choice),
        )
        for prompt, length, choice in zip(
            prompts.distinct(len(mix.choices)), mix.lengths, mix.choices, strict=True
        )
    ]
    # The libraries make their kernels for these shapes, and the first adapters get their slots.
    warm_up = [
        Job(
            prompt=prompt[:_NUM_WARM_UP_PROMPT_TOKENS],
            num_new_tokens=_NUM_WARM_UP_TOKENS,
            adapter=job.adapter,
        )
        for job, prompt in zip(jobs, prompts.distinct(sizes.num_clients), strict=False)
    ]
    engines = plain.parts.engine, adapted.parts.engine
    compare(*engines, warm_up, sizes.num_clients)
    return compare(*engines, jobs, sizes.num_clients)


def _time_cold(adapted: _Built, folders: list[Path], prompts: PromptSource) -> float:
    parts, config = adapted.parts, adapted.config
    assert parts.adapters is not None
    desk = build_adapter_desk(
        adapted.loaded,
        parts.adapters.modules,
        config.adapters,
        config.model,
        # Nothing is downloaded.
        cache_folder=folders[0].parent,
        texts=AdapterTexts(adapted.text),
    )
    engine = AsyncEngine(parts.engine, adapted.text, adapters=desk)
    engine.start()
    try:
        return time_cold_extra_ms(engine, folders, prompts.distinct(3 * len(folders)))
    finally:
        asyncio.run(engine.shutdown(drain_timeout_s=0.0))


def _rows(name: str, found: Comparison, num_clients: int) -> list[Row]:
    def row(what: str, unit: str, value: float | None, digits: int) -> Row:
        values = {} if value is None else {num_clients: value}
        return Row(name=what, unit=unit, values=values, digits=digits)

    decode_ms = found.step_ms(found.with_adapters, is_decode=True)
    plain_ms = found.step_ms(found.without, is_decode=True)
    added_ms = None if decode_ms is None or plain_ms is None else decode_ms - plain_ms
    return [
        row(f"{name}: output", "tokens/s", found.tokens_per_s, 0),
        row("... / without adapters", "ratio", found.output_ratio, 2),
        row("... decode steps only", "ratio", found.step_ratio(is_decode=True), 2),
        row("... steps with prompts", "ratio", found.step_ratio(is_decode=False), 2),
        row("... added to a decode step", "ms", added_ms, 1),
    ]


def _describe(sizes: AdapterSizes, load_before: float, num_file_bytes: int) -> str:
    return (
        f"SmolLM2-135M-Instruct in bfloat16 on the CPU, the engine without HTTP. LoRA of rank "
        f"{RANK} on all linear layers, random weights. Random prompts of "
        f"{sizes.num_prompt_tokens} tokens, none like another, {sizes.num_new_tokens} new tokens "
        f"(where a working set is larger than the 32 slots, half to one and a half times as many), "
        f"greedy; {sizes.num_requests} requests, {sizes.num_churn_requests} with a working set. "
        "Ratios are against an engine that has no adapters and gets the same requests; the two "
        "run in turn, step by step. Steps: medians. Cold: "
        f"{num_file_bytes / 1e6:.1f} MB on the local disk, not in the page cache, median of "
        f"{sizes.num_cold}. Load of the machine, over a minute: {load_before:.1f} before, "
        f"{os.getloadavg()[0]:.1f} at the end; this run itself makes "
        f"{torch.get_num_threads()}."
    )
