"""Turns measurements into the rows of the table and the page that keeps it."""

from __future__ import annotations

import statistics

from tests.benchmarks.measurements import ENGINE, HTTP, KV_TOKENS, NUM_KV_TOKENS, Measurements
from tests.benchmarks.step_meter import DecodeStep, summarize_decode_steps
from tests.benchmarks.table import Row, describe_machine, format_table
from tests.benchmarks.workload import Sizes

_TRANSPORTS = {ENGINE: "engine", HTTP: "HTTP"}


def make_report(found: Measurements, sizes: Sizes) -> str:
    """Return the table, with what its figures are on top."""
    rows = [
        *_speed_rows(found, sizes),
        *_first_token_rows(found, sizes),
        *_step_rows(found, sizes),
        *_start_rows(found),
    ]
    return "\n\n".join([describe_machine(), _describe(sizes), format_table(rows, _counts(sizes))])


def make_page(report: str) -> str:
    """Return the page of the documentation that keeps a report."""
    return (
        f"# Speed\n\nPrinted by `make bench`; `make bench SAVE=1` writes this page.\n\n{report}\n"
    )


def _counts(sizes: Sizes) -> tuple[int, ...]:
    return sizes.client_counts


def _describe(sizes: Sizes) -> str:
    return (
        f"SmolLM2-135M-Instruct in bfloat16 on the CPU. Random prompts of "
        f"{sizes.num_prompt_tokens} tokens, none like another, {sizes.num_new_tokens} new tokens, "
        f"greedy. Each client puts {sizes.num_requests_per_client} questions, one after the other; "
        f"medians of {sizes.num_rounds} rounds, first tokens medians of medians. Decode steps: "
        f"means, about {NUM_KV_TOKENS} tokens of KV a row; clients are rows there."
    )


def _speed_rows(found: Measurements, sizes: Sizes) -> list[Row]:
    rows = []
    speeds = {
        transport: {
            count: statistics.median(result.tokens_per_s for result in results)
            for count in sizes.client_counts
            if (results := found.loads.get((transport, count)))
        }
        for transport in _TRANSPORTS
    }
    for transport, name in _TRANSPORTS.items():
        if speeds[transport]:
            rows.append(Row(name=f"{name}: output", unit="tokens/s", values=speeds[transport]))
    ratios = {
        count: speeds[HTTP][count] / speeds[ENGINE][count]
        for count in speeds[HTTP].keys() & speeds[ENGINE].keys()
    }
    if ratios:
        rows.append(Row(name="HTTP / engine, output", unit="ratio", values=ratios, digits=2))
    return rows


def _first_token_rows(found: Measurements, sizes: Sizes) -> list[Row]:
    rows = []
    for transport, name in _TRANSPORTS.items():
        values = {
            count: statistics.median(result.first_token_ms for result in results)
            for count in sizes.client_counts
            if (results := found.loads.get((transport, count)))
        }
        if values:
            rows.append(Row(name=f"{name}: first token", unit="ms", values=values))
    num_shared = sizes.num_long_prompt_tokens - sizes.num_own_tokens
    for transport, name in _TRANSPORTS.items():
        if (result := found.prefix_loads.get(transport)) is None:
            continue
        long = f"{name}: first token, {sizes.num_long_prompt_tokens:,}-token prompt"
        for answers, state in (
            (result.answers[::2], "nothing cached"),
            (result.answers[1::2], f"{num_shared} tokens shared"),
        ):
            median_ms = 1000 * statistics.median(answer.first_token_s for answer in answers)
            rows.append(Row(name=f"{long}, {state}", unit="ms", values={1: median_ms}))
    return rows


def _step_rows(found: Measurements, sizes: Sizes) -> list[Row]:
    steps = {
        count: step
        for count in sizes.client_counts
        if (step := summarize_decode_steps(found.steps, count, kv_tokens=KV_TOKENS)) is not None
    }
    rows = []
    if found.plain_step_ms:
        name = "transformers: forward of a decode step (sdpa, DynamicCache)"
        rows.append(Row(name=name, unit="ms", values=found.plain_step_ms, digits=1))
    if steps:
        rows += _engine_step_rows(steps)
        ratios = {
            count: step.period_ms / found.plain_step_ms[count] for count, step in steps.items()
        }
        name = "engine: whole step / transformers: forward"
        rows.append(Row(name=name, unit="ratio", values=ratios, digits=2))
    return rows


def _engine_step_rows(steps: dict[int, DecodeStep]) -> list[Row]:
    def row(name: str, attribute: str, unit: str = "ms") -> Row:
        values = {count: getattr(step, attribute) for count, step in steps.items()}
        return Row(name=f"engine: {name}", unit=unit, values=values, digits=1)

    return [
        row("whole decode step", "period_ms"),
        row("... of which packing, forward, sampling", "execute_ms"),
        row("... of which forward", "forward_ms"),
        row("share of a decode step that is not the forward", "overhead_percent", "%"),
    ]


def _start_rows(found: Measurements) -> list[Row]:
    rows = []
    if found.ready_s is not None and found.first_token_s is not None:
        rows = [
            Row(name="start to ready line", unit="s", values={1: found.ready_s}, digits=1),
            Row(name="start to first token", unit="s", values={1: found.first_token_s}, digits=1),
        ]
    for name, rss_bytes in sorted(found.rss_bytes.items()):
        rows.append(Row(name=f"resident memory of {name}", unit="MB", values={1: rss_bytes / 1e6}))
    return rows
