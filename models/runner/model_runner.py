"""ModelRunner: executes a StepPlan. Knows sequences only by what plans told it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from models.adapters.ledger import AdapterCost
from models.adapters.store import AdapterStore
from models.adapters.weights import AdapterWeights
from models.requests import AdapterRef, TokenLogprob
from models.runner.inputs import split_parts
from models.runner.packed_forward import PackedForward
from models.scheduling.step_plan import (
    SampledToken,
    ScheduledSequence,
    ScoredTokens,
    StepPlan,
    StepResult,
)
from sampling.errors import RowSamplingError
from sampling.prompt_logprobs import KnownToken, prompt_logprobs
from sampling.sampler import SampledRow, Sampler, SamplingRow


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """What is held of a sequence: its sampling state, and how its prompt is reported."""

    sampling: SamplingRow
    num_prompt_logprobs: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What the parts of a step have given so far, by seq_id."""

    drawn: dict[int, SampledRow] = dataclasses.field(default_factory=dict)
    scored: dict[int, list[KnownToken | RowSamplingError]] = dataclasses.field(default_factory=dict)


class ModelRunner:
    """One forward pass, one draw per sampled sequence, and log probabilities of prompts.

    Invariants: holds state for exactly the sequences that have joined and not left.
    Owner: the step thread.
    """

    def __init__(
        self, forward: PackedForward, sampler: Sampler, adapters: AdapterStore | None = None
    ) -> None:
        """Wire a runner.

        Args:
            forward: one pass of the model.
            sampler: draws.
            adapters: slots that plans place adapters in; None if there are none.
        """
        self._forward = forward
        self._sampler = sampler
        self._adapters = adapters
        self._held: dict[AdapterRef, AdapterWeights] = {}
        self._rows: dict[int, _Row] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is held."""
        return len(self._rows)

    def adapter_cost(self, weights: AdapterWeights) -> AdapterCost:
        """Return what an adapter takes in a slot of the store."""
        assert self._adapters is not None
        return self._adapters.cost(weights)

    def hold_adapter(self, weights: AdapterWeights) -> None:
        """Keep the weights of an adapter that plans may place from now on. Idempotent."""
        self._held[weights.ref] = weights

    def drop_adapter(self, ref: AdapterRef) -> None:
        """Let go of weights that no plan will place; what is in a slot stays there."""
        self._held.pop(ref, None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan; blocks until its tokens are drawn.

        A sequence whose logits cannot be sampled, or do not score its prompt, gets ``error``; the
        others do not notice.
        """
        for slot in plan.vacated:
            assert self._adapters is not None
            self._adapters.clear_(slot)
        for placement in plan.placements:
            assert self._adapters is not None
            self._adapters.write_(placement.slot, self._held[placement.ref])
        for seq_id in plan.leaving:
            self._rows.pop(seq_id, None)
        for joining in plan.joining:
            row = self._sampler.make_row(
                joining.sampling,
                joining.seed,
                joining.prompt_token_ids,
                joining.output_token_ids,
            )
            self._rows[joining.seq_id] = _Row(row, joining.num_prompt_logprobs or 0)
        outcome = _Outcome()
        for parts in split_parts(plan.sequences, self._forward.policy.max_forward_rows):
            self._run(parts, outcome)
        return StepResult(
            step_id=plan.step_id,
            sampled=tuple(
                _to_sampled_token(scheduled.seq_id, outcome.drawn[scheduled.seq_id])
                for scheduled in plan.sequences
                if scheduled.is_sampled
            ),
            scored=tuple(
                _to_scored_tokens(scheduled, outcome.scored[scheduled.seq_id])
                for scheduled in plan.sequences
                if scheduled.scored_positions
            ),
        )

    @torch.inference_mode()
    def _run(self, parts: list[ScheduledSequence], outcome: _Outcome) -> None:
        inputs = self._forward.pack(parts)
        sampled, scored = [], []
        wanted: list[int] = []
        for part, last_row in zip(parts, inputs.last_rows, strict=True):
            if part.is_sampled:
                sampled.append(part.seq_id)
                wanted.append(last_row)
        for part, last_row in zip(parts, inputs.last_rows, strict=True):
            if part.scored_positions:
                scored.append(part)
                first_row = last_row + 1 - len(part.token_ids)
                wanted.extend(first_row + at - part.start for at in part.scored_positions)
        logits = self._forward.run(inputs, wanted)
        if logits is None:
            return
        rows = [self._rows[seq_id].sampling for seq_id in sampled]
        drawn = self._sampler.sample(logits[: len(sampled)], rows)
        outcome.drawn.update(zip(sampled, drawn, strict=True))
        self._score(logits[len(sampled) :], scored, outcome)

    def _score(self, logits: Tensor, parts: list[ScheduledSequence], outcome: _Outcome) -> None:
        """Note what logits ([C, V], the scored positions of all parts) say of prompt tokens."""
        token_ids: list[int] = []
        num_top: list[int] = []
        for part in parts:
            row, told = self._rows[part.seq_id], part.scored_tokens
            token_ids.extend(row.sampling.prompt_token_ids[told.start : told.stop])
            num_top.extend([row.num_prompt_logprobs] * len(told))
        known = iter(prompt_logprobs(logits, token_ids, num_top))
        for part in parts:
            scored = outcome.scored.setdefault(part.seq_id, [])
            scored.extend(next(known) for _ in part.scored_positions)


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


def _to_scored_tokens(
    scheduled: ScheduledSequence, known: list[KnownToken | RowSamplingError]
) -> ScoredTokens:
    start = scheduled.scored_tokens.start
    logprobs: list[TokenLogprob] = []
    for each in known:
        if isinstance(each, RowSamplingError):
            return ScoredTokens(scheduled.seq_id, start, (), error=str(each))
        logprobs.append(TokenLogprob(each.token_id, each.logprob, each.top, each.rank))
    return ScoredTokens(scheduled.seq_id, start, tuple(logprobs))
