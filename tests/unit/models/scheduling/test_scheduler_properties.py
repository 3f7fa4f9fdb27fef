import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from models.requests import AdapterRef, PrefixNamespace
from models.scheduling.sequence import SequenceStatus
from tests.fakes import fail_after, last_plus_one
from tests.unit.models.scheduling.simulation import BASE, Simulation, expected_output

NAMESPACES = [BASE, PrefixNamespace("m", AdapterRef("a", "1")), PrefixNamespace("m", None, "salt")]


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request of a scenario.

    Attributes:
        arrives_at: step number.
        prompt: few different tokens, so that prompts share beginnings.
        aborted_at: step number, None lets it finish.
        is_aborted_in_flight: the abort falls between plan and apply.
    """

    arrives_at: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    num_emitted: int
    num_prompt_logprobs: int | None
    namespace: PrefixNamespace
    aborted_at: int | None
    is_aborted_in_flight: bool

    @property
    def num_tokens(self):
        return len(self.prompt) + self.max_tokens


PROMPTS = st.builds(
    lambda shared, num_shared, own: (*shared[:num_shared], *own),
    st.sampled_from([(0,) * 20, (0, 1) * 10, (0,) * 6 + (1,) * 14]),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
ASKS = st.builds(
    Ask,
    arrives_at=st.integers(0, 12),
    prompt=PROMPTS,
    max_tokens=st.integers(0, 14),
    num_choices=st.sampled_from([1, 1, 1, 2, 4]),
    num_emitted=st.sampled_from([0, 0, 0, 1, 3]),
    num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    namespace=st.sampled_from([BASE, BASE, BASE, *NAMESPACES[1:]]),
    aborted_at=st.none() | st.integers(0, 25),
    is_aborted_in_flight=st.booleans(),
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    asks: list[Ask]
    block_size_tokens: int
    num_spare_blocks: int
    max_num_seqs: int
    num_spare_tokens: int
    is_prefix_caching_enabled: bool
    is_failing: bool
    max_num_scored_positions: int

    def simulation(self):
        """Return a simulation whose pool holds the largest request, and the spare blocks."""
        size = self.block_size_tokens
        num_needed = max(-(-ask.num_tokens // size) for ask in self.asks)

        def rule(prompt, output):
            is_hit = self.is_failing and prompt[-1] == 2 and len(output) == 5
            return fail_after(5)(prompt, output) if is_hit else last_plus_one(prompt, output)

        return Simulation(
            num_blocks=num_needed + self.num_spare_blocks,
            block_size_tokens=size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_seqs + self.num_spare_tokens,
            is_prefix_caching_enabled=self.is_prefix_caching_enabled,
            max_num_scored_positions=self.max_num_scored_positions,
            choose_token=rule,
        )


SCENARIOS = st.builds(
    Scenario,
    asks=st.lists(ASKS, min_size=1, max_size=7),
    block_size_tokens=st.integers(1, 5),
    num_spare_blocks=st.sampled_from([0, 0, 1, 2, 5, 40]),
    max_num_seqs=st.integers(1, 6),
    num_spare_tokens=st.integers(0, 20),
    is_prefix_caching_enabled=st.sampled_from([True, True, False]),
    is_failing=st.sampled_from([False, False, True]),
    max_num_scored_positions=st.sampled_from([1, 2, 5, 1000]),
)


class Run:
    """Plays a scenario step by step; the simulation checks every plan and every invariant."""

    def __init__(self, scenario):
        self.simulation = scenario.simulation()
        self.asks = sorted(scenario.asks, key=lambda ask: ask.arrives_at)
        self.sequences_by_ask = {}
        self.aborted = set()
        self.num_steps = 0

    def play(self):
        last_event = max([ask.aborted_at or 0 for ask in self.asks] + [12])
        while self.num_steps <= last_event or self.simulation.scheduler.has_work:
            assert self.num_steps < 1000, "starved"
            self.step()
        return self

    def step(self):
        """Let requests come and go, then do one step; return its plan."""
        self.arrive()
        plan = self.simulation.step(ended_in_flight=self.abort())
        for sequence in self.all_sequences():
            num_output_tokens = len(sequence.output_token_ids)
            assert sequence.output_token_ids == expected_output(sequence)[:num_output_tokens]
        self.num_steps += 1
        return plan

    def arrive(self):
        for number, ask in enumerate(self.asks):
            if ask.arrives_at == self.num_steps:
                begin = ask.prompt[-1] + 1
                num_emitted = max(min(ask.num_emitted, ask.max_tokens - 1), 0)
                self.sequences_by_ask[number] = self.simulation.add_all(
                    ask.prompt,
                    ask.max_tokens,
                    num_choices=ask.num_choices,
                    namespace=ask.namespace,
                    emitted=range(begin, begin + num_emitted),
                    num_prompt_logprobs=ask.num_prompt_logprobs,
                )

    def abort(self):
        """Abort whose time has come; return the seq_ids that end in flight instead."""
        in_flight = []
        for number, sequences in self.sequences_by_ask.items():
            ask = self.asks[number]
            if ask.aborted_at == self.num_steps:
                self.aborted.add(number)
                if ask.is_aborted_in_flight:
                    in_flight += [sequence.seq_id for sequence in sequences]
                else:
                    self.simulation.scheduler.abort_group(sequences[0].request_id)
                    self.simulation.check()
        return in_flight

    def all_sequences(self):
        return [one for sequences in self.sequences_by_ask.values() for one in sequences]


@settings(max_examples=250, deadline=None)
@given(SCENARIOS)
def test_every_request_gets_its_own_output_whatever_the_neighbours_budgets_and_blocks(scenario):
    run = Run(scenario).play()

    for number, sequences in run.sequences_by_ask.items():
        for sequence in sequences:
            assert sequence.status is SequenceStatus.FINISHED
            if number in run.aborted or sequence.seq_id in run.simulation.errors:
                continue
            assert sequence.output_token_ids == expected_output(sequence)
            told = run.simulation.scored.get(sequence.seq_id, [])
            expected = sequence.prompt_token_ids[1:]
            if sequence.num_prompt_logprobs is None:
                expected = ()
            assert tuple(logprob.token_id for logprob in told) == expected
    run.simulation.check_nothing_is_left()


@settings(max_examples=60, deadline=None)
@given(SCENARIOS)
def test_sequences_are_first_admitted_in_the_order_of_arrival(scenario):
    run = Run(scenario).play()

    first_joins = dict.fromkeys(
        joining.seq_id for plan in run.simulation.runner.plans for joining in plan.joining
    )

    assert list(first_joins) == sorted(first_joins)


@settings(max_examples=60, deadline=None)
@given(SCENARIOS)
def test_a_decode_gets_a_token_in_every_step_unless_it_is_preempted(scenario):
    run = Run(scenario)

    for _ in range(40):
        decoding = [
            (sequence, len(sequence.output_token_ids))
            for sequence in run.simulation.running()
            if sequence.num_uncomputed_tokens == 1 and sequence.params.max_tokens > 0
        ]
        run.step()

        for sequence, num_before in decoding:
            if sequence.status is SequenceStatus.RUNNING:
                assert len(sequence.output_token_ids) == num_before + 1


@settings(max_examples=60, deadline=None)
@given(SCENARIOS)
def test_whoever_is_preempted_is_younger_than_all_that_go_on(scenario):
    run = Run(scenario)

    for _ in range(40):
        running = run.simulation.running()
        run.step()

        preempted, going_on = (
            [one.arrival_order for one in running if one.status is status]
            for status in (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)
        )
        assert max(going_on, default=-1) < min(preempted, default=1000)
