"""What the host tier holds and has done, as frozen snapshots. Computes nothing."""

from __future__ import annotations

import dataclasses

from models.adapters.host_tier import HostState
from models.requests import AdapterRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """One version of an adapter in the host tier.

    Attributes:
        ref: which.
        state: how far it is.
        num_bytes: what it counts against the budget.
        num_hits: requests that found it ready.
        last_used_s: when a request last asked for it, by the catalogue's clock.
        num_in_flight: requests that wait for it or use it.
        is_pinned: it is not evicted to make room.
        is_leaving: it goes with its last request.
    """

    ref: AdapterRef
    state: HostState
    num_bytes: int
    num_hits: int
    last_used_s: float
    num_in_flight: int
    is_pinned: bool
    is_leaving: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueStats:
    """State and totals of the host tier, over all adapters; totals never fall.

    Attributes:
        budget_bytes: most bytes in host memory.
        used_bytes: bytes that count against it now.
        num_ready: versions in host memory.
        num_loading: versions that are being loaded.
        num_queued: versions that wait for room.
        num_in_flight: requests that wait or hold a lease.
        num_hits: requests that found their weights ready.
        num_misses: requests that did not; those that joined a running load included.
        num_loads: loads that succeeded.
        num_failed_loads: loads that did not, changed files included.
        num_remembered_failures: requests that were answered with an earlier failure.
        num_evictions: versions that made room for others.
        load_s: seconds spent in loads.
    """

    budget_bytes: int
    used_bytes: int
    num_ready: int
    num_loading: int
    num_queued: int
    num_in_flight: int
    num_hits: int
    num_misses: int
    num_loads: int
    num_failed_loads: int
    num_remembered_failures: int
    num_evictions: int
    load_s: float
