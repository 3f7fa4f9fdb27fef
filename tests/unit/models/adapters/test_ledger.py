"""Tests of the ledger of device slots."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.adapters.ledger import (
    AdapterLedger,
    Eviction,
    Placement,
    Slot,
    bucket_rank_for,
    plan_bucket_ranks,
)
from models.requests import AdapterRef


def ref(name, version="1"):
    return AdapterRef(name, version)


def make(*, budget_bytes=100, max_num_slots=4, bucket_ranks=(8, 16, 32)):
    return AdapterLedger(
        budget_bytes=budget_bytes, max_num_slots=max_num_slots, bucket_ranks=bucket_ranks
    )


def acquire(ledger, name, *, rank=8, num_bytes=10):
    return ledger.try_acquire(ref(name), rank=rank, num_bytes=num_bytes)


def leave_resident(ledger, *names, num_bytes=10):
    for name in names:
        assert acquire(ledger, name, num_bytes=num_bytes) is not None
        ledger.release(ref(name))


def evicted_names(placement):
    return [eviction.ref.id for eviction in placement.evictions]


def test_slots_of_a_bucket_count_from_zero_and_the_lowest_free_one_is_taken():
    ledger = make()
    slots = [
        acquire(ledger, name, rank=rank).slot for name, rank in zip("abc", (8, 5, 16), strict=True)
    ]
    ledger.release(ref("a"))
    ledger.evict(ref("a"))

    assert slots == [Slot(8, 0), Slot(8, 1), Slot(16, 0)]
    assert acquire(ledger, "d", rank=0).slot == Slot(8, 0)


@pytest.mark.parametrize(("rank", "bucket_rank"), [(0, 8), (1, 8), (8, 8), (9, 16), (32, 32)])
def test_an_adapter_goes_to_the_smallest_bucket_that_holds_its_rank(rank, bucket_rank):
    assert bucket_rank_for(rank, (8, 16, 32)) == bucket_rank


def test_a_rank_above_every_bucket_is_refused_and_changes_nothing():
    ledger = make()

    with pytest.raises(RuntimeError, match="rank 33"):
        acquire(ledger, "a", rank=33)

    assert ledger.resident_refs == ()


def test_an_adapter_that_is_resident_keeps_its_slot_and_is_not_filled_again():
    ledger = make()
    first = acquire(ledger, "a")
    again = acquire(ledger, "a")

    assert (first.is_new, again.is_new) == (True, False)
    assert first.slot == again.slot
    assert ledger.num_references(ref("a")) == 2
    assert ledger.stats.used_bytes == 10


def test_two_versions_of_an_adapter_have_two_slots():
    ledger = make()
    old = ledger.try_acquire(ref("a", "1"), rank=8, num_bytes=10)
    new = ledger.try_acquire(ref("a", "2"), rank=8, num_bytes=10)

    assert old.slot != new.slot


def test_the_adapter_released_longest_ago_makes_room():
    ledger = make()
    leave_resident(ledger, "a", "b", "c", "d")
    leave_resident(ledger, "a")

    placement = acquire(ledger, "e")

    assert evicted_names(placement) == ["b"]
    assert placement.slot == Slot(8, 1)
    assert placement.evictions == (Eviction(ref("b"), Slot(8, 1)),)


def test_an_adapter_in_use_is_never_evicted_however_long_it_is_held():
    ledger = make()
    acquire(ledger, "held")
    leave_resident(ledger, *"abcdefgh")

    assert ref("held") in ledger.resident_refs


def test_there_is_no_room_while_all_slots_are_in_use_and_nothing_changes():
    ledger = make()
    for name in "abcd":
        acquire(ledger, name)
    before = ledger.resident_refs

    assert acquire(ledger, "e") is None
    assert ledger.resident_refs == before

    ledger.release(ref("c"))
    assert evicted_names(acquire(ledger, "e")) == ["c"]


def test_a_pinned_adapter_is_not_evicted_to_make_room_until_it_is_unpinned():
    ledger = make(max_num_slots=1)
    ledger.pin("a")
    leave_resident(ledger, "a")

    assert acquire(ledger, "b") is None

    ledger.unpin("a")
    assert evicted_names(acquire(ledger, "b")) == ["a"]


def test_bytes_make_room_as_slots_do_and_what_can_stay_does_stay():
    ledger = make()
    leave_resident(ledger, "small", num_bytes=10)
    leave_resident(ledger, "large", num_bytes=80)

    assert evicted_names(acquire(ledger, "new", num_bytes=60)) == ["large"]
    assert ledger.stats.used_bytes == 70


def test_an_adapter_larger_than_the_whole_budget_finds_no_room_and_evicts_nobody():
    ledger = make()
    leave_resident(ledger, "a", "b")

    assert acquire(ledger, "huge", num_bytes=101) is None
    assert len(ledger.resident_refs) == 2


def test_an_eviction_that_is_asked_for_waits_for_the_last_reference():
    ledger = make()
    acquire(ledger, "a")
    acquire(ledger, "a")

    assert ledger.evict(ref("a")) is None
    assert acquire(ledger, "a") == Placement(Slot(8, 0), is_new=False)
    assert [ledger.release(ref("a")) for _ in range(3)] == [
        None,
        None,
        Eviction(ref("a"), Slot(8, 0)),
    ]
    assert ledger.slot_of(ref("a")) is None


def test_an_eviction_that_is_asked_for_takes_pinned_ones_too():
    ledger = make()
    ledger.pin("a")
    leave_resident(ledger, "a")

    assert ledger.evict(ref("a")) == Eviction(ref("a"), Slot(8, 0))
    assert ledger.evict(ref("a")) is None


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_release_too_many_is_a_fault(is_resident):
    ledger = make()
    if is_resident:
        leave_resident(ledger, "a")

    with pytest.raises(RuntimeError, match="more often"):
        ledger.release(ref("a"))


def test_totals_count_what_happened():
    ledger = make(max_num_slots=1)
    leave_resident(ledger, "a", "a", "b")
    acquire(ledger, "b")
    assert acquire(ledger, "c") is None

    stats = ledger.stats
    assert (stats.num_hits, stats.num_placements) == (2, 2)
    assert (stats.num_refusals, stats.num_evictions) == (1, 1)
    assert (stats.num_resident, stats.num_in_use, stats.num_pinned) == (1, 1, 0)


class Model:
    """What the ledger should hold, by the slowest means: a list in the order of last releases."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.order = []
        self.counts, self.sizes, self.slots = {}, {}, {}
        self.pins, self.leaving = set(), set()

    def drop(self, who):
        self.order.remove(who)
        self.leaving.discard(who)
        return self.counts.pop(who), self.sizes.pop(who), self.slots.pop(who)

    def acquire(self, who, rank, num_bytes):
        placement = self.ledger.try_acquire(who, rank=rank, num_bytes=num_bytes)
        if who in self.counts:
            assert placement == Placement(self.slots[who], is_new=False)
            self.counts[who] += 1
            return
        free = [each for each in self.order if not self.counts[each] and each.id not in self.pins]
        if placement is None:
            # Not even without everybody who may go.
            held = [each for each in self.order if each not in free]
            held_bytes = sum(self.sizes[each] for each in held)
            assert held_bytes + num_bytes > 100 or len(held) == 4
            return
        gone = [eviction.ref for eviction in placement.evictions]
        assert set(gone) <= set(free)
        assert gone == [each for each in self.order if each in gone]
        for each in gone:
            # Nobody left in vain: with any one of them back there is no room.
            stays = [other for other in self.order if other not in gone or other == each]
            is_over = sum(self.sizes[other] for other in stays) + num_bytes > 100
            assert is_over or len(stays) == 4
        for eviction in placement.evictions:
            assert self.drop(eviction.ref)[2] == eviction.slot
        bucket_rank = min(bucket for bucket in (8, 16, 32) if bucket >= rank)
        taken = {slot.index for slot in self.slots.values() if slot.bucket_rank == bucket_rank}
        assert placement.slot == Slot(bucket_rank, min(set(range(5)) - taken))
        self.order.append(who)
        self.counts[who], self.sizes[who], self.slots[who] = 1, num_bytes, placement.slot

    def release(self, who):
        if not self.counts.get(who):
            return
        eviction = self.ledger.release(who)
        self.counts[who] -= 1
        if self.counts[who]:
            assert eviction is None
        elif who in self.leaving:
            assert eviction == Eviction(who, self.slots[who])
            self.drop(who)
        else:
            assert eviction is None
            self.order.remove(who)
            self.order.append(who)

    def evict(self, who):
        eviction = self.ledger.evict(who)
        if who not in self.counts:
            assert eviction is None
        elif self.counts[who]:
            assert eviction is None
            self.leaving.add(who)
        else:
            assert eviction == Eviction(who, self.slots[who])
            self.drop(who)

    def pin(self, who):
        self.ledger.pin(who.id)
        self.pins.add(who.id)

    def unpin(self, who):
        self.ledger.unpin(who.id)
        self.pins.discard(who.id)


REFS = st.builds(AdapterRef, st.sampled_from("abcdef"), st.sampled_from("12"))
OPERATIONS = st.one_of(
    st.tuples(st.just("acquire"), REFS, st.integers(0, 32), st.integers(1, 60)),
    st.tuples(st.sampled_from(["release", "release", "evict", "pin", "unpin"]), REFS),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_random_operations_agree_with_a_list(operations):
    ledger = make()
    model = Model(ledger)
    for name, *arguments in operations:
        getattr(model, name)(*arguments)

        ledger.check_invariants()
        assert {each: ledger.slot_of(each) for each in ledger.resident_refs} == model.slots
        assert {each: ledger.num_references(each) for each in model.counts} == model.counts
        assert ledger.stats.used_bytes == sum(model.sizes.values())


@pytest.mark.parametrize(
    ("max_rank", "ranks"), [(1, (8,)), (8, (8,)), (9, (8, 16)), (64, (8, 16, 32, 64))]
)
def test_buckets_double_up_to_the_largest_rank(max_rank, ranks):
    assert plan_bucket_ranks(max_rank) == ranks
