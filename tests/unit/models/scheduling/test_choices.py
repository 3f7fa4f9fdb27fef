import pytest

from models.scheduling.sequence import SequenceStatus
from tests.unit.models.scheduling.simulation import (
    Simulation,
    chunk_sizes,
    is_complete,
    scheduled_ids,
)


@pytest.mark.parametrize("is_prefix_caching_enabled", [True, False])
def test_siblings_share_the_full_blocks_of_the_prompt(is_prefix_caching_enabled):
    simulation = Simulation(is_prefix_caching_enabled=is_prefix_caching_enabled)
    sequences = simulation.add_all(range(14), 3, num_choices=4)

    first = simulation.step()
    second = simulation.step()

    assert chunk_sizes(first) == {0: 14}
    assert chunk_sizes(second) == {0: 1, 1: 2, 2: 2, 3: 2}
    simulation.run()
    assert all(is_complete(sequence) for sequence in sequences)
    simulation.check_nothing_is_left()


def test_siblings_wait_until_a_prompt_of_several_chunks_is_computed():
    simulation = Simulation(max_num_batched_tokens=8)
    simulation.add_all(range(20), 2, num_choices=2)

    plans = [simulation.step() for _ in range(4)]

    assert [scheduled_ids(plan) for plan in plans] == [[0], [0], [0], [0, 1]]
    assert plans[3].sequences[1].start == 16


def test_siblings_without_a_full_block_to_share_do_not_wait():
    simulation = Simulation()
    simulation.add_all(range(4), 2, num_choices=3)

    assert scheduled_ids(simulation.step()) == [0, 1, 2]


def test_siblings_go_before_requests_that_came_later():
    simulation = Simulation(max_num_seqs=3)
    simulation.add_all(range(5), 3, num_choices=3)
    later = simulation.add([50], 1)

    simulation.step()
    plan = simulation.step()

    assert scheduled_ids(plan) == [0, 1, 2]
    assert later.status is SequenceStatus.WAITING


def test_more_siblings_than_rows_all_finish():
    simulation = Simulation(max_num_seqs=2, num_blocks=6)
    sequences = simulation.add_all(range(9), 3, num_choices=7)

    simulation.run()

    assert all(is_complete(sequence) for sequence in sequences)


def test_the_next_sibling_leads_if_the_leader_ends_before_the_prompt_is_computed():
    simulation = Simulation(max_num_batched_tokens=8)
    leader, second, third = simulation.add_all(range(20), 2, num_choices=3)
    simulation.step()

    simulation.scheduler.finish(leader.seq_id)

    assert scheduled_ids(simulation.step()) == [second.seq_id]
    simulation.run()
    assert is_complete(second)
    assert is_complete(third)
