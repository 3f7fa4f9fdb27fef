"""DownloadCache: versions of remote adapters on the local disk, bounded. Fetches nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from models.adapters.origin import RemoteFile, RemoteState
from models.adapters.source import AdapterFiles

_STATE_NAME = "state.json"
_TEMPORARY_PREFIX = ".tmp-"
# At least what the state of a version takes.
_STATE_BYTES = 1024


class CacheFullError(Exception):
    """There is no room and nothing that may go. Never leaves ``models.adapters``."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedVersion:
    """A version in the cache, and the state at its origin that it was fetched from."""

    files: AdapterFiles
    state: RemoteState


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    folder: Path
    num_bytes: int
    used_at_ns: int


class DownloadCache:
    """A folder with one folder per version, each complete or not there.

    A version is built in a temporary folder and renamed into place, so a process that ends in
    between leaves a temporary folder only, which the next one removes: whoever builds holds a lock
    on its folder, and a lock ends with its process. Several processes may share a cache. The least
    recently used version goes first when room is needed; a reader of a version that goes finds no
    files, which ``read_contents`` reports.

    Owner: any thread; every method waits for the disk.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        """Open a cache and remove what processes that ended have left half-done.

        Args:
            folder: of this cache alone; made if it is not there.
            budget_bytes: most bytes of all versions, those that are being built included; of
                builds of other processes only what is on the disk.

        Raises:
            OSError: the folder cannot be made.
        """
        self._budget_bytes = budget_bytes
        folder.mkdir(parents=True, exist_ok=True)
        # Real, as paths of adapters are.
        self._folder = folder.resolve()
        self._lock = threading.Lock()
        self._building: dict[Path, int] = {}
        for path in self._folder.glob(f"{_TEMPORARY_PREFIX}*"):
            if not _is_locked(path):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def max_version_bytes(self) -> int:
        """Most bytes of one version's files."""
        return self._budget_bytes - _STATE_BYTES

    @property
    def folder(self) -> Path:
        """Where temporary folders are made; a real path."""
        return self._folder

    def find(self, adapter_id: str) -> CachedVersion | None:
        """Return the version of an adapter that was used last; None if there is none.

        Whether its files are what they were is for ``read_contents`` to find out.
        """
        folders = self._folder.glob(f"{_key(adapter_id)}-*")
        for folder in sorted(folders, key=_used_at_ns, reverse=True):
            found = _read_version(folder, adapter_id)
            if found is not None:
                return found
            self._remove(folder)
        return None

    @contextlib.contextmanager
    def build(self, num_bytes: int) -> Iterator[Path]:
        """Make room, and give an empty folder that goes at the end unless it was kept.

        Args:
            num_bytes: what will be written.

        Raises:
            CacheFullError: there is no room and nothing that may go.
            OSError: the disk refuses.
        """
        path = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=self._folder))
        try:
            with _locked(path):
                with self._lock:
                    self._make_room(num_bytes + _STATE_BYTES)
                    self._building[path] = num_bytes + _STATE_BYTES
                yield path
        finally:
            with self._lock:
                self._building.pop(path, None)
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, built: Path, version: CachedVersion) -> AdapterFiles:
        """Move what was built into place.

        Args:
            built: the folder that ``build`` gave.
            version: what it is.

        Returns:
            The files in their place. If another process was faster, they are its.
        """
        state = version.state
        told = {
            "adapter_id": version.files.adapter_id,
            "version": version.files.version,
            "num_bytes": version.files.num_bytes,
            "revision": state.revision,
            "files": [dataclasses.asdict(file) for file in state.files],
        }
        (built / _STATE_NAME).write_text(json.dumps(told))
        folder = self._folder / f"{_key(version.files.adapter_id)}-{version.files.version}"
        with self._lock:
            try:
                built.rename(folder)
                # From now on it counts as a version.
                del self._building[built]
            except OSError:
                if not folder.is_dir():
                    raise
                # The same contents, perhaps fetched from another state.
                (built / _STATE_NAME).replace(folder / _STATE_NAME)
        return dataclasses.replace(version.files, folder=folder)

    def touch(self, files: AdapterFiles) -> None:
        """Take note that a version is used; one that has gone is no error."""
        with contextlib.suppress(OSError):
            os.utime(files.folder / _STATE_NAME)

    def drop(self, files: AdapterFiles) -> None:
        """Remove a version; one that has gone is no error."""
        self._remove(files.folder)

    def num_used_bytes(self) -> int:
        """Return the bytes of all versions and of what is being built."""
        with self._lock:
            return self._used_bytes(self._entries())

    def _make_room(self, num_bytes: int) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry.used_at_ns)
        num_excess_bytes = self._used_bytes(entries) + num_bytes - self._budget_bytes
        if num_excess_bytes > sum(entry.num_bytes for entry in entries):
            raise CacheFullError
        for entry in entries:
            if num_excess_bytes <= 0:
                return
            self._remove(entry.folder)
            num_excess_bytes -= entry.num_bytes

    def _used_bytes(self, entries: list[_Entry]) -> int:
        builds = self._folder.glob(f"{_TEMPORARY_PREFIX}*")
        return (
            sum(entry.num_bytes for entry in entries)
            + sum(self._building.values())
            + sum(_num_bytes(path) for path in builds if path not in self._building)
        )

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in self._folder.iterdir():
            if path.name.startswith("."):
                continue
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                entries.append(_Entry(path, _num_bytes(path), _used_at_ns(path)))
        return entries

    def _remove(self, folder: Path) -> None:
        """Remove a version so that nobody sees a part of it."""
        away = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=self._folder))
        with contextlib.suppress(OSError):
            folder.rename(away / folder.name)
        shutil.rmtree(away, ignore_errors=True)


def _used_at_ns(folder: Path) -> int:
    """Return when a version was used last; 0 for one that lost its state, which goes first."""
    try:
        return (folder / _STATE_NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _key(adapter_id: str) -> str:
    """Name an adapter in one segment of a path; different ids never share one."""
    return hashlib.sha256(adapter_id.encode()).hexdigest()[:32]


def _read_version(folder: Path, adapter_id: str) -> CachedVersion | None:
    """Read what a folder says of itself; None if that makes no sense."""
    try:
        told = json.loads((folder / _STATE_NAME).read_bytes())
        state = RemoteState(tuple(RemoteFile(**file) for file in told["files"]), told["revision"])
        files = AdapterFiles(
            adapter_id=told["adapter_id"],
            folder=folder,
            version=told["version"],
            num_bytes=told["num_bytes"],
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return CachedVersion(files, state) if files.adapter_id == adapter_id else None


def _num_bytes(folder: Path) -> int:
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            num_bytes += path.lstat().st_size
    return num_bytes


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
