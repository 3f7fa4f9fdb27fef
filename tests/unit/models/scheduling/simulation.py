"""A small engine around the scheduler: fake runner, ends at max_tokens, checks after every step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from models.adapters.ledger import AdapterCost, AdapterLedger, Slot
from models.config import SchedulerConfig
from models.kv_cache.ledger import BlockManager
from models.requests import AdapterRef, PrefixNamespace, TokenLogprob
from models.scheduling.adapter_seats import AdapterSeats
from models.scheduling.scheduler import Scheduler
from models.scheduling.sequence import Sequence, SequenceStatus
from sampling.params import SamplingParams
from tests.fakes import FakeStepRunner, TokenRule, last_plus_one

BASE = PrefixNamespace("m")


class Simulation:
    """Scheduler, ledger and checking runner; ``step`` does what the engine's step does."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size_tokens: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_num_waiting: int = 512,
        is_prefix_caching_enabled: bool = True,
        max_num_scored_positions: int = 1000,
        choose_token: TokenRule = last_plus_one,
        broken_prompt_token: int | None = None,
        max_num_slots: int = 0,
        max_num_overtakes: int = 64,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks, block_size_tokens, is_prefix_caching_enabled=is_prefix_caching_enabled
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
        )
        self.seats: AdapterSeats | None = None
        if max_num_slots:
            ledger = AdapterLedger(
                budget_bytes=max_num_slots, max_num_slots=max_num_slots, bucket_ranks=(8, 16)
            )
            self.seats = AdapterSeats(ledger, max_num_overtakes=max_num_overtakes)
        self.scheduler = Scheduler(config, self.blocks, max_num_scored_positions, self.seats)
        # what the store of a real runner would hold
        self.tenants: dict[Slot, AdapterRef] = {}
        self.runner = FakeStepRunner(
            num_blocks,
            block_size_tokens,
            choose_token=choose_token,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_scored_positions=max_num_scored_positions,
            broken_prompt_token=broken_prompt_token,
        )
        self.errors: dict[int, str] = {}
        # log probabilities of prompts, in the order they were told
        self.scored: dict[int, list[TokenLogprob]] = {}
        self._seq_ids = itertools.count()

    def make(
        self,
        prompt,
        max_tokens=4,
        *,
        request_id=None,
        num_choices=1,
        namespace=BASE,
        emitted=(),
        num_prompt_logprobs=None,
    ) -> list[Sequence]:
        """Make the sequences of a request without adding them."""
        sequences = []
        for choice in range(num_choices):
            seq_id = next(self._seq_ids)
            request_id = request_id or f"request {seq_id}"
            sequences.append(
                Sequence(
                    seq_id=seq_id,
                    request_id=request_id,
                    choice=choice,
                    params=SamplingParams(max_tokens=max_tokens),
                    seed=choice,
                    namespace=namespace,
                    prompt_token_ids=tuple(prompt),
                    output_token_ids=list(emitted),
                    num_prompt_logprobs=num_prompt_logprobs if choice == 0 else None,
                    adapter_cost=None if namespace.adapter is None else AdapterCost(8, 1),
                )
            )
        return sequences

    def add(self, prompt, max_tokens=4, **options) -> Sequence:
        """Add a request of one choice."""
        (sequence,) = self.add_all(prompt, max_tokens, **options)
        return sequence

    def add_all(self, prompt, max_tokens=4, **options) -> list[Sequence]:
        """Add a request of several choices."""
        sequences = self.make(prompt, max_tokens, **options)
        self.scheduler.add_group(sequences)
        self.check()
        return sequences

    def step(self, *, ended_in_flight=()):
        """Plan, run and apply one step; return the plan or None.

        Args:
            ended_in_flight: seq_ids that end between plan and apply.
        """
        plan = self.scheduler.plan()
        self.check()
        if plan is None:
            assert not self.scheduler.has_work, "there is work, but nothing is planned"
            return None
        if self.seats is not None:
            self._check_slots(plan)
        result = self.runner.execute(plan)
        for seq_id in ended_in_flight:
            self.scheduler.finish(seq_id)
        self.scheduler.apply(result)
        for outcome in (*result.scored, *result.sampled):
            if outcome.error is not None:
                self.errors[outcome.seq_id] = outcome.error
                self.scheduler.finish(outcome.seq_id)
        for scored in result.scored:
            told = self.scored.setdefault(scored.seq_id, [])
            assert scored.start == len(told) + 1, "the stretches are not adjacent"
            told.extend(scored.logprobs)
        for sequence in self.running():
            is_prompt_only = sequence.params.max_tokens == 0
            if is_prompt_only and sequence.num_uncomputed_tokens > 0:
                continue
            if len(sequence.output_token_ids) >= sequence.params.max_tokens:
                self.scheduler.finish(sequence.seq_id)
        self.check()
        return plan

    def _check_slots(self, plan):
        """Check that every row finds the weights of its own adapter in its slot."""
        for slot in plan.vacated:
            self.tenants.pop(slot)
        for placement in plan.placements:
            self.tenants[placement.slot] = placement.ref
        adapters = {sequence.seq_id: sequence.adapter for sequence in self.running()}
        for scheduled in plan.sequences:
            tenant = None if scheduled.slot is None else self.tenants[scheduled.slot]
            assert tenant == adapters[scheduled.seq_id]

    def run(self, max_num_steps=2000) -> int:
        """Step until nothing is left; return the number of steps."""
        for num_steps in range(max_num_steps):
            if self.step() is None:
                return num_steps
        raise AssertionError("starved")

    def step_until(self, condition: Callable[[], bool], max_num_steps=500):
        """Step until the condition holds; return the last plan."""
        for _ in range(max_num_steps):
            plan = self.step()
            if condition():
                return plan
        raise AssertionError("it never came to that")

    def step_until_preempted(self, num_preemptions: int):
        """Step until so many sequences have been preempted; return the last plan."""
        return self.step_until(lambda: self.scheduler.num_preemptions >= num_preemptions)

    def running(self) -> list[Sequence]:
        """Return the running sequences, oldest first."""
        return list(self.scheduler._running.values())

    def check(self) -> None:
        """Check the invariants of scheduler and ledger."""
        self.scheduler.check_invariants()

    def check_nothing_is_left(self) -> None:
        """Check that all blocks can be had and the runner forgets all that ended."""
        assert not self.scheduler.has_work
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting_seqs == 0
        assert self.blocks.num_holders == 0
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        last = self.add([7], 0)
        self.step()
        assert self.runner.known_seq_ids == {last.seq_id}


def expected_output(sequence: Sequence) -> list[int]:
    """Return what a sequence that ended at max_tokens must have drawn: last + 1, every time."""
    begin = sequence.prompt_token_ids[-1] + 1
    return list(range(begin, begin + sequence.params.max_tokens))


def is_complete(sequence: Sequence) -> bool:
    """Return whether a sequence ended with its whole output."""
    return (
        sequence.status is SequenceStatus.FINISHED
        and sequence.output_token_ids == expected_output(sequence)
    )


def scheduled_ids(plan) -> list[int]:
    """Return the seq_ids of a plan in packed order."""
    return [scheduled.seq_id for scheduled in plan.sequences]


def chunk_sizes(plan) -> dict[int, int]:
    """Return how many tokens each sequence of a plan runs."""
    return {scheduled.seq_id: len(scheduled.token_ids) for scheduled in plan.sequences}
