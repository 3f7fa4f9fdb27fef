import pytest

from models.errors import InvalidRequestError, OutOfBlocksError, QueueFullError
from models.requests import AdapterRef, PrefixNamespace
from models.scheduling.sequence import SequenceStatus
from models.scheduling.step_plan import SampledToken, StepResult
from tests.fakes import fail_after
from tests.unit.models.scheduling.simulation import (
    Simulation,
    chunk_sizes,
    is_complete,
    scheduled_ids,
)


def test_a_lone_request_draws_its_tokens():
    simulation = Simulation()
    sequence = simulation.add([1, 2, 3], 5)

    simulation.run()

    assert sequence.output_token_ids == [4, 5, 6, 7, 8]
    simulation.check_nothing_is_left()


def test_nothing_to_do_gives_no_plan():
    assert Simulation().scheduler.plan() is None


def test_decodes_are_packed_before_prefill_chunks():
    simulation = Simulation(max_num_batched_tokens=8)
    first = simulation.add(range(8))
    simulation.step()
    second = simulation.add(range(100, 120))

    plan = simulation.step()

    assert scheduled_ids(plan) == [first.seq_id, second.seq_id]
    assert chunk_sizes(plan) == {first.seq_id: 1, second.seq_id: 7}


def test_a_running_prefill_goes_on_before_anybody_is_admitted():
    simulation = Simulation(max_num_batched_tokens=8)
    first = simulation.add(range(12))
    second = simulation.add(range(100, 103))
    assert chunk_sizes(simulation.step()) == {first.seq_id: 8}

    assert chunk_sizes(simulation.step()) == {first.seq_id: 4, second.seq_id: 3}


def test_a_long_prompt_never_stalls_a_decode():
    simulation = Simulation(max_num_batched_tokens=8)
    talking = simulation.add([1, 2], 20)
    simulation.step()
    simulation.add(range(100, 200), 1)

    for num_tokens in range(2, 15):
        simulation.step()
        assert len(talking.output_token_ids) == num_tokens


def test_a_prompt_is_sampled_only_behind_its_last_token():
    simulation = Simulation(max_num_batched_tokens=8)
    sequence = simulation.add(range(20))

    flags = [simulation.step().sequences[0].is_sampled for _ in range(3)]

    assert flags == [False, False, True]
    assert sequence.output_token_ids == [20]


def test_the_rows_of_a_step_are_bounded():
    simulation = Simulation(max_num_seqs=2)
    sequences = [simulation.add([i]) for i in range(3)]

    plan = simulation.step()

    assert scheduled_ids(plan) == [sequence.seq_id for sequence in sequences[:2]]
    assert simulation.scheduler.num_running == 2
    assert simulation.scheduler.num_waiting == 1


def test_a_small_request_does_not_overtake_a_large_one_that_finds_no_room():
    simulation = Simulation(num_blocks=8, max_num_batched_tokens=64)
    simulation.add(range(12), 8)
    large = simulation.add(range(100, 120), 4)
    small = simulation.add([7], 1)

    simulation.step()
    assert small.status is SequenceStatus.WAITING
    simulation.step_until(lambda: large.status is SequenceStatus.RUNNING)
    joined = [joining.seq_id for plan in simulation.runner.plans for joining in plan.joining]
    assert small.seq_id not in joined[: joined.index(large.seq_id)]

    simulation.run()
    assert is_complete(large)
    assert is_complete(small)


def test_admission_leaves_one_more_block_for_every_running_sequence():
    simulation = Simulation(num_blocks=8)
    simulation.add(range(11), 8)
    # 3 of 8 blocks are taken; this one needs 5 or 4
    too_large = simulation.add(range(100, 116), 4)
    simulation.step()
    assert too_large.status is SequenceStatus.WAITING

    simulation.scheduler.abort_group(too_large.request_id)
    fitting = simulation.add(range(100, 115), 4)
    simulation.step()
    assert fitting.status is SequenceStatus.RUNNING


