import pytest

from models.scheduling.queue import WaitingQueue
from tests.unit.models.scheduling.simulation import Simulation


@pytest.fixture
def make():
    return Simulation().make


def ids(queue):
    return [sequence.seq_id for sequence in queue]


def test_groups_leave_in_the_order_of_arrival_and_choices_in_their_own(make):
    queue = WaitingQueue()
    queue.append_group(tuple(make([1], num_choices=2)))
    queue.append_group(tuple(make([1])))

    assert ids(queue) == [0, 1, 2]


def test_a_sequence_is_admitted_wherever_it_stands(make):
    queue = WaitingQueue()
    sequences = [make([1])[0] for _ in range(3)]
    for sequence in sequences:
        queue.append_group((sequence,))

    queue.admit(sequences[1])

    assert ids(queue) == [0, 2]
    assert queue.num_requests == 2


def test_sequences_preempted_youngest_first_stand_in_the_order_of_age(make):
    queue = WaitingQueue()
    old, middle, young, new = (make([1])[0] for _ in range(4))
    queue.append_group((new,))

    for position, sequence in enumerate((old, middle, young, new)):
        sequence.arrival_order = position
    for sequence in (young, middle, old):
        queue.put_back(sequence)

    assert ids(queue) == [old.seq_id, middle.seq_id, young.seq_id, new.seq_id]


def test_a_preempted_sequence_stands_behind_older_ones_that_it_had_overtaken(make):
    queue = WaitingQueue()
    oldest, older, victim, young = (make([1])[0] for _ in range(4))
    for position, sequence in enumerate((oldest, older, victim, young)):
        sequence.arrival_order = position
    for sequence in (oldest, older, young):
        queue.append_group((sequence,))

    queue.put_back(victim)

    assert ids(queue) == [oldest.seq_id, older.seq_id, victim.seq_id, young.seq_id]


def test_a_sequence_is_removed_wherever_it_stands(make):
    queue = WaitingQueue()
    for _ in range(3):
        queue.append_group(tuple(make([1])))

    assert queue.remove(1).seq_id == 1
    assert ids(queue) == [0, 2]


def test_removing_an_unknown_sequence_gives_none(make):
    assert WaitingQueue().remove(5) is None


def test_a_request_counts_once_however_many_choices_wait(make):
    queue = WaitingQueue()
    queue.append_group(tuple(make([1], num_choices=3)))
    queue.append_group(tuple(make([1])))

    assert queue.num_requests == 2


def test_a_request_counts_until_its_first_choice_is_taken(make):
    queue = WaitingQueue()
    sequences = tuple(make([1], num_choices=3))
    queue.append_group(sequences)

    queue.admit(sequences[0])

    assert queue.num_requests == 0
    assert len(queue) == 2


def test_a_request_counts_until_its_last_choice_is_removed(make):
    queue = WaitingQueue()
    queue.append_group(tuple(make([1], num_choices=2)))

    queue.remove(0)
    assert queue.num_requests == 1
    queue.remove(1)
    assert queue.num_requests == 0


def test_a_preempted_sequence_does_not_count_as_a_waiting_request(make):
    queue = WaitingQueue()

    queue.put_back(make([1])[0])

    assert queue.num_requests == 0
    assert len(queue) == 1
