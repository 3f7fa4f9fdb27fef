"""HostTier: which versions of which adapters are in host memory. Loads nothing, knows no time."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from models.adapters.source import AdapterFiles
from models.requests import AdapterRef


class HostWeights(Protocol):
    """Loaded weights of one adapter."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that they take."""
        ...


W = TypeVar("W", bound=HostWeights)


class HostState(enum.StrEnum):
    """How far an adapter is on its way into host memory."""

    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"


@dataclasses.dataclass(slots=True, eq=False)
class HostEntry(Generic[W]):
    """One version of one adapter.

    Attributes:
        ref: which.
        files: what it is loaded from.
        order: of entries of one adapter, the later one has the larger number.
        state: QUEUED waits for room, LOADING has it, READY has its weights.
        num_bytes: what counts against the budget: nothing, the size of the files, the weights'.
        weights: once it is READY.
        num_references: requests that wait for it or use it.
        num_hits: requests that found it READY.
        last_used_s: when a request last asked for it.
        is_leaving: it goes with its last reference.
        started: done when there is room for it, or never will be.
        loaded: done when it is READY, or why it never will be.
    """

    ref: AdapterRef
    files: AdapterFiles
    order: int
    last_used_s: float
    state: HostState = HostState.QUEUED
    num_bytes: int = 0
    weights: W | None = None
    num_references: int = 0
    num_hits: int = 0
    is_leaving: bool = False
    started: Future[None] = dataclasses.field(default_factory=Future)
    loaded: Future[None] = dataclasses.field(default_factory=Future)


