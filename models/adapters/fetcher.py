"""Fetcher: brings versions of adapters from an origin into the cache, within limits."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from models.adapters.adapter_folder import AdapterFolder, UnusableFilesError
from models.adapters.download_cache import CachedVersion, CacheFullError, DownloadCache
from models.adapters.origin import (
    AdapterOrigin,
    RemoteChangedError,
    RemoteState,
    RemoteUnusableError,
    describe_failure,
)
from models.adapters.source import MAX_TEXT_FILE_BYTES, TEXT_NAMES
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    ModelServiceError,
)


class Fetcher:
    """Fetches what an origin tells of, whole and in one state, or not at all.

    Owner: any thread; every method waits for the network or the disk.
    """

    def __init__(
        self,
        origin: AdapterOrigin,
        cache: DownloadCache,
        *,
        max_num_bytes: int,
        retry_after_s: float,
        check_open: Callable[[], None],
    ) -> None:
        """Wire a fetcher.

        Args:
            origin: where files come from.
            cache: where they go.
            max_num_bytes: most bytes of an adapter's config and weights; more are never fetched.
            retry_after_s: seconds after which what failed may be tried again.
            check_open: called every few megabytes; what it raises ends the work.
        """
        self._origin = origin
        self._cache = cache
        self._max_num_bytes = max_num_bytes
        self._retry_after_s = retry_after_s
        self._check_open = check_open
        self._folder = AdapterFolder(cache.folder, retry_after_s)

    def fetch(self, adapter_id: str, state: RemoteState) -> CachedVersion:
        """Bring a state into the cache; nothing is left of what is not whole.

        Raises:
            RemoteUnusableError: this state is of no use.
            AdapterLoadFailedError: it cannot be had now.
            DrainingError: ``check_open`` ended it.
        """
        self._check_sizes(adapter_id, state)
        try:
            with self._cache.build(state.num_bytes) as folder:
                self._origin.fetch(adapter_id, state, folder, self._check_open)
                _leave_only(folder, state)
                hashed = self._folder.hash(folder.name, self._check_open)
                files = dataclasses.replace(hashed.files, adapter_id=adapter_id)
                files = self._cache.keep(folder, CachedVersion(files, state))
            return CachedVersion(files, state)
        except RemoteChangedError as error:
            raise self.failure(adapter_id, "its files are being rewritten") from error
        except (UnusableFilesError, AdapterNotFoundError) as error:
            incomplete = self.failure(adapter_id, "its files are incomplete or being written")
            raise RemoteUnusableError(incomplete, state.stamp) from error
        except CacheFullError as error:
            reason = "the disk cache of adapters is full of downloads"
            raise self.failure(adapter_id, reason) from error
        except ModelServiceError:
            raise
        except Exception as error:
            raise self.failure(adapter_id, describe_failure(error)) from error

    def take_cached(self, adapter_id: str) -> CachedVersion | None:
        """Return the version of an adapter that the cache has, if it is whole."""
        try:
            cached = self._cache.find(adapter_id)
            if cached is None:
                return None
            hashed = self._folder.hash(cached.files.folder.name, self._check_open)
        except (UnusableFilesError, AdapterNotFoundError, OSError):
            return None
        if hashed.files.version != cached.files.version:
            self._cache.drop(cached.files)
            return None
        self._cache.touch(cached.files)
        return cached

    def failure(self, adapter_id: str, reason: str) -> AdapterLoadFailedError:
        """Return an error that says when to try again."""
        return AdapterLoadFailedError(adapter_id, reason, self._retry_after_s)

    def _check_sizes(self, adapter_id: str, state: RemoteState) -> None:
        """Check what the origin tells before anything is fetched.

        Raises:
            RemoteUnusableError: it is too much.
        """
        sizes_bytes = state.sizes_bytes
        num_bytes = sum(size for name, size in sizes_bytes.items() if name not in TEXT_NAMES)
        reason = ""
        if num_bytes > self._max_num_bytes:
            reason = f"its files have {num_bytes} bytes; the limit here is {self._max_num_bytes}"
        elif state.num_bytes > self._cache.max_version_bytes:
            reason = (
                f"its files have {state.num_bytes} bytes; the disk cache of adapters has room for "
                f"{self._cache.max_version_bytes}"
            )
        for name in TEXT_NAMES:
            if sizes_bytes.get(name, 0) > MAX_TEXT_FILE_BYTES:
                reason = (
                    f"its {name} has {sizes_bytes[name]} bytes; the limit is {MAX_TEXT_FILE_BYTES}"
                )
        if reason:
            raise RemoteUnusableError(AdapterIncompatibleError(adapter_id, reason), state.stamp)


def _leave_only(folder: Path, state: RemoteState) -> None:
    """Remove what a library has written besides the files that were asked for."""
    for path in folder.iterdir():
        if path.name in state.sizes_bytes:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
