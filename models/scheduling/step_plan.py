"""StepPlan: the immutable decision of one step, and StepResult: what came of it. No tensors."""

from __future__ import annotations

import dataclasses

from models.adapters.ledger import Slot
from models.requests import AdapterRef, TokenLogprob
from sampling.params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class JoiningSequence:
    """What the runner must know of a sequence before its first step (again after preemption).

    Attributes:
        seq_id: names the sequence in every later plan.
        sampling: parameters of its request.
        seed: the choice's own seed (``derive_seed`` has been applied).
        prompt_token_ids: the prompt.
        output_token_ids: tokens that were drawn before (preemption, resume), oldest first.
        adapter: None for the base model.
        num_prompt_logprobs: how many alternatives its ``scored_positions`` report, None if it
            never has any.
    """

    seq_id: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    adapter: AdapterRef | None = None
    num_prompt_logprobs: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """A slot that has to be filled with an adapter before the step runs.

    Attributes:
        ref: the new tenant.
        slot: where it goes; whatever was there is gone.
    """

    ref: AdapterRef
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: tokens at positions [start, start + len(token_ids)).

    Attributes:
        seq_id: which sequence.
        token_ids: tokens to run, at least one; a decode has exactly one. Those of virtual tokens
            mean nothing.
        start: position of the first of them; KV of [0, start) is already in the blocks.
        block_ids: the block table, covering at least [0, start + len(token_ids)).
        is_sampled: whether the last token's logits draw the next token.
        scored_positions: positions of this step whose logits give the log probability of the
            prompt token behind them; within [start, end), never the prompt's last one.
        slot: of the adapter that its rows use; None is the base model.
        num_virtual_tokens: positions [0, num_virtual_tokens) are the adapter's virtual tokens.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    is_sampled: bool
    scored_positions: range = range(0)
    slot: Slot | None = None
    num_virtual_tokens: int = 0

    @property
    def scored_tokens(self) -> range:
        """Tokens of the prompt, counted without virtual ones, that ``scored_positions`` tell."""
        ahead = 1 - self.num_virtual_tokens
        return range(self.scored_positions.start + ahead, self.scored_positions.stop + ahead)

    @property
    def end(self) -> int:
        """Position behind the last token of this step."""
        return self.start + len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one forward pass.

    Invariants: a seq_id appears at most once in ``sequences``; every id in ``sequences`` has
    been in ``joining`` of this or an earlier plan and not in ``leaving`` since; ``leaving`` is
    handled before ``joining`` (a preempted sequence may leave and join in the same plan).

    Attributes:
        step_id: counts up by one per plan.
        sequences: decodes first, then prefill chunks, in the order they are packed.
        joining: sequences that the runner has not seen yet, or has been told to forget.
        leaving: sequences that ended, were preempted or aborted since the last plan.
        vacated: adapter slots that have lost their tenants; to be cleared first.
        placements: adapter slots to be filled next.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    joining: tuple[JoiningSequence, ...] = ()
    leaving: tuple[int, ...] = ()
    vacated: tuple[Slot, ...] = ()
    placements: tuple[AdapterPlacement, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(len(scheduled.token_ids) for scheduled in self.sequences)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that one sequence drew in a step, or why it could not.

    Attributes:
        seq_id: which sequence.
        token_id: -1 if ``error`` is set.
        logprob: set if the request asked for log probabilities.
        error: text of the cause when this row alone failed.
    """

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log probabilities of prompt tokens that one sequence got in a step, or why it could not.

    Attributes:
        seq_id: which sequence.
        start: place in the prompt, counted without virtual tokens, of the first token told here:
            the one behind the first scored position.
        logprobs: one per scored position; empty if ``error`` is set.
        error: text of the cause when this sequence alone failed.
    """

    seq_id: int
    start: int
    logprobs: tuple[TokenLogprob, ...]
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a plan, in plan order.

    Attributes:
        step_id: of the plan.
        sampled: one entry per scheduled sequence with ``is_sampled``.
        scored: one entry per scheduled sequence with ``scored_positions``.
    """

    step_id: int
    sampled: tuple[SampledToken, ...]
    scored: tuple[ScoredTokens, ...] = ()
