"""RemoteSource: adapters of an origin across the network, by way of a cache on the local disk."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from models.adapters.download_cache import CachedVersion, DownloadCache
from models.adapters.failure_memory import FailureMemory
from models.adapters.fetcher import Fetcher
from models.adapters.ids import check_adapter_id
from models.adapters.origin import (
    AdapterOrigin,
    RemoteState,
    RemoteUnusableError,
    describe_failure,
)
from models.adapters.remote_listing import RemoteListing
from models.adapters.source import AdapterFiles
from models.errors import AdapterLoadFailedError, DrainingError, ModelServiceError

_logger = logging.getLogger(__name__)

# Files that stay unusable for so long, without a change, are no rewrite in progress any more.
_MAX_REWRITE_PAUSE_S = 60.0
_MAX_NUM_REMEMBERED = 4096
_NUM_THREADS = 8
# A connection that hangs cannot be ended from here.
_CLOSE_WAIT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSourceConfig:
    """Limits of a remote source.

    Attributes:
        max_num_bytes: most bytes of an adapter's config and weights; more are never fetched.
        check_interval_s: seconds in which the origin is asked once per adapter, and for its list.
        settle_s: seconds for which changed files must look the same before they are fetched: the
            config and the weights of one version are written one after the other.
        failure_ttl_s: seconds for which a failure, or that there is no such adapter, is
            remembered instead of asked again.
        max_check_wait_s: most seconds that ``find`` waits for news of an adapter that it knows.
        max_fetch_wait_s: most seconds that ``find`` waits for one that it does not know. The
            fetching goes on, for whoever asks next.
    """

    max_num_bytes: int
    check_interval_s: float = 30.0
    settle_s: float = 5.0
    failure_ttl_s: float = 5.0
    max_check_wait_s: float = 0.5
    max_fetch_wait_s: float = 60.0


@dataclasses.dataclass(slots=True)
class _Known:
    """What is remembered of one adapter.

    Attributes:
        version: its last good version and the state that it was fetched from.
        look_again_at_s: when the origin is asked next.
        change: another state that it was seen in, or the stamp of one that is none.
        changed_at_s: when it was first seen in that.
        unusable: what is wrong with ``change``, None as long as nothing is.
    """

    version: CachedVersion
    look_again_at_s: float
    change: RemoteState | str | None = None
    changed_at_s: float = 0.0
    unusable: RemoteUnusableError | None = None


class RemoteSource:
    """Adapters that are fetched to the local disk before they are read.

    An adapter that is not known yet is fetched before ``find`` answers; the cache spares that if
    it holds the state that the origin tells of. A known one is asked for once an interval, in a
    thread of the source, and ``find`` waits for it ``max_check_wait_s`` at most. Its last good
    version is the answer until new files have looked the same for ``settle_s`` and were fetched
    whole; also while the origin cannot be reached. One that has gone is not found ``settle_s``
    later; files that stay unusable and unchanged for a minute are no longer hidden behind the
    former version. After a restart without a connection the cached version is served.

    A version is the hash of the contents, as in ``FolderSource``; what the origin tells decides
    only whether to fetch.

    Owner: any thread. ``find`` and ``list_ids`` wait for threads of the source, the others do not.
    Lifetime: threads start with the first adapter and end with ``close``.
    """

    def __init__(
        self,
        origin: AdapterOrigin,
        cache: DownloadCache,
        config: RemoteSourceConfig,
        clock: Callable[[], float],
    ) -> None:
        """Wire a source; nothing is asked yet.

        Args:
            origin: what is asked.
            cache: of this origin alone.
            config: limits.
            clock: seconds.
        """
        self._origin = origin
        self._cache = cache
        self._config = config
        self._clock = clock
        self._fetcher = Fetcher(
            origin,
            cache,
            max_num_bytes=config.max_num_bytes,
            retry_after_s=config.failure_ttl_s,
            check_open=self._check_open,
        )
        self._listing = RemoteListing(
            origin,
            clock,
            self._check_open,
            check_interval_s=config.check_interval_s,
            max_wait_s=config.max_check_wait_s,
        )
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, _Known] = collections.OrderedDict()
        self._failures: FailureMemory[str] = FailureMemory(
            config.failure_ttl_s, _MAX_NUM_REMEMBERED
        )
        self._looking: dict[str, Future[AdapterFiles]] = {}
        self._is_closing = threading.Event()
        self._lookers = ThreadPoolExecutor(
            _NUM_THREADS, thread_name_prefix="medley-adapter-download"
        )

    def find(self, adapter_id: str) -> AdapterFiles:
        """Return the current version of an adapter, or its last good one.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar; nobody was asked.
            AdapterNotFoundError: the origin has no such adapter.
            AdapterIncompatibleError: it has pickled weights only, or too many bytes.
            AdapterLoadFailedError: it cannot be fetched, now or a moment ago.
            DrainingError: the source is closed.
        """
        check_adapter_id(adapter_id)
        with self._lock:
            self._check_open()
            now_s = self._clock()
            known = self._known.get(adapter_id)
            if known is None:
                failure = self._failures.recall(adapter_id, now_s)
                if failure is not None:
                    raise failure
            else:
                self._known.move_to_end(adapter_id)
                if now_s < known.look_again_at_s:
                    return known.version.files
                # Whoever else asks now gets the last good version and does not wait as well.
                known.look_again_at_s = now_s + self._config.check_interval_s
            looking = self._looking.get(adapter_id)
            if looking is None:
                looking = self._lookers.submit(self._look, adapter_id)
                self._looking[adapter_id] = looking
        max_wait_s = (
            self._config.max_fetch_wait_s if known is None else self._config.max_check_wait_s
        )
        try:
            return _wait_for(looking, max_wait_s)
        except TimeoutError:
            if known is not None:
                return known.version.files
            raise self._fetcher.failure(
                adapter_id, f"fetching its files takes more than {max_wait_s:g} s"
            ) from None

    def recall(self, adapter_id: str) -> AdapterFiles | None:
        """Return the version that ``find`` gives without asking the origin; else None."""
        with self._lock:
            known = self._known.get(adapter_id)
            if known is None or self._clock() >= known.look_again_at_s:
                return None
            return known.version.files

    def forget(self, adapter_id: str) -> None:
        """Forget the last good version: the next ``find`` asks, and checks what is in the cache."""
        with self._lock:
            self._known.pop(adapter_id, None)

    def list_ids(self) -> tuple[str, ...]:
        """Return the ids that the origin listed last, and those that are known by request, sorted.

        The origin is asked once an interval, in a thread.
        """
        listed = self._listing.read()
        with self._lock:
            return tuple(sorted({*listed, *self._known}))

    def close(self) -> None:
        """End the threads; who waits for a file gets a DrainingError. Idempotent.

        Waits for a few seconds at most, whatever the network does.
        """
        self._is_closing.set()
        self._lookers.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            # ``wait`` would wait for cancelled ones in vain.
            looking = [each for each in self._looking.values() if not each.cancelled()]
        wait(looking, _CLOSE_WAIT_S)
        self._listing.close(_CLOSE_WAIT_S)

    def _look(self, adapter_id: str) -> AdapterFiles:
        try:
            return self._refresh(adapter_id)
        except ModelServiceError as error:
            if not isinstance(error, DrainingError):
                with self._lock:
                    self._failures.remember(adapter_id, error, self._clock())
            raise
        finally:
            with self._lock:
                del self._looking[adapter_id]

    def _refresh(self, adapter_id: str) -> AdapterFiles:
        """Ask for an adapter and return the best version there is."""
        self._check_open()
        with self._lock:
            known = self._known.get(adapter_id)
        try:
            state = self._origin.look(adapter_id)
        except RemoteUnusableError as unusable:
            if known is None:
                raise unusable.error from unusable
            self._note_change(known, f"unusable: {unusable.stamp}")
            return self._hold(adapter_id, known, unusable)
        except ModelServiceError:
            raise
        except Exception as error:  # noqa: BLE001 - every library has its own
            _logger.warning(
                "adapter %s: its store cannot be reached (%s)", adapter_id, type(error).__name__
            )
            return self._do_without(adapter_id, known, error)
        if known is None:
            return self._enter(adapter_id, state)
        return self._update(adapter_id, known, state)

    def _do_without(self, adapter_id: str, known: _Known | None, error: Exception) -> AdapterFiles:
        """Answer while the origin cannot be reached."""
        if known is not None:
            return known.version.files
        cached = self._fetcher.take_cached(adapter_id)
        if cached is None:
            raise self._fetcher.failure(adapter_id, describe_failure(error)) from error
        return self._remember(adapter_id, cached, self._config.failure_ttl_s)

    def _enter(self, adapter_id: str, state: RemoteState) -> AdapterFiles:
        """Make an adapter known."""
        version = self._fetcher.take_cached(adapter_id)
        if version is None or version.state != state:
            try:
                version = self._fetcher.fetch(adapter_id, state)
            except RemoteUnusableError as unusable:
                raise unusable.error from unusable
        # It may have been looked at between the writing of its two files.
        return self._remember(adapter_id, version, self._settle_s)

    def _update(self, adapter_id: str, known: _Known, state: RemoteState) -> AdapterFiles:
        """Take note of a known adapter's state, and fetch it once it has settled."""
        if state == known.version.state:
            known.change = None
            self._cache.touch(known.version.files)
            return known.version.files
        self._note_change(known, state)
        if known.unusable is not None:
            return self._hold(adapter_id, known, known.unusable)
        now_s = self._clock()
        if now_s - known.changed_at_s < self._config.settle_s:
            known.look_again_at_s = now_s + self._settle_s
            return known.version.files
        try:
            version = self._fetcher.fetch(adapter_id, state)
        except RemoteUnusableError as unusable:
            known.unusable = unusable
            return self._hold(adapter_id, known, unusable)
        except AdapterLoadFailedError as error:
            _logger.warning("%s; its former version is served", error)
            known.look_again_at_s = now_s + self._config.failure_ttl_s
            return known.version.files
        return self._remember(adapter_id, version, self._config.check_interval_s)

    def _note_change(self, known: _Known, change: RemoteState | str) -> None:
        if known.change != change:
            known.change, known.changed_at_s = change, self._clock()
            known.unusable = None

    def _hold(self, adapter_id: str, known: _Known, unusable: RemoteUnusableError) -> AdapterFiles:
        """Keep the last good version for a while although the current files are of no use."""
        is_gone = not unusable.stamp
        patience_s = self._config.settle_s if is_gone else _MAX_REWRITE_PAUSE_S
        now_s = self._clock()
        if now_s - known.changed_at_s < patience_s:
            known.look_again_at_s = now_s + self._settle_s
            return known.version.files
        self.forget(adapter_id)
        self._cache.drop(known.version.files)
        raise unusable.error from unusable

    @property
    def _settle_s(self) -> float:
        return min(self._config.settle_s, self._config.check_interval_s)

    def _remember(self, adapter_id: str, version: CachedVersion, fresh_s: float) -> AdapterFiles:
        with self._lock:
            self._known[adapter_id] = _Known(version, self._clock() + fresh_s)
            self._failures.forget(adapter_id)
            while len(self._known) > _MAX_NUM_REMEMBERED:
                self._known.popitem(last=False)
        return version.files

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise DrainingError


def _wait_for(looking: Future[AdapterFiles], max_wait_s: float) -> AdapterFiles:
    """Return or raise what a look comes to; no two callers raise the same object.

    Raises:
        TimeoutError: it takes longer.
    """
    try:
        return looking.result(max_wait_s)
    except CancelledError:
        raise DrainingError from None
    except ModelServiceError as error:
        raise copy.copy(error) from error
