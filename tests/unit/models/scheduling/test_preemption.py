import pytest

from models.errors import OutOfBlocksError
from models.scheduling.sequence import SequenceStatus
from tests.unit.models.scheduling.simulation import Simulation, is_complete, scheduled_ids


def preempting_simulation():
    """Return a simulation of three running sequences that will not all find blocks."""
    simulation = Simulation(num_blocks=12, max_num_batched_tokens=64)
    sequences = [simulation.add(range(100 * i, 100 * i + 7), 24) for i in range(3)]
    simulation.step()
    assert simulation.scheduler.num_running == 3
    return simulation, sequences


def test_the_youngest_is_preempted_first():
    simulation, (oldest, middle, youngest) = preempting_simulation()

    simulation.step_until_preempted(1)
    assert youngest.status is SequenceStatus.PREEMPTED
    simulation.step_until_preempted(2)
    assert middle.status is SequenceStatus.PREEMPTED
    assert oldest.status is SequenceStatus.RUNNING


def test_preempted_sequences_go_before_waiting_ones_in_the_order_of_age():
    simulation, (_, middle, youngest) = preempting_simulation()
    simulation.step_until_preempted(1)
    waiting = simulation.add([5], 1)
    simulation.step_until_preempted(2)

    num_plans_before = len(simulation.runner.plans)
    simulation.run()

    plans = simulation.runner.plans[num_plans_before:]
    joined = [joining.seq_id for plan in plans for joining in plan.joining]
    assert joined[:3] == [middle.seq_id, youngest.seq_id, waiting.seq_id]


def test_preempted_sequences_end_with_the_tokens_of_an_undisturbed_run():
    simulation, sequences = preempting_simulation()

    simulation.run()

    assert simulation.scheduler.num_preemptions >= 2
    assert all(is_complete(sequence) for sequence in sequences)
    simulation.check_nothing_is_left()


def test_a_preempted_sequence_leaves_and_joins_again_with_its_output():
    simulation, (_, _, youngest) = preempting_simulation()
    plan = simulation.step_until_preempted(1)
    output = tuple(youngest.output_token_ids)
    assert plan.leaving == (youngest.seq_id,)
    assert youngest.seq_id not in scheduled_ids(plan)

    plan = simulation.step_until(lambda: youngest.status is SequenceStatus.RUNNING)

    assert plan.joining[-1].seq_id == youngest.seq_id
    assert plan.joining[-1].output_token_ids == output
    assert len(output) > 0


def test_nobody_is_admitted_in_the_step_of_a_preemption():
    simulation, (_, _, youngest) = preempting_simulation()
    simulation.add([5], 1)

    plan = simulation.step_until_preempted(1)

    assert youngest.status is SequenceStatus.PREEMPTED
    assert plan.joining == ()


def test_a_preemption_does_not_change_the_number_of_cached_tokens():
    simulation, sequences = preempting_simulation()

    simulation.run()

    assert simulation.scheduler.num_preemptions > 0
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 0]


def test_a_sequence_that_outgrows_the_pool_alone_is_an_error():
    simulation = Simulation(num_blocks=2)
    sequence = simulation.add(range(4), 4)
    sequence.params = simulation.make([1], 100)[0].params

    with pytest.raises(OutOfBlocksError):
        simulation.run()


def test_an_aborted_preempted_request_never_joins_again():
    simulation, (_, _, youngest) = preempting_simulation()
    simulation.step_until_preempted(1)

    simulation.scheduler.abort_group(youngest.request_id)

    assert youngest.status is SequenceStatus.FINISHED
    simulation.run()
    simulation.check_nothing_is_left()
