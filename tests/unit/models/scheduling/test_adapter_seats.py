"""Sequences with adapters share a few slots: nobody gets another's weights, nobody starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.requests import AdapterRef, PrefixNamespace
from models.scheduling.sequence import SequenceStatus
from tests.unit.models.scheduling.simulation import BASE, Simulation


def using(name, version="1"):
    return PrefixNamespace("m", AdapterRef(name, version))


def is_running(sequence):
    return sequence.status is SequenceStatus.RUNNING


def test_adapters_beyond_the_slots_wait_and_base_rows_do_not():
    simulation = Simulation(max_num_slots=2)
    first, second, third = (simulation.add([1], namespace=using(name)) for name in "abc")
    base = simulation.add([1])

    simulation.step()

    assert [is_running(each) for each in (first, second, third, base)] == [True, True, False, True]
    assert third.is_waiting_for_slot
    simulation.run()


def test_a_resident_adapter_passes_one_that_waits():
    simulation = Simulation(max_num_slots=1)
    holder = simulation.add([1], 8, namespace=using("a"))
    simulation.step()
    waiting = simulation.add([1], namespace=using("b"))
    same = simulation.add([1], namespace=using("a"))

    simulation.step()

    assert (is_running(holder), is_running(waiting), is_running(same)) == (True, False, True)
    assert waiting.num_overtakes == 1


def test_nobody_is_passed_over_more_often_than_the_limit():
    simulation = Simulation(max_num_slots=1, max_num_overtakes=3)
    simulation.add([1], 6, namespace=using("a"))
    simulation.step()
    waiting = simulation.add([1], namespace=using("b"))
    for _ in range(40):
        simulation.add([1], 6, namespace=using("a"))

    simulation.step_until(lambda: is_running(waiting))

    assert waiting.num_overtakes == 3
    simulation.run()


def test_of_two_that_need_a_slot_the_older_one_gets_it():
    simulation = Simulation(max_num_slots=1)
    simulation.add([1], 3, namespace=using("a"))
    older = simulation.add([1], namespace=using("b"))
    younger = simulation.add([1], namespace=using("c"))

    simulation.step_until(lambda: is_running(older) or is_running(younger))

    assert is_running(older)
    simulation.run()


def test_an_adapter_that_ran_before_is_still_in_its_slot():
    simulation = Simulation(max_num_slots=2)
    simulation.add([1], 2, namespace=using("a"))
    simulation.run()
    simulation.add([1], 2, namespace=using("a"))

    plan = simulation.step()

    assert plan.placements == ()
    assert simulation.seats.stats.num_hits == 1


def test_a_pinned_adapter_keeps_its_slot_and_an_evicted_one_loses_it():
    simulation = Simulation(max_num_slots=2)
    for name in "ab":
        simulation.add([1], 1, namespace=using(name))
    simulation.run()
    simulation.seats.pin("a")
    simulation.add([1], 1, namespace=using("c"))
    simulation.run()
    assert {ref.id for ref in simulation.seats.resident_refs} == {"a", "c"}

    simulation.seats.evict("a")

    assert {ref.id for ref in simulation.seats.resident_refs} == {"c"}


def test_each_slot_that_lost_its_tenant_is_told_once_and_before_it_is_filled_again():
    simulation = Simulation(max_num_slots=1)
    simulation.add([1], 2, namespace=using("a"))
    first = simulation.step()
    simulation.run()
    simulation.add([1], 2, namespace=using("b"))

    second = simulation.step()
    third = simulation.step()

    (slot,) = (placement.slot for placement in second.placements)
    assert (first.vacated, second.vacated, third.vacated) == ((), (slot,), ())


def test_an_adapter_in_use_is_evicted_with_its_last_sequence():
    simulation = Simulation(max_num_slots=2)
    sequence = simulation.add([1], 3, namespace=using("a"))
    simulation.step()

    simulation.seats.evict("a")
    assert {ref.id for ref in simulation.seats.resident_refs} == {"a"}
    simulation.run()

    assert sequence.status is SequenceStatus.FINISHED
    assert simulation.seats.resident_refs == ()


def test_an_eviction_before_its_placement_was_carried_out_fills_no_slot_of_others():
    simulation = Simulation(max_num_slots=1)
    sequence = simulation.add([1], 3, namespace=using("a"))
    simulation.step()
    simulation.scheduler.finish(sequence.seq_id)
    simulation.seats.evict("a")
    simulation.add([1], 3, namespace=using("b"))

    simulation.run()

    assert list(simulation.tenants.values()) == [AdapterRef("b", "1")]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_aborted_sequences_give_their_slots_back(num_choices):
    simulation = Simulation(max_num_slots=1)
    sequences = simulation.add_all([1], 50, namespace=using("a"), num_choices=num_choices)
    simulation.step()
    simulation.scheduler.abort_group(sequences[0].request_id)
    other = simulation.add([1], 2, namespace=using("b"))

    simulation.run()

    assert other.status is SequenceStatus.FINISHED


REQUESTS = st.tuples(
    st.integers(1, 20),  # tokens of the prompt
    st.integers(1, 12),  # tokens wanted
    st.sampled_from([None, *"abcde"]),
    st.sampled_from("12"),
    st.integers(1, 3),  # choices
    st.integers(0, 30),  # arrives before this step
    st.integers(0, 60),  # is aborted before this step, unless it has ended
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=14),
    max_num_slots=st.integers(1, 3),
    num_blocks=st.integers(9, 40),
    max_num_overtakes=st.integers(0, 4),
)
def test_whatever_is_asked_each_row_runs_with_its_own_adapter_and_all_end(
    requests, max_num_slots, num_blocks, max_num_overtakes
):
    simulation = Simulation(
        max_num_slots=max_num_slots, num_blocks=num_blocks, max_num_overtakes=max_num_overtakes
    )
    groups = {}
    for step in range(61):
        for index, (length, wanted, name, version, num_choices, arrival, abort) in enumerate(
            requests
        ):
            if arrival == step:
                groups[index] = simulation.add_all(
                    range(length),
                    wanted,
                    namespace=BASE if name is None else using(name, version),
                    num_choices=num_choices,
                )
            if abort == step and index in groups:
                simulation.scheduler.abort_group(groups[index][0].request_id)
        if simulation.scheduler.has_work:
            simulation.step()
    simulation.run()

    assert all(
        sequence.status is SequenceStatus.FINISHED
        for group in groups.values()
        for sequence in group
    )
    assert simulation.seats.stats.num_in_use == 0
