"""AdapterCatalogue: gives requests the weights of their adapters, loading each version once."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from models.adapters.failure_memory import FailureMemory
from models.adapters.host_stats import AdapterFacts, CatalogueStats
from models.adapters.host_tier import HostEntry, HostState, HostTier, W
from models.adapters.ids import check_adapter_id
from models.adapters.lease import Lease
from models.adapters.meter import AdapterMeter
from models.adapters.source import AdapterFiles, AdapterSource, FilesChangedError
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterSlotTimeoutError,
    DrainingError,
    ModelServiceError,
)
from models.requests import AdapterRef

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

_MAX_NUM_FAILURES = 1024
# Files that change under a load are found anew so often.
_MAX_NUM_TRIES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueConfig:
    """Limits of the host tier.

    Attributes:
        budget_bytes: most bytes of weights in host memory. A load takes its files' size once or
            twice more while it runs.
        num_load_threads: adapters that are loaded at the same time.
        max_wait_s: most seconds that a request waits for room, before its load begins.
        failure_ttl_s: seconds for which a failed load is remembered instead of tried again.
        num_find_threads: adapters that are looked for at the same time; they wait for the source
            and do no work of their own.
    """

    budget_bytes: int
    num_load_threads: int = 2
    max_wait_s: float = 10.0
    failure_ttl_s: float = 5.0
    num_find_threads: int = 4


@dataclasses.dataclass(slots=True)
class _Totals:
    num_hits: int = 0
    num_misses: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    num_remembered_failures: int = 0
    load_s: float = 0.0


class AdapterCatalogue(Generic[W]):
    """The host tier: finds, loads and keeps adapters, and leases them to requests.

    A request gets the version that is current when it asks and keeps it. However many ask for a
    version, it is found once and loaded once; those that stop waiting stop nobody else. A load
    that fails leaves nothing behind, answers all who waited, and is remembered for a while under
    its version, so that changed files are tried at once.

    Threads: ``resolve`` and ``prefetch`` run on any event loop, all else on any thread; none of
    them waits for the disk but ``close``. State is under one lock that is held for dictionary work
    only. ``source.find`` and ``load`` run in pools of threads of the catalogue.

    Lifetime: threads start with the first adapter and end with ``close``. The source is the
    caller's and is closed before, so that nobody waits for a hash.
    """

    def __init__(
        self,
        source: AdapterSource,
        load: Callable[[AdapterFiles], W],
        config: CatalogueConfig,
        clock: Callable[[], float],
        meter: AdapterMeter | None = None,
    ) -> None:
        """Wire the catalogue; nothing is loaded yet.

        Args:
            source: where adapters are found.
            load: returns the weights of exactly ``files.version`` or raises FilesChangedError
                (``read_contents`` does so); runs in a thread of the catalogue. A ModelServiceError
                reaches the requests as it is, anything else as an AdapterLoadFailedError.
            config: limits.
            clock: seconds.
            meter: told of loads, hits and evictions; None counts for nobody.
        """
        self._source = source
        self._meter = meter or AdapterMeter(0)
        self._load = load
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._tier: HostTier[W] = HostTier(
            config.budget_bytes, lambda ref: self._meter.count_eviction(ref.id)
        )
        self._finding: dict[str, Future[AdapterFiles]] = {}
        self._failures: FailureMemory[AdapterRef] = FailureMemory(
            config.failure_ttl_s, _MAX_NUM_FAILURES
        )
        self._totals = _Totals()
        self._is_closed = False
        self._finders = ThreadPoolExecutor(
            config.num_find_threads, thread_name_prefix="medley-adapter-find"
        )
        self._loaders = ThreadPoolExecutor(
            config.num_load_threads, thread_name_prefix="medley-adapter-load"
        )

    @property
    def stats(self) -> CatalogueStats:
        """State and totals now."""
        with self._lock:
            states = [entry.state for entry in self._tier.entries]
            return CatalogueStats(
                budget_bytes=self._tier.budget_bytes,
                used_bytes=self._tier.used_bytes,
                num_ready=states.count(HostState.READY),
                num_loading=states.count(HostState.LOADING),
                num_queued=states.count(HostState.QUEUED),
                num_in_flight=sum(entry.num_references for entry in self._tier.entries),
                num_evictions=self._tier.num_evictions,
                **dataclasses.asdict(self._totals),
            )

    def facts(self) -> tuple[AdapterFacts, ...]:
        """Return what is in the host tier or on its way there, sorted by id."""
        with self._lock:
            return tuple(
                AdapterFacts(
                    ref=entry.ref,
                    state=entry.state,
                    num_bytes=entry.num_bytes,
                    num_hits=entry.num_hits,
                    last_used_s=entry.last_used_s,
                    num_in_flight=entry.num_references,
                    is_pinned=self._tier.is_pinned(entry.ref.id),
                    is_leaving=entry.is_leaving,
                )
                for entry in sorted(self._tier.entries, key=lambda each: (each.ref.id, each.order))
            )

    async def resolve(self, adapter_id: str) -> Lease[W]:
        """Return a lease of the current version, once it is in host memory.

        Cancelling it gives up the place in the queue, never the load that others wait for. Set a
        limit with ``asyncio.timeout``: ``wait_for`` can lose a lease that comes at the last moment.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar; nothing was looked up.
            AdapterNotFoundError: there is no such adapter.
            AdapterIncompatibleError: it cannot be used, or is larger than the whole budget.
            AdapterLoadFailedError: it could not be loaded now, or a moment ago.
            AdapterSlotTimeoutError: others kept all of the memory for ``max_wait_s``.
            DrainingError: the catalogue is closed.
        """
        check_adapter_id(adapter_id)
        for _ in range(_MAX_NUM_TRIES):
            files = await self._find(adapter_id)
            try:
                return await self._lease(files)
            except FilesChangedError:
                continue
        raise AdapterLoadFailedError(
            adapter_id, "its files keep changing", self._config.failure_ttl_s
        )

    async def prefetch(self, adapter_id: str) -> AdapterRef:
        """Bring the current version into host memory, where it stays while there is room.

        Takes an earlier ``unload`` back. Returns what it brought, raises as ``resolve`` does.
        """
        with await self.resolve(adapter_id) as lease:
            with self._lock:
                entry = self._tier.get(lease.ref)
                if entry is not None:
                    self._tier.keep(entry)
            return lease.ref

    def unload(self, adapter_id: str) -> None:
        """Let all versions of an adapter go and take its pin back; unknown ones are no error.

        What nobody uses goes at once; the rest with its last request, and a request that comes
        before that uses the same weights, so that there never are two copies. It is no ban: the
        next request after that loads the adapter again.
        """
        with self._lock:
            self._tier.unload(adapter_id)
            self._start_queued()

    def pin(self, adapter_id: str) -> None:
        """Never evict an adapter's current version to make room, once it is loaded. Idempotent.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar.
        """
        check_adapter_id(adapter_id)
        with self._lock:
            self._tier.pin(adapter_id)

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back. Idempotent."""
        with self._lock:
            self._tier.unpin(adapter_id)
            self._start_queued()

    def close(self) -> None:
        """Answer whoever waits with a DrainingError and end the threads. Idempotent.

        Waits for loads that run. Leases that are out stay good until they are released.
        """
        with self._lock:
            self._is_closed = True
            for entry in self._tier.entries:
                if entry.state is not HostState.READY:
                    self._tier.fail(entry, DrainingError())
        self._finders.shutdown(wait=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)

    def check_invariants(self) -> None:
        """Check the host tier.

        Raises:
            RuntimeError: what is wrong with it.
        """
        with self._lock:
            self._tier.check_invariants()

    async def _find(self, adapter_id: str) -> AdapterFiles:
        files = self._source.recall(adapter_id)
        if files is not None:
            return files
        with self._lock:
            self._check_open()
            finding = self._finding.get(adapter_id)
            if finding is None:
                finding = self._finders.submit(self._run_find, adapter_id)
                self._finding[adapter_id] = finding
        return await _wait_for(finding)

    def _run_find(self, adapter_id: str) -> AdapterFiles:
        try:
            return self._source.find(adapter_id)
        except AdapterLoadFailedError:
            self._meter.count_failed_load(adapter_id)
            raise
        except ModelServiceError:
            raise
        except Exception as error:
            _logger.exception("finding adapter %s failed", adapter_id)
            raise self._load_failed(adapter_id, error) from error
        finally:
            with self._lock:
                del self._finding[adapter_id]

    async def _lease(self, files: AdapterFiles) -> Lease[W]:
        with self._lock:
            entry = self._join(files)
        try:
            if entry.state is HostState.QUEUED:
                await self._wait_for_room(entry)
            if entry.state is not HostState.READY:
                await _wait_for(entry.loaded)
        except BaseException:
            self._give_back(entry)
            raise
        return Lease(entry, self._give_back)

    async def _wait_for_room(self, entry: HostEntry[W]) -> None:
        try:
            async with asyncio.timeout(self._config.max_wait_s):
                await _wait_for(entry.started)
        except TimeoutError:
            raise AdapterSlotTimeoutError(entry.ref.id, self._config.max_wait_s) from None

    def _join(self, files: AdapterFiles) -> HostEntry[W]:
        """Take a reference to the entry of a version, which begins its load if it is new."""
        self._check_open()
        ref, now_s = AdapterRef(files.adapter_id, files.version), self._clock()
        entry = self._tier.get(ref)
        if entry is None:
            self._check_failures(ref, now_s)
            self._check_size(files.adapter_id, files.num_bytes)
            entry = self._tier.add(files, now_s)
        self._tier.reference(entry, now_s)
        if entry.state is HostState.READY:
            self._totals.num_hits += 1
            self._meter.count_hit(files.adapter_id)
        else:
            self._totals.num_misses += 1
        self._start_queued()
        return entry

    def _give_back(self, entry: HostEntry[W]) -> None:
        with self._lock:
            self._tier.release(entry)
            self._start_queued()

    def _start_queued(self) -> None:
        if self._is_closed:
            return
        for entry in self._tier.start_queued():
            self._loaders.submit(self._run_load, entry)

    def _run_load(self, entry: HostEntry[W]) -> None:
        started_s = self._clock()
        weights: W | None = None
        error: Exception | None = None
        try:
            weights = self._load(entry.files)
            self._check_size(entry.ref.id, weights.num_bytes)
        except FilesChangedError as caught:
            self._source.forget(entry.ref.id)
            error = caught
        except ModelServiceError as caught:
            error = caught
        except Exception as caught:
            _logger.exception("loading adapter %s failed", entry.ref.id)
            error = self._load_failed(entry.ref.id, caught)
        with self._lock:
            load_s = self._clock() - started_s
            self._totals.load_s += load_s
            if error is None:
                self._meter.count_load(entry.ref.id, load_s)
            else:
                self._meter.count_failed_load(entry.ref.id)
            self._end_load(entry, weights, error)
            # Before the lock is free: what is unloaded next must not be held here still.
            weights = None

    def _end_load(self, entry: HostEntry[W], weights: W | None, error: Exception | None) -> None:
        if self._is_closed:
            return
        if error is None and weights is not None:
            self._totals.num_loads += 1
            self._tier.finish(entry, weights)
        elif error is not None:
            self._totals.num_failed_loads += 1
            if isinstance(error, ModelServiceError):
                self._failures.remember(entry.ref, error, self._clock())
            self._tier.fail(entry, error)
        self._start_queued()

    def _check_failures(self, ref: AdapterRef, now_s: float) -> None:
        failure = self._failures.recall(ref, now_s)
        if failure is not None:
            self._totals.num_remembered_failures += 1
            raise failure

    def _check_size(self, adapter_id: str, num_bytes: int) -> None:
        if num_bytes > self._config.budget_bytes:
            raise AdapterIncompatibleError(
                adapter_id,
                f"it has {num_bytes} bytes; the memory for adapters is "
                f"{self._config.budget_bytes} bytes",
            )

    def _load_failed(self, adapter_id: str, error: Exception) -> AdapterLoadFailedError:
        # Words of other people's exceptions tell paths; those of the system do not.
        reason = error.strerror if isinstance(error, OSError) else None
        return AdapterLoadFailedError(
            adapter_id, reason or type(error).__name__, self._config.failure_ttl_s
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise DrainingError


async def _wait_for(future: Future[_T]) -> _T:
    """Wait for what many wait for: leaving cancels nothing, and no two raise the same object."""
    waiting = asyncio.wrap_future(future)
    # Or asyncio tells the log of an error that nobody waited for any more.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        return await asyncio.shield(waiting)
    except (ModelServiceError, FilesChangedError) as error:
        raise copy.copy(error) from error
