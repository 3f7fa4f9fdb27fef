"""The run and the table of ``make bench-sampling``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from models.config import EngineConfig
from tests.benchmarks.engine_speed import running_engine
from tests.benchmarks.sampling_speed import (
    EVERYTHING,
    GREEDY,
    MIXES,
    TOP_P,
    WIDE,
    Workload,
    entropy_range,
    time_row_us,
    time_sampler_ms,
)
from tests.benchmarks.step_meter import metered_steps, summarize_decode_steps
from tests.benchmarks.table import Row, describe_machine, format_table
from tests.benchmarks.transformers_sampling import time_transformers_ms
from tests.benchmarks.workload import PromptSource, Sizes

NUM_THREADS = 2
ROW_COUNTS = (1, 8, 32, 128)
# The first is that of the default model.
VOCABULARY_SIZES = (49_152, 152_064)
_NUM_ROWS_COMPARED = 32
_COMPARED_MIXES = (GREEDY, "temperature 0.8", TOP_P, EVERYTHING, WIDE)
_PYTHON_MIXES = (GREEDY, TOP_P, EVERYTHING)
_NUM_PROMPT_TOKENS = 16
_NUM_NEW_TOKENS = 12


def run_sampling_bench(
    cache_folder: Path, say: Callable[[str], None], row_counts: tuple[int, ...] = ROW_COUNTS
) -> str:
    """Measure all, with two threads; return the table with what its figures are on top."""
    say("decode steps of the default model")
    step_ms = _time_steps_ms(cache_folder, row_counts)
    torch.set_num_threads(NUM_THREADS)
    rows = [Row(name="decode step of the default model, greedy", unit="ms", values=step_ms)]
    for vocabulary_size in VOCABULARY_SIZES:
        for mix in MIXES:
            say(f"{mix}, {vocabulary_size:,} tokens")
            sampler_ms = {
                count: time_sampler_ms(Workload(mix, vocabulary_size, count))
                for count in row_counts
            }
            name = f"{mix}; {vocabulary_size:,} tokens"
            rows.append(Row(name=name, unit="ms", values=sampler_ms, digits=2))
            if vocabulary_size == VOCABULARY_SIZES[0]:
                shares = {count: 100 * sampler_ms[count] / step_ms[count] for count in step_ms}
                rows.append(Row(name="... of a step", unit="%", values=shares, digits=1))
    rows += _compare(rows, say)
    say("Python")
    rows += [
        Row(
            name=f"{mix}; Python of one more row",
            unit="us",
            values={max(ROW_COUNTS): time_row_us(mix, max(ROW_COUNTS))},
            digits=1,
        )
        for mix in _PYTHON_MIXES
    ]
    table = format_table(rows, row_counts, counted="row")
    return "\n\n".join([describe_machine(), _describe(), table])


def make_sampling_page(report: str) -> str:
    """Return the page of the documentation that keeps a report."""
    return (
        "# Speed of sampling\n\nPrinted by `make bench-sampling`; `make bench-sampling SAVE=1` "
        f"writes this page.\n\n{report}\n"
    )


def _compare(rows: list[Row], say: Callable[[str], None]) -> list[Row]:
    ours = {row.name: row.values for row in rows}
    count, vocabulary_size = _NUM_ROWS_COMPARED, VOCABULARY_SIZES[0]
    found = []
    for mix in _COMPARED_MIXES:
        say(f"transformers: {mix}")
        theirs_ms = time_transformers_ms(Workload(mix, vocabulary_size, count))
        our_values: Mapping[int, float] = ours[f"{mix}; {vocabulary_size:,} tokens"]
        name = f"transformers' processors, row by row: {mix}; {vocabulary_size:,} tokens"
        found.append(Row(name=name, unit="ms", values={count: theirs_ms}, digits=1))
        if count in our_values:
            values = {count: theirs_ms / our_values[count]}
            found.append(Row(name="... / ours", unit="ratio", values=values, digits=1))
    return found


def _time_steps_ms(cache_folder: Path, row_counts: tuple[int, ...]) -> dict[int, float]:
    default = EngineConfig()
    config = dataclasses.replace(
        default,
        model=dataclasses.replace(default.model, num_threads=NUM_THREADS),
        # All prompts in a step or two: then the sequences decode together until they end.
        scheduler=dataclasses.replace(
            default.scheduler,
            max_num_seqs=max(row_counts),
            max_num_batched_tokens=2 * _NUM_PROMPT_TOKENS * max(row_counts),
        ),
    )
    prompts = PromptSource(Sizes(num_prompt_tokens=_NUM_PROMPT_TOKENS))
    with running_engine(config, cache_folder) as engine:
        # The first round makes the libraries' kernels for these shapes.
        for count in row_counts:
            engine.run(prompts.distinct(count), count, 4)
        with metered_steps() as steps:
            for count in row_counts:
                engine.run(prompts.distinct(count), count, _NUM_NEW_TOKENS)
    kv_tokens = range(_NUM_PROMPT_TOKENS + _NUM_NEW_TOKENS + 1)
    return {
        count: step.period_ms
        for count in row_counts
        if (step := summarize_decode_steps(steps, count, kv_tokens=kv_tokens)) is not None
    }


def _describe() -> str:
    peaked = entropy_range(Workload(TOP_P, VOCABULARY_SIZES[0], 32).logits())
    wide = entropy_range(Workload(WIDE, VOCABULARY_SIZES[0], 32).logits())
    return (
        f"`Sampler.sample` alone, medians, float32 logits on the CPU, `torch.set_num_threads"
        f"({NUM_THREADS})`; for comparison whole decode steps of SmolLM2-135M-Instruct in "
        f"bfloat16, about {_NUM_PROMPT_TOKENS + _NUM_NEW_TOKENS // 2} tokens of KV a row, which "
        f"sample greedily. The softmax of a row has an entropy of {peaked[0]:.1f} to "
        f"{peaked[1]:.1f} nats, that of a wide nucleus {wide[0]:.1f} to {wide[1]:.1f}. Everything "
        "on: temperature, top_k, top_p, min_p, typical_p, all three penalties, bias, bad words, "
        "min_tokens and logprobs 5. Python of one more row: all of the step but the draw and the "
        "sums of log probabilities, which are tensor work and are left out; the processors' "
        "tensors, over 64 tokens, are in it. For greedy rows transformers has no processor: the "
        "figure is that of an argmax for each row."
    )
