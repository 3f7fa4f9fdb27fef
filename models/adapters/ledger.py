"""AdapterLedger: which adapter is resident in which device slot. Holds no tensors."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from models.requests import AdapterRef


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A place for one adapter on the device.

    Attributes:
        bucket_rank: the rank that the slot has room for; adapters of one bucket run in one product.
        index: counts from 0 within the bucket; low ones are taken first, so that the slots in use
            are a dense range.
    """

    bucket_rank: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCost:
    """What an adapter takes on the device.

    Attributes:
        rank: the largest of its ranks; decides its bucket.
        num_bytes: of its slot in that bucket.
    """

    rank: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Eviction:
    """An adapter that has just lost its slot: its tensors are to be dropped."""

    ref: AdapterRef
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The answer to an acquisition.

    Attributes:
        slot: where the adapter is.
        is_new: it was not resident: the store has to fill the slot before a row uses it.
        evictions: who made room for it, oldest use first; their slots are to be cleared before
            this one is filled. Empty unless ``is_new``.
    """

    slot: Slot
    is_new: bool
    evictions: tuple[Eviction, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerStats:
    """State and totals of the device tier; totals never fall.

    Attributes:
        budget_bytes: most bytes that may be resident.
        used_bytes: bytes that are.
        max_num_slots: most adapters that may be resident.
        num_resident: adapters that are.
        num_in_use: resident adapters that at least one sequence holds.
        num_pinned: resident adapters that are not evicted to make room.
        num_hits: acquisitions of a resident adapter.
        num_placements: acquisitions that gave out a new slot.
        num_refusals: acquisitions that found no room.
        num_evictions: adapters that lost their slot, asked for or not.
    """

    budget_bytes: int
    used_bytes: int
    max_num_slots: int
    num_resident: int
    num_in_use: int
    num_pinned: int
    num_hits: int
    num_placements: int
    num_refusals: int
    num_evictions: int


@dataclasses.dataclass(slots=True)
class _Resident:
    """One adapter in its slot.

    Attributes:
        slot: where.
        num_bytes: what it costs.
        num_references: sequences that hold it.
        is_leaving: an eviction was asked for while it was in use; it goes with its last reference.
    """

    slot: Slot
    num_bytes: int
    num_references: int = 0
    is_leaving: bool = False


def bucket_rank_for(rank: int, bucket_ranks: Sequence[int]) -> int:
    """Return the smallest bucket that holds a rank.

    Loading has checked ranks against the cap, so one above every bucket is a fault of ours.

    Args:
        rank: of an adapter.
        bucket_ranks: rising.
    """
    for bucket_rank in bucket_ranks:
        if rank <= bucket_rank:
            return bucket_rank
    raise RuntimeError(f"rank {rank} is above every bucket {bucket_ranks}")


def plan_bucket_ranks(max_rank: int) -> tuple[int, ...]:
    """Return the ranks that slots come in: doubling from 8, the last one holds ``max_rank``."""
    ranks = [8]
    while ranks[-1] < max_rank:
        ranks.append(ranks[-1] * 2)
    return tuple(ranks)


class AdapterLedger:
    """Ledger of device slots: bytes, reference counts, pins, and the order of eviction.

    A sequence acquires its adapter before it joins a step and releases it when it leaves. Only
    adapters that nobody holds and nobody pinned are evicted to make room, the one released
    longest ago first; what can stay does stay. Two versions of an adapter are two adapters here.

    Owner: step thread.
    Invariants: used bytes are the sum of the residents' and within the budget; no two residents
    have one slot; an adapter that is leaving is in use.
    """

    def __init__(
        self, *, budget_bytes: int, max_num_slots: int, bucket_ranks: Iterable[int]
    ) -> None:
        """Start with every slot empty.

        Args:
            budget_bytes: most bytes of all residents together.
            max_num_slots: most residents, over all buckets.
            bucket_ranks: the ranks that slots come in; an adapter goes to the smallest that
                holds it.
        """
        self._budget_bytes = budget_bytes
        self._max_num_slots = max_num_slots
        self._bucket_ranks = tuple(sorted(set(bucket_ranks)))
        # Least recently released first; adapters in use are in it too, wherever they were.
        self._residents: collections.OrderedDict[AdapterRef, _Resident] = collections.OrderedDict()
        self._pins: set[str] = set()
        self._used_bytes = 0
        self._num_hits = 0
        self._num_placements = 0
        self._num_refusals = 0
        self._num_evictions = 0

    @property
    def stats(self) -> LedgerStats:
        """State and totals now."""
        return LedgerStats(
            budget_bytes=self._budget_bytes,
            used_bytes=self._used_bytes,
            max_num_slots=self._max_num_slots,
            num_resident=len(self._residents),
            num_in_use=sum(each.num_references > 0 for each in self._residents.values()),
            num_pinned=sum(ref.id in self._pins for ref in self._residents),
            num_hits=self._num_hits,
            num_placements=self._num_placements,
            num_refusals=self._num_refusals,
            num_evictions=self._num_evictions,
        )

    @property
    def resident_refs(self) -> tuple[AdapterRef, ...]:
        """Adapters that have a slot."""
        return tuple(self._residents)

    def slot_of(self, ref: AdapterRef) -> Slot | None:
        """Return an adapter's slot, None if it is not resident."""
        resident = self._residents.get(ref)
        return None if resident is None else resident.slot

    def num_references(self, ref: AdapterRef) -> int:
        """Return how many sequences hold an adapter."""
        resident = self._residents.get(ref)
        return 0 if resident is None else resident.num_references

    def try_acquire(self, ref: AdapterRef, *, rank: int, num_bytes: int) -> Placement | None:
        """Take one reference to an adapter, giving it a slot if it has none.

        Args:
            ref: which adapter.
            rank: its largest rank.
            num_bytes: what it costs in the slot that its rank needs; counts only if it is new.

        Returns:
            Where it is and what the store has to do, or None if there is no room until somebody
            releases; then nothing has changed.
        """
        resident = self._residents.get(ref)
        if resident is not None:
            resident.num_references += 1
            self._num_hits += 1
            return Placement(resident.slot, is_new=False)
        bucket_rank = bucket_rank_for(rank, self._bucket_ranks)
        leaving = self._choose_evictions(num_bytes)
        if leaving is None:
            self._num_refusals += 1
            return None
        evictions = tuple(self._remove(each) for each in leaving)
        slot = self._lowest_free_slot(bucket_rank)
        self._residents[ref] = _Resident(slot, num_bytes, num_references=1)
        self._used_bytes += num_bytes
        self._num_placements += 1
        return Placement(slot, is_new=True, evictions=evictions)

    def release(self, ref: AdapterRef) -> Eviction | None:
        """Give back one reference; the adapter stays resident while there is room.

        Returns:
            The eviction that was asked for while the adapter was in use, if this was the last
            reference; else None.
        """
        resident = self._residents.get(ref)
        if resident is None or resident.num_references == 0:
            raise RuntimeError(f"{ref} is released more often than it was acquired")
        resident.num_references -= 1
        if resident.num_references > 0:
            return None
        if resident.is_leaving:
            return self._remove(ref)
        self._residents.move_to_end(ref)
        return None

    def evict(self, ref: AdapterRef) -> Eviction | None:
        """Take an adapter's slot away, pinned or not: at once, or with its last reference.

        For unloading, for a version that is no longer current, and after a slot that could not
        be filled. An adapter that is acquired again meanwhile is used where it is.

        Returns:
            The eviction if it happened; None if the adapter is in use (``release`` returns it) or
            was not resident.
        """
        resident = self._residents.get(ref)
        if resident is None:
            return None
        if resident.num_references > 0:
            resident.is_leaving = True
            return None
        return self._remove(ref)

    def pin(self, adapter_id: str) -> None:
        """Never evict an adapter to make room, whatever its version, now or later. Idempotent."""
        self._pins.add(adapter_id)

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back. Idempotent."""
        self._pins.discard(adapter_id)

    def check_invariants(self) -> None:
        """Check the whole ledger.

        Raises:
            RuntimeError: what is wrong with it.
        """
        if self._used_bytes != sum(each.num_bytes for each in self._residents.values()):
            raise RuntimeError("used bytes are not the sum of the residents'")
        if self._used_bytes > self._budget_bytes:
            raise RuntimeError("the residents are over the budget")
        if len(self._residents) > self._max_num_slots:
            raise RuntimeError("there are more residents than slots")
        slots = collections.Counter(each.slot for each in self._residents.values())
        if any(count > 1 for count in slots.values()):
            raise RuntimeError("two adapters have one slot")
        for ref, resident in self._residents.items():
            if resident.slot.bucket_rank not in self._bucket_ranks:
                raise RuntimeError(f"{ref} is in a bucket that does not exist")
            if not 0 <= resident.slot.index < self._max_num_slots:
                raise RuntimeError(f"{ref} has a slot out of range")
            if resident.num_references < 0:
                raise RuntimeError(f"{ref} has a negative reference count")
            if resident.is_leaving and resident.num_references == 0:
                raise RuntimeError(f"{ref} should have left")

    def _choose_evictions(self, num_bytes: int) -> Sequence[AdapterRef] | None:
        """Return whom to evict for a new resident, oldest use first; None if that is not enough."""
        num_missing_bytes = self._used_bytes + num_bytes - self._budget_bytes
        num_missing_slots = len(self._residents) + 1 - self._max_num_slots
        chosen: list[AdapterRef] = []
        freed_bytes = 0
        for ref, resident in self._residents.items():
            if freed_bytes >= num_missing_bytes and len(chosen) >= num_missing_slots:
                break
            if resident.num_references == 0 and ref.id not in self._pins:
                chosen.append(ref)
                freed_bytes += resident.num_bytes
        if freed_bytes < num_missing_bytes or len(chosen) < num_missing_slots:
            return None
        # A large one, chosen last, may have made smaller ones needless: the recent of these stay.
        for ref in reversed(tuple(chosen)):
            num_bytes_without = freed_bytes - self._residents[ref].num_bytes
            if num_bytes_without >= num_missing_bytes and len(chosen) - 1 >= num_missing_slots:
                chosen.remove(ref)
                freed_bytes = num_bytes_without
        return chosen

    def _lowest_free_slot(self, bucket_rank: int) -> Slot:
        taken = {each.slot for each in self._residents.values()}
        slots = (Slot(bucket_rank, index) for index in itertools.count())
        return next(slot for slot in slots if slot not in taken)

    def _remove(self, ref: AdapterRef) -> Eviction:
        resident = self._residents.pop(ref)
        self._used_bytes -= resident.num_bytes
        self._num_evictions += 1
        return Eviction(ref, resident.slot)
