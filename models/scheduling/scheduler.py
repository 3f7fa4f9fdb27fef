"""Scheduler: decides which tokens of which sequences run in the next step. Holds no tensors."""

from __future__ import annotations

import collections.abc
import itertools

from models.config import SchedulerConfig
from models.errors import InvalidRequestError, OutOfBlocksError, QueueFullError
from models.kv_cache.ledger import BlockManager
from models.kv_cache.prefix_index import ChainNamespace, GroupNamespace
from models.scheduling.adapter_seats import AdapterSeats
from models.scheduling.draft import DraftPlan, RequestGroup
from models.scheduling.queue import WaitingQueue
from models.scheduling.sequence import Sequence, SequenceStatus
from models.scheduling.step_plan import (
    JoiningSequence,
    SampledToken,
    ScheduledSequence,
    ScoredTokens,
    StepPlan,
    StepResult,
)


class Scheduler:
    """Continuous batching over one block ledger.

    Every step takes one token of each running decode first, then prefill chunks: those of running
    sequences, then new admissions, oldest first, while the token budget lasts. So a long prompt is
    cut into what the decodes leave over and never stalls them.

    Admission is first come, first served. A sequence gets the blocks of all its tokens and of one
    more at once, and only if one further block per running sequence stays free: otherwise those
    that run would soon have to preempt what was just admitted. The head of the queue is never
    overtaken, and a lone sequence always fits, so nothing starves. One exception: whoever waits
    for the slot of an adapter is passed over a bounded number of times (``AdapterSeats``).

    When a decode finds no block, the youngest running sequence is preempted: it gives back its
    blocks, keeps its tokens and runs them again later, behind nobody younger.

    Of n > 1 choices the first computes the prompt; its siblings are admitted afterwards, find all
    full blocks of it in the prefix index and compute the rest (at most a block) themselves.

    A sequence that reports log probabilities of its prompt needs the logits of every position of
    it: it takes no KV from the prefix index but for positions that were scored before a
    preemption, and its siblings always wait for it. A step scores a limited number of positions,
    oldest sequence first; a sequence for which none is left pauses and holds up nobody.

    Owner: step thread.
    Invariants: running sequences are sorted by admission and waiting ones by age; where there are
    no adapters the two are one order, and no waiting one is older than a running one; exactly the
    running ones hold blocks and slots, and exactly they are known to the runner once it has been
    told who leaves.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_num_scored_positions: int,
        seats: AdapterSeats | None = None,
    ) -> None:
        """Start with nothing to run.

        Args:
            config: budgets of a step and of the queue.
            blocks: ledger of the KV pool.
            max_num_scored_positions: most positions of a step whose logits give log probabilities
                of a prompt, at least 1. It bounds the memory of their logits.
            seats: slots for adapters; None if no sequence has one.
        """
        self._config = config
        self._blocks = blocks
        self._max_num_scored_positions = max_num_scored_positions
        self._seats = seats
        self._queue = WaitingQueue()
        # oldest first: whoever is admitted is younger than all that run
        self._running: dict[int, Sequence] = {}
        self._groups: dict[str, RequestGroup] = {}
        self._leaving: list[int] = []
        self._plan_in_flight: StepPlan | None = None
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._groups)

    @property
    def num_running(self) -> int:
        """Sequences that run: the rows of a decode step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests of which no sequence has run yet; ``max_num_waiting`` bounds them."""
        return self._queue.num_requests

    @property
    def num_waiting_seqs(self) -> int:
        """Sequences that wait: of new requests, further choices, and preempted ones."""
        return len(self._queue)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence has been preempted since the start."""
        return self._num_preemptions

    def add_group(self, sequences: collections.abc.Sequence[Sequence]) -> None:
        """Queue the choices of one request (the unfinished ones, if it is resumed).

        Args:
            sequences: at least one; same request, namespace and prompt.

        Raises:
            InvalidRequestError: the request id is in use.
            QueueFullError: ``max_num_waiting`` requests wait already.
            OutOfBlocksError: prompt and ``max_tokens`` exceed the whole pool, so that a sequence
                could never finish; the engine refuses such a request before.
        """
        first = sequences[0]
        if first.request_id in self._groups:
            raise InvalidRequestError("request_id", f"'{first.request_id}' is in use")
        if self._queue.num_requests >= self._config.max_num_waiting:
            raise QueueFullError(self._queue.num_requests, self._config.max_num_waiting)
        for sequence in sequences:
            self._check_fits_pool(sequence)
        namespace: ChainNamespace = first.namespace
        if not self._blocks.is_prefix_caching_enabled:
            namespace = GroupNamespace(first.request_id, first.namespace)
        has_full_block_to_share = first.num_prompt_positions > self._blocks.block_size_tokens
        self._groups[first.request_id] = RequestGroup(
            members={sequence.seq_id: sequence for sequence in sequences},
            namespace=namespace,
            is_leader_needed=len(sequences) > 1
            and (has_full_block_to_share or first.num_prompt_logprobs is not None),
        )
        for sequence in sequences:
            sequence.arrival_order = next(self._arrivals)
        self._queue.append_group(tuple(sequences))

    def abort_group(self, request_id: str) -> None:
        """End all sequences of a request now; no effect if there are none."""
        group = self._groups.get(request_id)
        if group is not None:
            for seq_id in tuple(group.members):
                self.finish(seq_id)

    def finish(self, seq_id: int) -> None:
        """End one sequence, running or waiting, and free its blocks now.

        It may be part of a plan that is not applied yet: ``apply`` then passes over it. No effect
        if it has ended before.
        """
        sequence = self._running.get(seq_id)
        if sequence is not None:
            self._stop_running(sequence)
        else:
            sequence = self._queue.remove(seq_id)
        if sequence is None:
            return
        sequence.transition_to(SequenceStatus.FINISHED)
        group = self._groups[sequence.request_id]
        del group.members[seq_id]
        if not group.members:
            del self._groups[sequence.request_id]

    def plan(self) -> StepPlan | None:
        """Decide the next step; ``apply`` must follow before the next plan.

        Returns:
            None if there is nothing to run. Who has left by then is told with a later plan.

        Raises:
            OutOfBlocksError: a lone sequence outgrew the pool: it was not finished in time.
        """
        if self._plan_in_flight is not None:
            raise RuntimeError(f"step {self._plan_in_flight.step_id} has not been applied")
        draft = DraftPlan(self._config.max_num_batched_tokens, self._max_num_scored_positions)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        # After a preemption nobody is admitted: the victim is next in turn, and it needs at least
        # the blocks that it gave back, of which one is taken.
        self._admit(draft)
        if not draft.rows:
            return None
        self._plan_in_flight = StepPlan(
            step_id=next(self._step_ids),
            sequences=tuple(draft.rows),
            joining=tuple(draft.joining),
            leaving=tuple(self._leaving),
            vacated=self._seats.take_vacated() if self._seats is not None else (),
            placements=self._seats.take_placements() if self._seats is not None else (),
        )
        self._leaving.clear()
        return self._plan_in_flight

    def apply(self, result: StepResult) -> None:
        """Record what came of the last plan.

        Appends the drawn tokens, advances ``num_computed_tokens`` and makes full blocks findable.
        A sequence that has ended since the plan is passed over. A token with an error is not
        appended: the sequence stays as it was before the step, marked ``has_failed``, until the
        engine finishes it; its blocks are then not kept for others. So it is if its prompt could
        not be scored.
        """
        plan = self._plan_in_flight
        if plan is None or plan.step_id != result.step_id:
            raise RuntimeError(f"step {result.step_id} is not in flight")
        self._plan_in_flight = None
        remaining, remaining_scored = iter(result.sampled), iter(result.scored)
        for scheduled in plan.sequences:
            sampled, scored = None, None
            if scheduled.is_sampled:
                sampled = next(remaining, None)
                if sampled is None or sampled.seq_id != scheduled.seq_id:
                    raise RuntimeError(f"sequence {scheduled.seq_id} drew no token")
            if scheduled.scored_positions:
                scored = next(remaining_scored, None)
                if scored is None or scored.seq_id != scheduled.seq_id:
                    raise RuntimeError(f"the prompt of sequence {scheduled.seq_id} was not scored")
            sequence = self._running.get(scheduled.seq_id)
            if sequence is not None:
                self._apply_row(sequence, scheduled, sampled, scored)

    def check_invariants(self) -> None:
        """Check queue, running set, groups and ledger against each other.

        Raises:
            RuntimeError: what is wrong.
        """
        self._blocks.check_invariants()
        self._check_order()
        if len(self._running) > self._config.max_num_seqs:
            raise RuntimeError("too many sequences run")
        for sequence in self._running.values():
            table = self._blocks.block_table(sequence.seq_id)
            if sequence.status is not SequenceStatus.RUNNING:
                raise RuntimeError(f"sequence {sequence.seq_id} runs as {sequence.status.value}")
            if len(table) < self._blocks.num_blocks_for(sequence.num_computed_tokens):
                raise RuntimeError(f"sequence {sequence.seq_id} lacks blocks")
        for sequence in self._queue:
            if sequence.status not in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
                raise RuntimeError(f"sequence {sequence.seq_id} waits as {sequence.status.value}")
        if self._blocks.num_holders != len(self._running):
            raise RuntimeError("a sequence that does not run holds blocks")
        members = {seq_id for group in self._groups.values() for seq_id in group.members}
        if members != {*self._running, *(sequence.seq_id for sequence in self._queue)}:
            raise RuntimeError("groups and sequences disagree")

    def _check_order(self) -> None:
        ages = [sequence.arrival_order for sequence in (*self._running.values(), *self._queue)]
        if self._seats is not None:
            self._seats.check_invariants(list(self._running.values()))
            ages = ages[len(self._running) :]
        if ages != sorted(set(ages)):
            raise RuntimeError("running and waiting sequences are not in the order of age")

    def _check_fits_pool(self, sequence: Sequence) -> None:
        num_output_tokens = sequence.params.max_tokens
        if num_output_tokens > 0:
            num_output_tokens = max(num_output_tokens, len(sequence.output_token_ids) + 1)
        num_needed = self._blocks.num_blocks_for(sequence.num_prompt_positions + num_output_tokens)
        if num_needed > self._blocks.num_blocks:
            raise OutOfBlocksError(num_needed, self._blocks.num_blocks)

    def _plan_decodes(self, draft: DraftPlan) -> None:
        # Oldest first, so that a victim (the youngest) has never been scheduled before.
        for sequence in tuple(self._running.values()):
            if (
                sequence.status is SequenceStatus.RUNNING
                and sequence.num_uncomputed_tokens == 1
                and self._extend_or_preempt(sequence)
            ):
                self._schedule(draft, sequence)

    def _plan_prefills(self, draft: DraftPlan) -> None:
        for sequence in self._running.values():
            if draft.num_tokens_left == 0:
                return
            if sequence.num_uncomputed_tokens > 1:
                self._schedule(draft, sequence)

    def _admit(self, draft: DraftPlan) -> None:
        passed_over: list[Sequence] = []
        for sequence in tuple(self._queue):
            if draft.num_tokens_left == 0 or len(self._running) == self._config.max_num_seqs:
                return
            if passed_over and self._seats is not None:
                if not self._seats.may_be_passed_over(passed_over[0]):
                    return
                if self._seats.needs_new_slot(sequence):
                    continue
            group = self._groups[sequence.request_id]
            if group.is_leader_needed and group.leader_seq_id is not None:
                return
            num_cached_tokens = self._try_allocate(sequence, group)
            if num_cached_tokens is None:
                return
            if self._seats is not None and not self._seats.try_take(sequence):
                self._blocks.free(sequence.seq_id, is_content_valid=True)
                passed_over.append(sequence)
                continue
            for each in passed_over:
                each.num_overtakes += 1
            self._start(draft, sequence, group, num_cached_tokens)

    def _try_allocate(self, sequence: Sequence, group: RequestGroup) -> int | None:
        return self._blocks.try_allocate(
            sequence.seq_id,
            group.namespace,
            # no more than these are looked for in the prefix index, and one that is computed
            sequence.token_ids[: sequence.num_reusable_tokens + 1],
            sequence.num_tokens + (sequence.params.max_tokens > 0),
            num_blocks_to_spare=len(self._running),
        )

    def _start(
        self, draft: DraftPlan, sequence: Sequence, group: RequestGroup, num_cached_tokens: int
    ) -> None:
        """Let a sequence run that has its blocks and its slot."""
        self._queue.admit(sequence)
        if sequence.status is SequenceStatus.WAITING:
            sequence.note_cached(num_cached_tokens)
        sequence.transition_to(SequenceStatus.RUNNING)
        sequence.num_computed_tokens = num_cached_tokens
        self._running[sequence.seq_id] = sequence
        if group.is_leader_needed:
            group.leader_seq_id = sequence.seq_id
        draft.joining.append(
            JoiningSequence(
                seq_id=sequence.seq_id,
                sampling=sequence.params,
                seed=sequence.seed,
                prompt_token_ids=sequence.prompt_token_ids,
                output_token_ids=tuple(sequence.output_token_ids),
                adapter=sequence.adapter,
                num_prompt_logprobs=sequence.num_prompt_logprobs,
            )
        )
        self._schedule(draft, sequence)

    def _schedule(self, draft: DraftPlan, sequence: Sequence) -> None:
        start = sequence.num_computed_tokens
        num_left = sequence.num_uncomputed_tokens
        num_scheduled = min(num_left, draft.num_tokens_left)
        scored = sequence.unscored_positions
        if len(scored) > draft.num_scored_left:
            num_scheduled = min(num_scheduled, scored.start + draft.num_scored_left - start)
            if num_scheduled == 0:
                return
        scored = range(scored.start, min(scored.stop, start + num_scheduled))
        draft.num_tokens_left -= num_scheduled
        draft.num_scored_left -= len(scored)
        draft.rows.append(
            ScheduledSequence(
                sequence.seq_id,
                tuple(sequence.token_ids[start : start + num_scheduled]),
                start,
                self._blocks.block_table(sequence.seq_id),
                is_sampled=num_scheduled == num_left and sequence.params.max_tokens > 0,
                scored_positions=scored,
                slot=self._seats.slot_of(sequence) if self._seats is not None else None,
                num_virtual_tokens=sequence.num_virtual_tokens,
            )
        )

    def _extend_or_preempt(self, sequence: Sequence) -> bool:
        """Get the blocks for all its tokens; False if the sequence itself had to give way."""
        while not self._blocks.try_extend(sequence.seq_id, sequence.num_tokens):
            if len(self._running) == 1:
                num_needed = self._blocks.num_blocks_for(sequence.num_tokens)
                raise OutOfBlocksError(num_needed, self._blocks.num_blocks)
            victim = next(reversed(self._running.values()))
            self._num_preemptions += 1
            self._stop_running(victim)
            victim.transition_to(SequenceStatus.PREEMPTED)
            self._queue.put_back(victim)
            if victim is sequence:
                return False
        return True

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._leaving.append(sequence.seq_id)
        self._blocks.free(sequence.seq_id, is_content_valid=not sequence.has_failed)
        if self._seats is not None:
            self._seats.give_back(sequence)
        group = self._groups[sequence.request_id]
        if group.leader_seq_id == sequence.seq_id:
            group.leader_seq_id = None

    def _apply_row(
        self,
        sequence: Sequence,
        scheduled: ScheduledSequence,
        sampled: SampledToken | None,
        scored: ScoredTokens | None,
    ) -> None:
        if any(each is not None and each.error is not None for each in (sampled, scored)):
            sequence.has_failed = True
            return
        if scored is not None:
            sequence.num_scored_positions = scheduled.scored_positions.stop
        num_computed_tokens = scheduled.start + len(scheduled.token_ids)
        sequence.num_computed_tokens = num_computed_tokens
        self._blocks.record_computed(sequence.seq_id, sequence.token_ids, num_computed_tokens)
        if sequence.num_uncomputed_tokens == 0:
            self._groups[sequence.request_id].is_leader_needed = False
        if sampled is not None:
            sequence.append(sampled.token_id)
