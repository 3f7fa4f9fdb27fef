"""FolderSource: adapters in a local folder, and which version of each is current."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

from models.adapters.adapter_folder import (
    AdapterFolder,
    Fingerprint,
    HashedFiles,
    LocatedFiles,
    UnusableFilesError,
)
from models.adapters.ids import check_adapter_id
from models.adapters.source import AdapterFiles
from models.errors import AdapterNotFoundError, DrainingError

# Files that stay unusable for so long, without a change, are no rewrite in progress any more.
_MAX_REWRITE_PAUSE_S = 60.0
_MAX_NUM_LOOKS = 5
_MAX_NUM_REMEMBERED = 4096
_MAX_NUM_LISTED_FOLDERS = 10_000


@dataclasses.dataclass(slots=True)
class _Known:
    """What is remembered of one adapter.

    Attributes:
        good: its last good version.
        checked_at_s: when the disk was last looked at.
        is_confirmed: the version was computed twice, an interval apart. The clock that times files
            ticks every few milliseconds only: a write in the tick of the first reading does not
            show in the fingerprint.
        unusable: the state in which the files cannot be used; None if they can.
        unusable_since_s: when they were first seen in it.
    """

    good: HashedFiles
    checked_at_s: float
    is_confirmed: bool = False
    unusable: Fingerprint | None = None
    unusable_since_s: float = 0.0


class FolderSource:
    """Adapters in a local folder: ``<root>/<adapter id>/adapter_config.json`` and its weights.

    Nothing is watched: the disk is looked at when an adapter is asked for, at most once an
    interval per adapter. One that is not known yet is hashed before ``find`` answers. If the files
    of a known one changed, a thread of the source hashes them, and ``find`` waits for it
    ``max_change_wait_s`` at most. The last good version is the answer until a new one was hashed
    from files that were whole and stood still, so neither touching files nor a rewrite that is
    not complete changes anything. A folder that has gone is not found; files that stay unusable
    and unchanged for a minute are no longer hidden behind the former version.

    Owner: any thread. ``find`` and ``list_ids`` wait for the disk, the others do not.
    Lifetime: threads start with the first adapter and end with ``close``.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float],
        *,
        check_interval_s: float = 1.0,
        max_change_wait_s: float = 0.25,
    ) -> None:
        """Remember where to look.

        Args:
            root: the folder of adapters; it may appear later.
            clock: seconds.
            check_interval_s: seconds in which the disk is looked at once per adapter.
            max_change_wait_s: most seconds that ``find`` waits for the hash of changed files, and
                for a folder that has just gone to come back.
        """
        self._folder = AdapterFolder(root, check_interval_s)
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._max_change_wait_s = max_change_wait_s
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, _Known] = collections.OrderedDict()
        self._hashing: dict[str, Future[HashedFiles]] = {}
        self._list_lock = threading.Lock()
        self._listed_ids: tuple[str, ...] = ()
        self._listed_at_s = -math.inf
        self._is_closing = threading.Event()
        self._hashers = ThreadPoolExecutor(2, thread_name_prefix="medley-adapter-hash")

    def find(self, adapter_id: str) -> AdapterFiles:
        """Return the current version of an adapter, or its last good one during a rewrite.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar; the disk was not touched.
            AdapterNotFoundError: there is no such adapter in the root.
            AdapterIncompatibleError: it has pickled weights only.
            AdapterLoadFailedError: its files are incomplete or cannot be read.
            DrainingError: the source is closed.
        """
        check_adapter_id(adapter_id)
        with self._lock:
            known = self._known.get(adapter_id)
            if known is not None:
                self._known.move_to_end(adapter_id)
                if self._is_fresh(known):
                    return known.good.files
                # Whoever else asks now gets the last good version and does not look as well.
                known.checked_at_s = self._clock()
        try:
            if known is None:
                self._folder.locate(adapter_id)
                return self._start_hashing(adapter_id, is_new=True).result().files
            return self._find_again(adapter_id, known)
        except UnusableFilesError as error:
            self.forget(adapter_id)
            raise error.error from None
        except AdapterNotFoundError:
            self.forget(adapter_id)
            raise
        except CancelledError:
            raise DrainingError from None

    def recall(self, adapter_id: str) -> AdapterFiles | None:
        """Return the version that ``find`` gives without a look at the disk; else None."""
        with self._lock:
            known = self._known.get(adapter_id)
            return known.good.files if known is not None and self._is_fresh(known) else None

    def forget(self, adapter_id: str) -> None:
        """Forget the last good version: the next ``find`` waits for what is on the disk."""
        with self._lock:
            self._known.pop(adapter_id, None)

    def list_ids(self) -> tuple[str, ...]:
        """Return the ids of the adapters in the root, sorted.

        The disk is looked at once an interval, at 10,000 folders at most. Whether an adapter's
        contents can be used is not known here.
        """
        with self._list_lock:
            if self._clock() - self._listed_at_s >= self._check_interval_s:
                folders = itertools.islice(self._folder.candidates(), _MAX_NUM_LISTED_FOLDERS)
                self._listed_ids = tuple(sorted(filter(self._folder.is_adapter, folders)))
                self._listed_at_s = self._clock()
            return self._listed_ids

    def close(self) -> None:
        """End the threads; who waits for a hash gets a DrainingError. Idempotent."""
        self._is_closing.set()
        self._hashers.shutdown(wait=True, cancel_futures=True)

    def _is_fresh(self, known: _Known) -> bool:
        return self._clock() - known.checked_at_s < self._check_interval_s

    def _find_again(self, adapter_id: str, known: _Known) -> AdapterFiles:
        """Look at a known adapter's files and answer with the best version there is."""
        try:
            located = self._locate_patiently(adapter_id)
            if located.fingerprint != known.good.fingerprint:
                hashing = self._start_hashing(adapter_id)
                wait([hashing], self._max_change_wait_s)
                if hashing.done():
                    return hashing.result().files
            elif not known.is_confirmed:
                self._start_hashing(adapter_id)
            known.unusable = None
        except UnusableFilesError as error:
            now_s = self._clock()
            if known.unusable != error.fingerprint:
                known.unusable, known.unusable_since_s = error.fingerprint, now_s
            if now_s - known.unusable_since_s > _MAX_REWRITE_PAUSE_S:
                raise
        return known.good.files

    def _start_hashing(self, adapter_id: str, *, is_new: bool = False) -> Future[HashedFiles]:
        """Return the running computation of an adapter's version, starting it if there is none.

        Args:
            adapter_id: whose.
            is_new: the caller knows no version; one that has come up meanwhile will do.
        """
        with self._lock:
            self._check_open()
            known = self._known.get(adapter_id)
            if is_new and known is not None:
                found: Future[HashedFiles] = Future()
                found.set_result(known.good)
                return found
            hashing = self._hashing.get(adapter_id)
            if hashing is None:
                hashing = self._hashers.submit(self._hash_and_remember, adapter_id)
                self._hashing[adapter_id] = hashing
            return hashing

    def _hash_and_remember(self, adapter_id: str) -> HashedFiles:
        try:
            hashed = self._folder.hash(adapter_id, self._check_open)
        except BaseException:
            with self._lock:
                del self._hashing[adapter_id]
            raise
        with self._lock:
            del self._hashing[adapter_id]
            known = self._known.get(adapter_id)
            if known is None:
                self._known[adapter_id] = _Known(hashed, checked_at_s=self._clock())
                while len(self._known) > _MAX_NUM_REMEMBERED:
                    self._known.popitem(last=False)
            else:
                known.is_confirmed = known.good == hashed
                known.good = hashed
                known.unusable = None
        return hashed

    def _locate_patiently(self, adapter_id: str) -> LocatedFiles:
        """Look again for a while if the folder has gone: another may be on its way there."""
        for _ in range(_MAX_NUM_LOOKS - 1):
            try:
                return self._folder.locate(adapter_id)
            except AdapterNotFoundError:
                self._is_closing.wait(self._max_change_wait_s / (_MAX_NUM_LOOKS - 1))
        return self._folder.locate(adapter_id)

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise DrainingError
