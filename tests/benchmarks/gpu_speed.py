"""The run and the table of ``make bench-gpu``: attention backends, and ``batch_invariant``."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from models.config import (
    MATMUL,
    VARLEN,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from models.engine.build import EngineParts, assemble, resolve_model_path
from models.loading.loader import load_model
from models.text.tokenizer import Text
from tests.benchmarks.adapter_speed import Comparison, Job, SteppedLoad, TimedStep
from tests.benchmarks.table import Row, describe_machine, format_table
from tests.benchmarks.workload import PromptSource, Sizes

_BACKENDS = (MATMUL, VARLEN)
_NUM_WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuSizes:
    """How much work the table is made of.

    Attributes:
        row_counts: requests that are open at the same time; each count is run once.
        num_prompt_tokens: length of every prompt.
        num_new_tokens: length of every answer.
    """

    row_counts: tuple[int, ...] = (1, 8, 32, 128)
    num_prompt_tokens: int = 158
    num_new_tokens: int = 64


FULL = GpuSizes()
# To see that everything runs; its figures mean nothing.
QUICK = GpuSizes(row_counts=(1, 2), num_prompt_tokens=20, num_new_tokens=3)


def run_gpu_bench(
    cache_folder: Path,
    say: Callable[[str], None],
    sizes: GpuSizes,
    *,
    device: str = "cuda",
    backends: Sequence[str] = _BACKENDS,
) -> str:
    """Measure all; return the table with what its figures are on top.

    Args:
        cache_folder: where the converted model is kept.
        say: told what is measured.
        sizes: how much work.
        device: where the model runs.
        backends: of attention.
    """
    prompts = PromptSource(Sizes(num_prompt_tokens=sizes.num_prompt_tokens))
    rows: list[Row] = []
    for backend in backends:
        output: dict[bool, dict[int, float]] = {}
        for is_batch_invariant in (False, True):
            name = f"{backend}, batch_invariant" if is_batch_invariant else backend
            say(name)
            steps = _measure(
                ModelConfig(
                    device=device,
                    attention_backend=backend,
                    is_batch_invariant=is_batch_invariant,
                ),
                cache_folder,
                prompts,
                sizes,
            )
            output[is_batch_invariant] = {
                count: sum(step.num_tokens for step in each) / sum(step.duration_s for step in each)
                for count, each in steps.items()
            }
            decode_ms = {
                count: found
                for count, each in steps.items()
                if (found := Comparison.step_ms(each, is_decode=True)) is not None
            }
            rows += [
                Row(name=f"{name}: output", unit="tokens/s", values=output[is_batch_invariant]),
                Row(name="... a decode step", unit="ms", values=decode_ms, digits=2),
            ]
        ratios = {count: output[True][count] / output[False][count] for count in output[False]}
        rows.append(Row(name="... output / without it", unit="ratio", values=ratios, digits=2))
    about = (
        f"SmolLM2-135M-Instruct in bfloat16 on {_device_name(device)}, the engine without HTTP. "
        f"Random prompts of {sizes.num_prompt_tokens} tokens, none like another, "
        f"{sizes.num_new_tokens} new tokens, greedy; as many requests as rows, put at once. "
        "Decode steps: medians."
    )
    table = format_table(rows, sizes.row_counts, counted="row")
    return "\n\n".join([describe_machine(), about, table])


def _measure(
    config: ModelConfig, cache_folder: Path, prompts: PromptSource, sizes: GpuSizes
) -> dict[int, list[TimedStep]]:
    """Return the steps of a load of each number of rows, on an engine of its own."""
    parts = _build(config, cache_folder, max(sizes.row_counts))
    assert parts.attention_backend == config.attention_backend
    found = {}
    for count in sizes.row_counts:
        # The libraries load their kernels for these shapes.
        _run(parts, prompts, count, _NUM_WARM_UP_TOKENS)
        found[count] = _run(parts, prompts, count, sizes.num_new_tokens)
    del parts
    gc.collect()
    return found


def _run(
    parts: EngineParts, prompts: PromptSource, num_rows: int, num_new_tokens: int
) -> list[TimedStep]:
    jobs = [
        Job(prompt=prompt, num_new_tokens=num_new_tokens, adapter=None)
        for prompt in itertools.islice(prompts.distinct(num_rows), num_rows)
    ]
    load = SteppedLoad(parts.engine, jobs, num_rows)
    while load.has_work:
        load.step()
    return load.steps


def _build(config: ModelConfig, cache_folder: Path, num_rows: int) -> EngineParts:
    path = resolve_model_path(config, cache_folder, lambda _: None)
    loaded = load_model(config, path, lambda _: None)
    text = Text.load(path, chat_template="", vocabulary_size=loaded.vocabulary_size)
    return assemble(
        loaded,
        text,
        EngineConfig(
            model=config,
            kv_cache=KVCacheConfig(budget_bytes=2 << 30),
            scheduler=SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=1024),
        ),
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device
