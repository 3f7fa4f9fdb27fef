"""ModelRunner: executes a StepPlan. Knows sequences only by what plans told it."""

from __future__ import annotations

import torch

from models.requests import TokenLogprob
from models.runner.inputs import split_parts
from models.runner.packed_forward import PackedForward
from models.scheduling.step_plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from sampling.sampler import SampledRow, Sampler, SamplingRow


class ModelRunner:
    """One forward pass and one draw per sampled sequence.

    Invariants: holds sampling state for exactly the sequences that have joined and not left.
    Owner: the step thread.
    """

    def __init__(self, forward: PackedForward, sampler: Sampler) -> None:
        self._forward = forward
        self._sampler = sampler
        self._rows: dict[int, SamplingRow] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences whose sampling state is held."""
        return len(self._rows)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan; blocks until its tokens are drawn.

        A sequence whose logits cannot be sampled gets ``error``; the others do not notice.
        """
        for seq_id in plan.leaving:
            self._rows.pop(seq_id, None)
        for joining in plan.joining:
            self._rows[joining.seq_id] = self._sampler.make_row(
                joining.sampling,
                joining.seed,
                joining.prompt_token_ids,
                joining.output_token_ids,
            )
        drawn: dict[int, SampledRow] = {}
        for parts in split_parts(plan.sequences, self._forward.policy.max_forward_rows):
            drawn.update(self._run(parts))
        return StepResult(
            step_id=plan.step_id,
            sampled=tuple(
                _to_sampled_token(scheduled.seq_id, drawn[scheduled.seq_id])
                for scheduled in plan.sequences
                if scheduled.is_sampled
            ),
        )

    @torch.inference_mode()
    def _run(self, parts: list[ScheduledSequence]) -> dict[int, SampledRow]:
        inputs = self._forward.pack(parts)
        sampled = [index for index, part in enumerate(parts) if part.is_sampled]
        logits = self._forward.run(inputs, [inputs.last_rows[index] for index in sampled])
        if logits is None:
            return {}
        seq_ids = [parts[index].seq_id for index in sampled]
        rows = self._sampler.sample(logits, [self._rows[seq_id] for seq_id in seq_ids])
        return dict(zip(seq_ids, rows, strict=True))


def _to_sampled_token(seq_id: int, row: SampledRow) -> SampledToken:
    if row.error is not None:
        return SampledToken(seq_id=seq_id, token_id=-1, error=str(row.error))
    if row.logprob is None:
        return SampledToken(seq_id=seq_id, token_id=row.token_id)
    return SampledToken(
        seq_id=seq_id,
        token_id=row.token_id,
        logprob=TokenLogprob(token_id=row.token_id, logprob=row.logprob, top=row.top),
    )