class HostTier(Generic[W]):
    """Ledger of host memory: bytes, reference counts, pins, the queue for room.

    Only adapters that are READY, that no request refers to and that are not pinned are evicted,
    the one released longest ago first. Whoever needs room and finds none queues; the queue is
    strictly first come, first served, so that a small adapter never starves a large one. A new
    version that is READY lets the older ones of its adapter go as soon as nobody uses them.

    An adapter counts with the size of its files while it loads, since its weights are not known;
    if these are larger, the tier may be over its budget until something can be evicted.

    Owner: whoever holds the catalogue's lock.
    Invariants: used bytes are the sum of the entries'; the queue is exactly the QUEUED entries;
    what waits has a reference; what is leaving has one, or is LOADING.
    """

    def __init__(
        self, budget_bytes: int, on_eviction: Callable[[AdapterRef], None] = lambda _: None
    ) -> None:
        """Start empty.

        Args:
            budget_bytes: most bytes of all entries together.
            on_eviction: told of every version that makes room for others.
        """
        self._on_eviction = on_eviction
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_evictions = 0
        # Least recently released first.
        self._entries: collections.OrderedDict[AdapterRef, HostEntry[W]] = collections.OrderedDict()
        self._queue: collections.deque[HostEntry[W]] = collections.deque()
        self._pinned_ids: set[str] = set()
        self._num_added = 0

    @property
    def entries(self) -> tuple[HostEntry[W], ...]:
        """All entries, least recently released first."""
        return tuple(self._entries.values())

    @property
    def num_queued(self) -> int:
        """Entries that wait for room."""
        return len(self._queue)

    def get(self, ref: AdapterRef) -> HostEntry[W] | None:
        """Return an entry, None if there is none."""
        return self._entries.get(ref)

    def add(self, files: AdapterFiles, now_s: float) -> HostEntry[W]:
        """Queue a version that has no entry; the caller takes a reference to it next."""
        ref = AdapterRef(files.adapter_id, files.version)
        self._num_added += 1
        entry: HostEntry[W] = HostEntry(ref, files, self._num_added, now_s)
        self._entries[ref] = entry
        self._queue.append(entry)
        return entry

    def start_queued(self) -> list[HostEntry[W]]:
        """Make room for the front of the queue, evicting what may go.

        Returns:
            Entries that are LOADING from now on: somebody has to load them.
        """
        started = []
        while self._queue and self._make_room(self._queue[0].files.num_bytes):
            entry = self._queue.popleft()
            entry.state = HostState.LOADING
            self._count(entry, entry.files.num_bytes)
            entry.started.set_result(None)
            started.append(entry)
        return started

    def finish(self, entry: HostEntry[W], weights: W) -> None:
        """Make a LOADING entry READY and let older versions of its adapter go."""
        entry.state = HostState.READY
        entry.weights = weights
        self._count(entry, weights.num_bytes)
        for other in self.entries:
            if other.ref.id == entry.ref.id and other.order < entry.order:
                self._let_go(other)
        self._drop_if_left(entry)
        self._make_room(0)
        entry.loaded.set_result(None)

    def fail(self, entry: HostEntry[W], error: Exception) -> None:
        """Take an entry out that never got READY; who waits for it gets the error."""
        if entry.state is HostState.QUEUED:
            self._queue.remove(entry)
            entry.started.set_result(None)
        self._drop(entry)
        entry.loaded.set_exception(error)

    def reference(self, entry: HostEntry[W], now_s: float) -> None:
        """Count a request that waits for an entry or uses it."""
        entry.num_references += 1
        entry.num_hits += entry.state is HostState.READY
        entry.last_used_s = now_s

    def release(self, entry: HostEntry[W]) -> None:
        """Take a reference back, also of an entry that failed meanwhile."""
        if entry.num_references == 0:
            raise RuntimeError(f"{entry.ref} is released more often than it was referenced")
        entry.num_references -= 1
        if entry.num_references > 0 or self._entries.get(entry.ref) is not entry:
            return
        if entry.state is HostState.QUEUED:
            # Nobody waits any more and nothing has begun.
            self._queue.remove(entry)
            self._drop(entry)
            return
        self._entries.move_to_end(entry.ref)
        self._drop_if_left(entry)
        self._make_room(0)

    def unload(self, adapter_id: str) -> None:
        """Let all versions of an adapter go: what is in use or loading with its last reference."""
        self._pinned_ids.discard(adapter_id)
        for entry in self.entries:
            if entry.ref.id == adapter_id:
                self._let_go(entry)

    def keep(self, entry: HostEntry[W]) -> None:
        """Take back that an entry is leaving."""
        entry.is_leaving = False

    def pin(self, adapter_id: str) -> None:
        """Never evict an adapter to make room; an older version still goes. Idempotent."""
        self._pinned_ids.add(adapter_id)

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back. Idempotent."""
        self._pinned_ids.discard(adapter_id)
        self._make_room(0)

    def is_pinned(self, adapter_id: str) -> bool:
        """Return whether an adapter is pinned."""
        return adapter_id in self._pinned_ids

    def check_invariants(self) -> None:
        """Check the whole tier.

        Raises:
            RuntimeError: what is wrong with it.
        """
        if self.used_bytes != sum(entry.num_bytes for entry in self.entries):
            raise RuntimeError("used bytes are not the sum of the entries'")
        if list(self._queue) != sorted(
            (entry for entry in self.entries if entry.state is HostState.QUEUED),
            key=lambda entry: entry.order,
        ):
            raise RuntimeError("the queue is not the queued entries in their order")
        for entry in self.entries:
            self._check_entry(entry)
        if self.used_bytes > self.budget_bytes and any(map(self._is_evictable, self.entries)):
            raise RuntimeError("the tier is over its budget although something can be evicted")

    def _check_entry(self, entry: HostEntry[W]) -> None:
        is_ready = entry.state is HostState.READY
        if entry.num_references < 0:
            raise RuntimeError(f"{entry.ref} has a negative reference count")
        if is_ready != (entry.weights is not None) or is_ready != entry.loaded.done():
            raise RuntimeError(f"{entry.ref} is {entry.state} with or without weights")
        if entry.started.done() != (entry.state is not HostState.QUEUED):
            raise RuntimeError(f"{entry.ref} is {entry.state}, but started or not")
        if entry.num_references == 0:
            if entry.state is HostState.QUEUED:
                raise RuntimeError(f"nobody waits for {entry.ref}")
            if is_ready and entry.is_leaving:
                raise RuntimeError(f"{entry.ref} should have left")

    def _is_evictable(self, entry: HostEntry[W]) -> bool:
        return (
            entry.state is HostState.READY
            and entry.num_references == 0
            and entry.ref.id not in self._pinned_ids
        )

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until so many bytes fit. If they cannot, nothing is evicted but an excess."""
        if self.used_bytes + num_bytes <= self.budget_bytes:
            return True
        evictable = [entry for entry in self.entries if self._is_evictable(entry)]
        fixed_bytes = self.used_bytes - sum(entry.num_bytes for entry in evictable)
        can_fit = fixed_bytes + num_bytes <= self.budget_bytes
        target_bytes = self.budget_bytes - (num_bytes if can_fit else 0)
        for entry in evictable:
            if self.used_bytes <= target_bytes:
                break
            self._drop(entry)
            self.num_evictions += 1
            self._on_eviction(entry.ref)
        return can_fit

    def _let_go(self, entry: HostEntry[W]) -> None:
        entry.is_leaving = True
        self._drop_if_left(entry)

    def _drop_if_left(self, entry: HostEntry[W]) -> None:
        is_unused = entry.state is HostState.READY and entry.num_references == 0
        if is_unused and entry.is_leaving:
            self._drop(entry)

    def _drop(self, entry: HostEntry[W]) -> None:
        del self._entries[entry.ref]
        # A lease that was released may be around for long.
        entry.weights = None
        self._count(entry, 0)

    def _count(self, entry: HostEntry[W], num_bytes: int) -> None:
        self.used_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes
