"""Which positions of which prompts are scored when; the runner checks that none is left out."""

import pytest

from models.errors import OutOfBlocksError
from models.scheduling.sequence import SequenceStatus
from models.scheduling.step_plan import StepResult
from tests.unit.models.scheduling.simulation import (
    Simulation,
    chunk_sizes,
    is_complete,
    scheduled_ids,
)


def scored_sizes(plan):
    """Return how many positions each sequence of a plan scores, those that score any."""
    return {row.seq_id: len(row.scored_positions) for row in plan.sequences if row.scored_positions}


def told_ids(simulation, sequence):
    """Return the prompt tokens whose log probability was told, in order."""
    return [logprob.token_id for logprob in simulation.scored.get(sequence.seq_id, [])]


def test_every_prompt_token_but_the_first_is_told_once():
    simulation = Simulation(max_num_batched_tokens=8)
    sequence = simulation.add(range(50, 70), 3, num_prompt_logprobs=2)

    simulation.run()

    assert told_ids(simulation, sequence) == list(range(51, 70))
    assert all(len(logprob.top) == 2 for logprob in simulation.scored[sequence.seq_id])
    assert is_complete(sequence)


def test_a_sequence_that_does_not_ask_scores_nothing():
    simulation = Simulation()
    simulation.add(range(20), 3)

    simulation.run()

    assert not any(scored_sizes(plan) for plan in simulation.runner.plans)


def test_the_one_token_of_a_prompt_has_no_log_probability():
    simulation = Simulation()
    sequence = simulation.add([5], 2, num_prompt_logprobs=0)

    simulation.run()

    assert told_ids(simulation, sequence) == []
    assert is_complete(sequence)


def test_a_step_scores_no_more_positions_than_the_limit():
    simulation = Simulation(max_num_scored_positions=5)
    simulation.add(range(13), 2, num_prompt_logprobs=0)

    plans = [simulation.step() for _ in range(3)]

    assert [scored_sizes(plan) for plan in plans] == [{0: 5}, {0: 5}, {0: 2}]
    # behind the last scored position the prompt's last one comes along and is sampled
    assert [chunk_sizes(plan) for plan in plans] == [{0: 5}, {0: 5}, {0: 3}]
    assert [plan.sequences[0].is_sampled for plan in plans] == [False, False, True]


def test_others_go_on_while_a_prompt_is_scored_slowly():
    simulation = Simulation(max_num_scored_positions=1)
    decoding = simulation.add([100], 30)
    simulation.step()
    slow = simulation.add(range(20), 1, num_prompt_logprobs=0)
    second = simulation.add(range(200, 205), 1, num_prompt_logprobs=0)
    late = simulation.add(range(300, 310), 1)

    plan = simulation.step()

    assert chunk_sizes(plan) == {decoding.seq_id: 1, slow.seq_id: 1, late.seq_id: 10}
    assert late.status is SequenceStatus.FINISHED
    assert second.status is SequenceStatus.RUNNING
    assert second.num_computed_tokens == 0
    for num_tokens in range(3, 12):
        simulation.step()
        assert len(decoding.output_token_ids) == num_tokens
    simulation.run()
    assert is_complete(slow)
    assert is_complete(second)
    assert told_ids(simulation, second) == list(range(201, 205))


def test_the_prefix_cache_is_written_but_not_read():
    simulation = Simulation()
    prompt = range(14)
    simulation.add(prompt, 1)
    simulation.run()

    asking = simulation.add(prompt, 1, num_prompt_logprobs=0)
    plan = simulation.step()
    assert plan.sequences[0].start == 0
    assert asking.num_cached_tokens == 0
    assert told_ids(simulation, asking) == list(range(1, 14))

    fresh = Simulation()
    fresh.add(prompt, 1, num_prompt_logprobs=0)
    fresh.run()
    later = fresh.add(prompt, 1)
    fresh.step()
    assert later.num_cached_tokens == 12


@pytest.mark.parametrize("is_prefix_caching_enabled", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [3, 14])
def test_only_the_first_choice_scores_and_its_siblings_wait_for_it(
    num_prompt_tokens, is_prefix_caching_enabled
):
    simulation = Simulation(
        max_num_scored_positions=2, is_prefix_caching_enabled=is_prefix_caching_enabled
    )
    prompt = range(num_prompt_tokens)
    sequences = simulation.add_all(prompt, 3, num_choices=3, num_prompt_logprobs=1)

    while not sequences[0].output_token_ids:
        assert scheduled_ids(simulation.step()) == [0]
    plan = simulation.step()

    assert scheduled_ids(plan) == [0, 1, 2]
    assert plan.sequences[1].start == (num_prompt_tokens - 1) // 4 * 4
    simulation.run()
    assert list(simulation.scored) == [0]
    assert told_ids(simulation, sequences[0]) == list(prompt)[1:]
    assert all(is_complete(sequence) for sequence in sequences)


def test_siblings_for_no_tokens_end_too():
    simulation = Simulation()
    sequences = simulation.add_all(range(9), 0, num_choices=3, num_prompt_logprobs=1)

    simulation.run()

    assert all(is_complete(sequence) for sequence in sequences)
    simulation.check_nothing_is_left()


@pytest.mark.parametrize("is_prefix_caching_enabled", [True, False])
def test_what_was_told_before_a_preemption_is_not_told_again(is_prefix_caching_enabled):
    # The decode takes the last free blocks while the prompt is being scored, one position a step.
    simulation = Simulation(
        num_blocks=15,
        max_num_scored_positions=1,
        is_prefix_caching_enabled=is_prefix_caching_enabled,
    )
    decoding = simulation.add([100], 40)
    simulation.step()
    prompt = range(200, 239)
    scored = simulation.add(prompt, 2, num_prompt_logprobs=0)

    simulation.step_until_preempted(1)
    num_told = len(told_ids(simulation, scored))
    assert scored.status is SequenceStatus.PREEMPTED
    assert 0 < num_told < len(prompt) - 1
    plan = simulation.step_until(lambda: scored.status is SequenceStatus.RUNNING)

    # positions that were scored need no logits, so they count for nothing against the limit
    again = plan.sequences[-1]
    assert again.end == num_told + 1
    assert again.scored_positions == range(num_told, num_told + 1)
    if is_prefix_caching_enabled:
        assert again.start <= num_told
    simulation.run()
    assert told_ids(simulation, scored) == list(prompt)[1:]
    assert is_complete(decoding)
    assert is_complete(scored)
    assert scored.num_cached_tokens == 0


def test_a_prompt_that_cannot_be_scored_fails_alone_and_its_blocks_are_not_kept():
    simulation = Simulation(broken_prompt_token=7, max_num_batched_tokens=64)
    failing = simulation.add(range(12), 3, num_prompt_logprobs=0)
    neighbour = simulation.add(range(100, 112), 3, num_prompt_logprobs=0)

    simulation.run()

    assert list(simulation.errors) == [failing.seq_id]
    assert is_complete(neighbour)
    assert simulation.blocks.match_prefix(failing.namespace, range(12)) == 0
    assert simulation.blocks.match_prefix(neighbour.namespace, range(100, 112)) == 8


def test_a_result_without_the_scores_is_refused():
    simulation = Simulation()
    simulation.add(range(4), 0, num_prompt_logprobs=0)
    plan = simulation.scheduler.plan()

    with pytest.raises(RuntimeError, match="was not scored"):
        simulation.scheduler.apply(StepResult(plan.step_id, ()))


def test_a_prompt_larger_than_the_pool_is_refused_also_for_no_tokens():
    simulation = Simulation(num_blocks=4)

    with pytest.raises(OutOfBlocksError):
        simulation.add(range(17), 0, num_prompt_logprobs=0)
