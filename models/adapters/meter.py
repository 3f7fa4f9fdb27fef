"""AdapterMeter: what each adapter was used for, for a bounded number of them. No torch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

# What adapters without a place share. No id has parentheses, so none can be mistaken for it.
OTHER_ADAPTERS = "(other)"


@dataclasses.dataclass(slots=True, kw_only=True)
class AdapterTotals:
    """Totals of one adapter, or of several together, over all its versions; they never fall.

    The meter adds to its own; whoever asks gets copies.

    Attributes:
        num_requests: requests that got a lease of it.
        num_generated_tokens: tokens of their answers that reached whoever asked.
        num_hits: requests that found it in host memory; operators' included.
        num_loads: loads that succeeded.
        load_s: seconds that these took.
        num_failed_loads: loads that did not, and searches for its files.
        num_evictions: versions that left host memory to make room.
    """

    num_requests: int = 0
    num_generated_tokens: int = 0
    num_hits: int = 0
    num_loads: int = 0
    load_s: float = 0.0
    num_failed_loads: int = 0
    num_evictions: int = 0


class AdapterMeter:
    """Adds up, per adapter for the first ones that are loaded, for the rest together.

    An adapter keeps its place, so that its totals never fall; the rest has the name
    OTHER_ADAPTERS. Only a load that succeeded or a request that was served takes a place: whoever
    asks for adapters that do not work takes none away.

    Owner: any thread.
    """

    def __init__(self, max_num_adapters: int) -> None:
        """Start at zero.

        Args:
            max_num_adapters: places.
        """
        self._max_num_adapters = max_num_adapters
        self._lock = threading.Lock()
        self._sums: dict[str, AdapterTotals] = {}
        self._others = AdapterTotals()

    def count_request(self, adapter_id: str) -> None:
        """Count a request that got its adapter."""
        with self._lock:
            self._place(adapter_id).num_requests += 1

    def count_tokens(self, adapter_id: str, num_tokens: int) -> None:
        """Count tokens of an answer."""
        with self._lock:
            self._find(adapter_id).num_generated_tokens += num_tokens

    def count_hit(self, adapter_id: str) -> None:
        """Count a request that found its adapter in host memory."""
        with self._lock:
            self._find(adapter_id).num_hits += 1

    def count_load(self, adapter_id: str, load_s: float) -> None:
        """Count a load that succeeded."""
        with self._lock:
            sums = self._place(adapter_id)
            sums.num_loads += 1
            sums.load_s += load_s

    def count_failed_load(self, adapter_id: str) -> None:
        """Count a load, or a search for files, that did not succeed."""
        with self._lock:
            self._find(adapter_id).num_failed_loads += 1

    def count_eviction(self, adapter_id: str) -> None:
        """Count a version that made room for others."""
        with self._lock:
            self._find(adapter_id).num_evictions += 1

    def totals(self) -> Mapping[str, AdapterTotals]:
        """Return the totals by adapter id, and under OTHER_ADAPTERS those of all others."""
        with self._lock:
            named = {OTHER_ADAPTERS: self._others, **self._sums}
            return {name: dataclasses.replace(sums) for name, sums in named.items()}

    def _place(self, adapter_id: str) -> AdapterTotals:
        if adapter_id not in self._sums and len(self._sums) < self._max_num_adapters:
            self._sums[adapter_id] = AdapterTotals()
        return self._find(adapter_id)

    def _find(self, adapter_id: str) -> AdapterTotals:
        return self._sums.get(adapter_id, self._others)