def test_a_cached_prompt_is_computed_only_behind_the_cached_part():
    simulation = Simulation()
    simulation.add(range(13), 1)
    simulation.run()
    second = simulation.add(range(13), 1)

    plan = simulation.step()

    assert second.num_cached_tokens == 12
    assert plan.sequences[0].start == 12
    assert plan.num_tokens == 1


def test_namespaces_do_not_share_prompts():
    simulation = Simulation()
    simulation.add(range(13), 1)
    simulation.run()
    salted = simulation.add(range(13), 1, namespace=PrefixNamespace("m", None, "None"))
    adapted = simulation.add(range(13), 1, namespace=PrefixNamespace("m", AdapterRef("a", "1")))

    plan = simulation.step()

    assert plan.num_tokens == 26
    assert salted.num_cached_tokens == adapted.num_cached_tokens == 0
    assert plan.joining[1].adapter == AdapterRef("a", "1")


def test_resumed_requests_go_on_behind_what_was_emitted():
    simulation = Simulation()
    sequence = simulation.add([1, 2, 3], 5, emitted=[4, 5])

    plan = simulation.step()

    assert plan.joining[0].output_token_ids == (4, 5)
    assert plan.sequences[0].token_ids == (1, 2, 3, 4, 5)
    simulation.run()
    assert sequence.output_token_ids == [4, 5, 6, 7, 8]


def test_cached_output_does_not_count_as_cached_prompt():
    simulation = Simulation()
    simulation.add(range(4), 9)
    simulation.run()
    resumed = simulation.add(range(4), 16, emitted=range(4, 13))

    plan = simulation.step()

    assert plan.sequences[0].start == 12
    assert resumed.num_cached_tokens == 4


def test_without_prefix_caching_other_requests_share_nothing():
    simulation = Simulation(is_prefix_caching_enabled=False)
    simulation.add(range(13), 8)
    simulation.step()
    other = simulation.add(range(13), 8)

    simulation.step()

    assert other.num_cached_tokens == 0


def test_a_row_that_fails_gets_no_token_and_leaves_its_neighbours_alone():
    def rule(prompt, output):
        return fail_after(2)(prompt, output) if prompt[0] == 7 else output_of(prompt, output)

    def output_of(prompt, output):
        return (output or prompt)[-1] + 1

    simulation = Simulation(choose_token=rule)
    bad = simulation.add([7], 5)
    good = simulation.add([1], 5)

    simulation.run()

    assert bad.output_token_ids == [8, 9]
    assert simulation.errors == {bad.seq_id: "not a number"}
    assert is_complete(good)
    simulation.check_nothing_is_left()


def test_the_blocks_of_a_failed_row_are_not_found_again():
    simulation = Simulation(choose_token=fail_after(2), max_num_batched_tokens=8)
    simulation.add(range(20), 9)
    simulation.step()
    assert simulation.blocks.num_cached_blocks == 2

    simulation.run()

    assert simulation.blocks.num_cached_blocks == 0


def test_a_failed_row_that_is_not_finished_stays_as_it_was():
    simulation = Simulation()
    sequence = simulation.add([1, 2], 5)
    plan = simulation.scheduler.plan()

    failed = SampledToken(sequence.seq_id, -1, error="bad")
    simulation.scheduler.apply(StepResult(plan.step_id, (failed,)))

    assert sequence.has_failed
    assert sequence.output_token_ids == []
    assert sequence.num_computed_tokens == 0


def test_a_sequence_that_ends_in_flight_is_not_resurrected():
    simulation = Simulation()
    ended = simulation.add(range(9), 5)
    other = simulation.add([50], 5)

    simulation.step(ended_in_flight=[ended.seq_id])

    assert ended.status is SequenceStatus.FINISHED
    assert ended.output_token_ids == []
    assert simulation.running() == [other]
    assert simulation.step().leaving == (ended.seq_id,)
    simulation.run()
    assert is_complete(other)


