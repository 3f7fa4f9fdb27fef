"""Sequence: one running output of a request, and where it is. Decides nothing, holds no tensors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from models.adapters.ledger import AdapterCost
from models.requests import AdapterRef, PrefixNamespace
from sampling.params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; why it ended is the engine's knowledge (FinishReason)."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


# Any id of the vocabulary will do: nobody looks at it, and within the namespace of an adapter all
# sequences have their virtual tokens at the same positions.
_VIRTUAL_TOKEN_ID = 0


def with_virtual_tokens(num_virtual_tokens: int, token_ids: Iterable[int]) -> list[int]:
    """Return what stands at each position of a sequence: placeholders, then the tokens."""
    return [*[_VIRTUAL_TOKEN_ID] * num_virtual_tokens, *token_ids]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One choice of one request, from its admission to its end.

    Its positions are those of its adapter's virtual tokens, if it has any, then the prompt's, then
    the output's. What counts positions has them all; ids, and what is told of a prompt, do not
    know virtual tokens.

    The engine creates it; afterwards only the scheduler changes it, everybody may read it.
    Owner: step thread.

    Attributes:
        seq_id: unique in the life of the engine, never reused.
        request_id: the request it belongs to.
        choice: index among the request's choices.
        params: sampling parameters; ``max_tokens`` is the limit that holds for this sequence.
        seed: the choice's own seed (``derive_seed`` has been applied).
        namespace: where its prompt KV may be shared; names the adapter too.
        prompt_token_ids: the prompt, at least one token.
        output_token_ids: tokens drawn so far, oldest first. Those given at creation were emitted
            before (a stream resumed here); they are run again, never drawn again.
        num_prompt_logprobs: None, or k >= 0 if this sequence is to report log probabilities of its
            prompt; of a request's choices only the first may.
        adapter_cost: what its adapter takes on the device; None without one.
        num_virtual_tokens: positions that its adapter's virtual tokens take.
        token_ids: one id per position: a placeholder for each virtual token, prompt, output.
        num_computed_tokens: KV of positions [0, num_computed_tokens) is in its blocks.
        num_cached_tokens: prompt tokens that the prefix cache held when the sequence first ran,
            virtual ones not counted; a later preemption does not change it.
        num_scored_positions: the logits of positions [0, num_scored_positions) have given the log
            probability of the prompt token behind them; a later preemption does not change it.
        num_overtakes: how often a younger sequence was admitted while this one found no slot for
            its adapter.
        is_waiting_for_slot: it found none when its turn came.
        arrival_order: age, lower is older; given by ``Scheduler.add_group``, -1 before.
        status: see SequenceStatus.
        has_failed: its last step gave no token but an error; the engine must finish it.
    """

    seq_id: int
    request_id: str
    params: SamplingParams
    seed: int
    namespace: PrefixNamespace
    prompt_token_ids: tuple[int, ...]
    choice: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_prompt_logprobs: int | None = None
    adapter_cost: AdapterCost | None = None
    num_virtual_tokens: int = 0
    token_ids: list[int] = dataclasses.field(init=False, repr=False)
    num_computed_tokens: int = dataclasses.field(init=False, default=0)
    num_cached_tokens: int = dataclasses.field(init=False, default=0)
    num_scored_positions: int = dataclasses.field(init=False, default=0)
    num_overtakes: int = dataclasses.field(init=False, default=0)
    is_waiting_for_slot: bool = dataclasses.field(init=False, default=False)
    arrival_order: int = dataclasses.field(init=False, default=-1)
    status: SequenceStatus = dataclasses.field(init=False, default=SequenceStatus.WAITING)
    has_failed: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        """Take over the tokens; the caller's list of emitted tokens stays the caller's."""
        self.output_token_ids = list(self.output_token_ids)
        self.token_ids = with_virtual_tokens(
            self.num_virtual_tokens, (*self.prompt_token_ids, *self.output_token_ids)
        )

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter it runs with, None for the base model."""
        return self.namespace.adapter

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, without virtual ones."""
        return len(self.prompt_token_ids)

    @property
    def num_prompt_positions(self) -> int:
        """Positions of virtual tokens and prompt."""
        return self.num_virtual_tokens + len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Positions of virtual tokens, prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that have yet to be run before the next one can be drawn; 1 is a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def unscored_positions(self) -> range:
        """Positions whose logits are still to give the log probability of the token behind them."""
        if self.num_prompt_logprobs is None:
            return range(0)
        # No logits of virtual tokens: nothing is told of the first token of a prompt.
        start = max(self.num_scored_positions, self.num_virtual_tokens)
        return range(start, self.num_prompt_positions - 1)

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV may be taken from others: no logits are wanted of these."""
        unscored = self.unscored_positions
        return unscored.start if unscored else len(self.token_ids)

    def note_cached(self, num_reused_positions: int) -> None:
        """Take note of how many leading positions had KV when it first ran."""
        num_reused_tokens = max(num_reused_positions - self.num_virtual_tokens, 0)
        self.num_cached_tokens = min(num_reused_tokens, self.num_prompt_tokens)

    def append(self, token_id: int) -> None:
        """Take a token that was drawn."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)

    def transition_to(self, status: SequenceStatus) -> None:
        """Change the status; a sequence that loses its blocks loses its computed tokens with them.

        Raises:
            RuntimeError: the step is not in LEGAL_TRANSITIONS, a fault of the scheduler.
        """
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise RuntimeError(
                f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status
        if status is not SequenceStatus.RUNNING:
            self.num_computed_tokens = 0
