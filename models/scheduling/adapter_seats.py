"""AdapterSeats: which sequences may run as far as adapter slots go. Holds no tensors."""

from __future__ import annotations

from models.adapters.ledger import AdapterLedger, Eviction, LedgerStats, Slot
from models.requests import AdapterRef
from models.scheduling.sequence import Sequence
from models.scheduling.step_plan import AdapterPlacement


class AdapterSeats:
    """The scheduler's view of the ledger of adapter slots.

    Fairness between adapters: a sequence whose adapter finds no slot is passed over by those that
    need none (base rows, and adapters that are resident anyway), at most ``max_num_overtakes``
    times; then nobody is admitted before it, and as running sequences end its slot comes free. Of
    several that need a slot the oldest is the first to get one.

    Owner: step thread.
    Invariants: exactly the running sequences with an adapter hold a reference to its slot.
    """

    def __init__(self, ledger: AdapterLedger, *, max_num_overtakes: int = 64) -> None:
        self._ledger = ledger
        self._max_num_overtakes = max_num_overtakes
        self._placements: list[AdapterPlacement] = []
        self._vacated: list[Slot] = []

    @property
    def stats(self) -> LedgerStats:
        """State of the ledger."""
        return self._ledger.stats

    @property
    def resident_refs(self) -> tuple[AdapterRef, ...]:
        """Adapters that have a slot."""
        return self._ledger.resident_refs

    def needs_new_slot(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter is not resident; False without an adapter."""
        return sequence.adapter is not None and self._ledger.slot_of(sequence.adapter) is None

    def may_be_passed_over(self, sequence: Sequence) -> bool:
        """Whether younger ones may still be admitted before a sequence that waits for a slot."""
        return sequence.num_overtakes < self._max_num_overtakes

    def try_take(self, sequence: Sequence) -> bool:
        """Take a reference to the slot of a sequence's adapter; True without an adapter."""
        if sequence.adapter is None:
            return True
        cost = sequence.adapter_cost
        assert cost is not None
        placement = self._ledger.try_acquire(
            sequence.adapter, rank=cost.rank, num_bytes=cost.num_bytes
        )
        sequence.is_waiting_for_slot = placement is None
        if placement is None:
            return False
        if placement.is_new:
            self._forget_evicted(placement.evictions)
            self._placements.append(AdapterPlacement(sequence.adapter, placement.slot))
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Give back the reference of a sequence that stops running."""
        if sequence.adapter is not None and (eviction := self._ledger.release(sequence.adapter)):
            self._forget_evicted((eviction,))

    def slot_of(self, sequence: Sequence) -> Slot | None:
        """Return the slot that a running sequence uses; None is the base model."""
        return None if sequence.adapter is None else self._ledger.slot_of(sequence.adapter)

    def take_placements(self) -> tuple[AdapterPlacement, ...]:
        """Return the slots to be filled before the next step, once."""
        placements = tuple(self._placements)
        self._placements.clear()
        return placements

    def take_vacated(self) -> tuple[Slot, ...]:
        """Return the slots that lost their tenants, once; some may be filled again since."""
        vacated = tuple(self._vacated)
        self._vacated.clear()
        return vacated

    def pin(self, adapter_id: str) -> None:
        """Keep an adapter resident once it is. Idempotent."""
        self._ledger.pin(adapter_id)

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back. Idempotent."""
        self._ledger.unpin(adapter_id)

    def evict(self, adapter_id: str) -> None:
        """Take the slots of all versions away, at once or with the last running sequence."""
        self._ledger.unpin(adapter_id)
        for ref in self._ledger.resident_refs:
            if ref.id == adapter_id and (eviction := self._ledger.evict(ref)):
                self._forget_evicted((eviction,))

    def check_invariants(self, running: list[Sequence]) -> None:
        """Check the ledger against the sequences that run.

        Raises:
            RuntimeError: what is wrong.
        """
        self._ledger.check_invariants()
        counts: dict[AdapterRef, int] = {}
        for sequence in running:
            if sequence.adapter is not None:
                counts[sequence.adapter] = counts.get(sequence.adapter, 0) + 1
        for ref in {*counts, *self._ledger.resident_refs}:
            if self._ledger.num_references(ref) != counts.get(ref, 0):
                raise RuntimeError(f"{ref} is held by others than the sequences that run")

    def _forget_evicted(self, evictions: tuple[Eviction, ...]) -> None:
        """Drop placements that were never carried out: their tenants have lost the slot again."""
        gone = {eviction.slot for eviction in evictions}
        self._vacated.extend(gone)
        self._placements = [each for each in self._placements if each.slot not in gone]