def test_an_aborted_request_frees_its_blocks_at_once():
    simulation = Simulation()
    sequences = simulation.add_all(range(9), 5, num_choices=3)
    simulation.step()
    simulation.step()

    simulation.scheduler.abort_group(sequences[0].request_id)

    assert simulation.blocks.num_free_blocks == simulation.blocks.num_blocks
    assert not simulation.scheduler.has_work
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    simulation.check_nothing_is_left()


def test_an_aborted_waiting_request_never_joins():
    simulation = Simulation(max_num_seqs=1)
    simulation.add([1], 3)
    aborted = simulation.add([2], 3)
    simulation.step()

    simulation.scheduler.abort_group(aborted.request_id)
    simulation.run()

    assert all(joining.seq_id != 1 for plan in simulation.runner.plans for joining in plan.joining)
    assert all(1 not in plan.leaving for plan in simulation.runner.plans)


def test_ending_twice_has_no_effect():
    simulation = Simulation()
    sequence = simulation.add([1])
    simulation.step()

    simulation.scheduler.finish(sequence.seq_id)
    simulation.scheduler.finish(sequence.seq_id)
    simulation.scheduler.abort_group(sequence.request_id)

    simulation.check_nothing_is_left()


def test_a_full_queue_refuses_the_next_request():
    simulation = Simulation(max_num_waiting=2)
    simulation.add_all([1], num_choices=3)
    simulation.add([2])

    with pytest.raises(QueueFullError) as caught:
        simulation.add([3])

    assert (caught.value.num_waiting, caught.value.max_num_waiting) == (2, 2)
    simulation.step()
    simulation.add([3])


def test_a_request_id_in_use_is_refused():
    simulation = Simulation()
    simulation.add([1], request_id="r")

    with pytest.raises(InvalidRequestError):
        simulation.add([2], request_id="r")

    simulation.run()
    simulation.add([2], request_id="r")


@pytest.mark.parametrize(("max_tokens", "is_served"), [(7, True), (8, False)])
def test_a_request_that_can_never_fit_the_pool_is_refused(max_tokens, is_served):
    simulation = Simulation(num_blocks=4)

    if is_served:
        sequence = simulation.add(range(9), max_tokens)
        simulation.run()
        assert is_complete(sequence)
    else:
        with pytest.raises(OutOfBlocksError):
            simulation.add(range(9), max_tokens)
        assert not simulation.scheduler.has_work


def test_a_request_that_has_no_room_for_a_single_token_is_refused():
    simulation = Simulation(num_blocks=4)

    with pytest.raises(OutOfBlocksError):
        simulation.add(range(16), 1)


def test_a_request_for_no_tokens_may_fill_the_whole_pool():
    simulation = Simulation(num_blocks=4)
    sequence = simulation.add(range(16), 0)

    simulation.run()

    assert is_complete(sequence)
    assert not any(row.is_sampled for plan in simulation.runner.plans for row in plan.sequences)


def test_a_plan_must_be_applied_before_the_next():
    simulation = Simulation()
    simulation.add([1])
    simulation.scheduler.plan()

    with pytest.raises(RuntimeError, match="has not been applied"):
        simulation.scheduler.plan()


def test_a_result_of_another_step_is_refused():
    simulation = Simulation()
    simulation.add([1])
    plan = simulation.scheduler.plan()

    with pytest.raises(RuntimeError, match="is not in flight"):
        simulation.scheduler.apply(StepResult(plan.step_id + 1, ()))


def test_a_result_that_lacks_a_sequence_is_refused():
    simulation = Simulation()
    simulation.add([1])
    plan = simulation.scheduler.plan()

    with pytest.raises(RuntimeError, match="drew no token"):
        simulation.scheduler.apply(StepResult(plan.step_id, ()))
