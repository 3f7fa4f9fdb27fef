"""AdapterUses: which adapters the open requests of an engine use. Knows no files and no tensors."""

from __future__ import annotations

import collections
from typing import Protocol

from models.adapters.ledger import AdapterCost
from models.adapters.weights import AdapterWeights
from models.errors import AdapterIncompatibleError
from models.requests import AdapterRef
from models.scheduling.adapter_seats import AdapterSeats


class AdapterHolder(Protocol):
    """What is needed of a runner that can place adapters."""

    def adapter_cost(self, weights: AdapterWeights) -> AdapterCost:
        """Return what an adapter takes on the device."""
        ...

    def hold_adapter(self, weights: AdapterWeights) -> None:
        """Keep the weights of an adapter that plans may place from now on. Idempotent."""
        ...

    def drop_adapter(self, ref: AdapterRef) -> None:
        """Let go of weights that no plan will place."""
        ...


class AdapterUses:
    """Counts open requests per adapter, so that the runner holds exactly what plans may place.

    Owner: step thread.
    """

    def __init__(self, holder: AdapterHolder, seats: AdapterSeats, budget_bytes: int) -> None:
        """Begin with no request.

        Args:
            holder: the runner.
            seats: the scheduler's.
            budget_bytes: of all slots.
        """
        self._holder = holder
        self._seats = seats
        self._budget_bytes = budget_bytes
        self._num_users: collections.Counter[AdapterRef] = collections.Counter()

    @property
    def resident_refs(self) -> tuple[AdapterRef, ...]:
        """Adapters that have a slot."""
        return self._seats.resident_refs

    def check_cost(self, weights: AdapterWeights) -> AdapterCost:
        """Return what an adapter takes on the device.

        Raises:
            AdapterIncompatibleError: that is more than all slots together.
        """
        cost = self._holder.adapter_cost(weights)
        if cost.num_bytes > self._budget_bytes:
            raise AdapterIncompatibleError(
                weights.ref.id,
                f"it takes {cost.num_bytes} bytes on the device; "
                f"all slots together have {self._budget_bytes}",
            )
        return cost

    def add_user(self, weights: AdapterWeights) -> None:
        """Take note of one more open request."""
        self._holder.hold_adapter(weights)
        self._num_users[weights.ref] += 1

    def remove_user(self, ref: AdapterRef) -> None:
        """Take note that an open request has ended."""
        self._num_users[ref] -= 1
        if not self._num_users[ref]:
            del self._num_users[ref]
            self._holder.drop_adapter(ref)

    def pin(self, adapter_id: str) -> None:
        """Keep an adapter in its slot once it has one. Idempotent."""
        self._seats.pin(adapter_id)

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back. Idempotent."""
        self._seats.unpin(adapter_id)

    def evict(self, adapter_id: str) -> None:
        """Take an adapter's slots away, at once or with the last sequence that uses them."""
        self._seats.evict(adapter_id)
