"""Times the steps of an engine from outside: wraps its runner and its forward pass for a while."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from models.runner.model_runner import ModelRunner
from models.runner.packed_forward import PackedForward
from models.scheduling.step_plan import StepPlan, StepResult


@dataclasses.dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        num_rows: sequences that took part.
        num_tokens: tokens that were run.
        mean_kv_tokens: mean length of what its sequences attended to.
        began_at_s: when the runner was called.
        execute_s: seconds in the runner.
        forward_s: of these, seconds in the forward pass (``PackedForward.run``).
    """

    num_rows: int
    num_tokens: int
    mean_kv_tokens: float
    began_at_s: float
    execute_s: float = 0.0
    forward_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Means over steps that decode and nothing else.

    Attributes:
        num_steps: how many were met.
        period_ms: from one step's begin to the next one's: all that a token costs.
        execute_ms: of these, in the runner: packing, forward pass, sampling.
        forward_ms: of these, in the forward pass.
    """

    num_steps: int
    period_ms: float
    execute_ms: float
    forward_ms: float

    @property
    def overhead_percent(self) -> float:
        """Share of a step that is not the forward pass."""
        return 100 * (1 - self.forward_ms / self.period_ms)


@contextlib.contextmanager
def metered_steps() -> Iterator[list[StepRecord]]:
    """Record every step of every engine of this process; read the list behind the context."""
    records: list[StepRecord] = []
    execute, run = ModelRunner.execute, PackedForward.run

    def timed_execute(self: ModelRunner, plan: StepPlan) -> StepResult:
        record = StepRecord(
            num_rows=len(plan.sequences),
            num_tokens=plan.num_tokens,
            mean_kv_tokens=statistics.fmean(scheduled.end for scheduled in plan.sequences),
            began_at_s=time.monotonic(),
        )
        records.append(record)
        result = execute(self, plan)
        record.execute_s = time.monotonic() - record.began_at_s
        return result

    def timed_run(self: PackedForward, *args: Any, **kwargs: Any) -> Any:
        began_at_s = time.monotonic()
        logits = run(self, *args, **kwargs)
        records[-1].forward_s += time.monotonic() - began_at_s
        return logits

    with (
        mock.patch.object(ModelRunner, "execute", timed_execute),
        mock.patch.object(PackedForward, "run", timed_run),
    ):
        yield records


def summarize_decode_steps(
    records: Sequence[StepRecord], num_rows: int, *, kv_tokens: range
) -> DecodeStep | None:
    """Return the mean decode step of ``num_rows`` rows; None if there was none.

    Args:
        records: in order. A step counts if its successor is of the same kind: otherwise the time
            between the two holds something else.
        num_rows: sequences of a step.
        kv_tokens: mean KV lengths that count.
    """

    def is_wanted(record: StepRecord) -> bool:
        return (
            record.num_rows == record.num_tokens == num_rows
            and kv_tokens.start <= record.mean_kv_tokens < kv_tokens.stop
        )

    pairs = [
        (record, following)
        for record, following in itertools.pairwise(records)
        if is_wanted(record) and is_wanted(following)
    ]
    if not pairs:
        return None
    return DecodeStep(
        num_steps=len(pairs),
        period_ms=1000 * statistics.fmean(b.began_at_s - a.began_at_s for a, b in pairs),
        execute_ms=1000 * statistics.fmean(record.execute_s for record, _ in pairs),
        forward_ms=1000 * statistics.fmean(record.forward_s for record, _ in pairs),
    )
