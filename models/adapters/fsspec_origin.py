"""FsspecOrigin: adapters in a folder that fsspec reads: s3://, gs://, memory:// and many more."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from models.adapters.ids import is_adapter_id
from models.adapters.origin import (
    FILE_NAMES,
    OriginError,
    RemoteChangedError,
    RemoteFile,
    RemoteState,
    RemoteUnusableError,
)
from models.adapters.source import CONFIG_NAME, PICKLE_NAME, WEIGHTS_NAME
from models.errors import AdapterIncompatibleError, AdapterNotFoundError, ConfigError

_CHUNK_BYTES = 4 << 20
_MAX_NUM_LISTED_FOLDERS = 10_000
_MISSING_STATUSES = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_PICKLE_REASON = "its weights are pickled; only safetensors files are read"


def check_url(url: str) -> None:
    """Check that there is a library for a URL; connects to nothing.

    Raises:
        ConfigError: there is none.
    """
    try:
        import fsspec  # type: ignore[import-untyped]

        # "simplecache::s3://bucket" needs both.
        for part in url.split("::"):
            fsspec.get_filesystem_class(part.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError("adapters", f"this URL cannot be read here: {error}") from error


def open_origin(url: str) -> FsspecOrigin:
    """Open a URL of adapters.

    Raises:
        ConfigError: there is no library for it, or it makes no sense to that.
    """
    check_url(url)
    import fsspec.core  # type: ignore[import-untyped]

    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except Exception as error:  # every library has its own
        # Without its words: a URL may hold a key.
        raise ConfigError(
            "adapters", f"this URL cannot be opened ({type(error).__name__})"
        ) from error
    return FsspecOrigin(filesystem, root)


class FsspecOrigin:
    """``<root>/<adapter id>/adapter_config.json`` and its weights in a filesystem of fsspec.

    A file was rewritten if anything that the filesystem tells of it has changed: its etag, times,
    generation, size. Stores that tell a size only hide a rewrite that keeps it.

    Owner: any thread, as far as the filesystem allows; those of fsspec do.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        """Remember where to look.

        Args:
            filesystem: an ``fsspec.AbstractFileSystem``.
            root: path in it.
        """
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def look(self, adapter_id: str) -> RemoteState:
        """Ask for every file by itself; see ``AdapterOrigin``."""
        folder = self._folder(adapter_id)
        self._filesystem.invalidate_cache(folder)
        files = tuple(
            file for name in FILE_NAMES if (file := self._look_at(folder, name)) is not None
        )
        names = {file.name for file in files}
        if WEIGHTS_NAME not in names and self._look_at(folder, PICKLE_NAME) is not None:
            raise RemoteUnusableError(
                AdapterIncompatibleError(adapter_id, _PICKLE_REASON), stamp=PICKLE_NAME
            )
        if not {CONFIG_NAME, WEIGHTS_NAME} <= names:
            raise RemoteUnusableError(
                AdapterNotFoundError(adapter_id),
                stamp=" ".join(f"{file.name} {file.stamp}" for file in files),
            )
        return RemoteState(files)

    def fetch(
        self, adapter_id: str, state: RemoteState, folder: Path, check_open: Callable[[], None]
    ) -> None:
        """Read file by file; see ``AdapterOrigin``."""
        for file in state.files:
            path = f"{self._folder(adapter_id)}/{file.name}"
            num_left_bytes = file.num_bytes
            try:
                with (
                    self._filesystem.open(path, "rb") as source,
                    (folder / file.name).open("xb") as target,
                ):
                    # One more than there should be shows that there are more.
                    while chunk := source.read(min(_CHUNK_BYTES, num_left_bytes + 1)):
                        check_open()
                        num_left_bytes -= len(chunk)
                        if num_left_bytes < 0:
                            raise RemoteChangedError(file.name)
                        target.write(chunk)
            except FileNotFoundError as error:
                raise RemoteChangedError(file.name) from error
            if num_left_bytes:
                raise RemoteChangedError(file.name)
        if self.look(adapter_id) != state:
            raise RemoteChangedError(adapter_id)

    def list_ids(self, check_open: Callable[[], None]) -> Iterator[str]:
        """Look into the folders of the root, and one level below; 10,000 of them at most."""
        self._filesystem.invalidate_cache(self._root)
        folders = self._folders()
        for name, entries in itertools.islice(folders, _MAX_NUM_LISTED_FOLDERS):
            check_open()
            if _is_adapter(entries):
                yield name

    def _folders(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the name and the entries of every folder whose name an id can have."""
        for name in _folder_names(self._entries("")):
            entries = self._entries(f"/{name}")
            yield name, entries
            for below in _folder_names(entries):
                yield f"{name}/{below}", self._entries(f"/{name}/{below}")

    def _folder(self, adapter_id: str) -> str:
        # Two segments at most, neither "." nor "..": it cannot leave the root.
        assert is_adapter_id(adapter_id)
        return f"{self._root}/{adapter_id}"

    def _look_at(self, folder: str, name: str) -> RemoteFile | None:
        try:
            info = self._filesystem.info(f"{folder}/{name}")
        except (FileNotFoundError, NotADirectoryError) as error:
            _check_is_missing(error)
            return None
        if info.get("type") != "file":
            return None
        num_bytes = info.get("size")
        if type(num_bytes) is not int:
            raise OriginError("its store does not tell how large files are")
        return RemoteFile(name, num_bytes, _stamp(info))

    def _entries(self, folder: str) -> Mapping[str, str]:
        """Return name -> type of what a folder of the root has; nothing if it has gone."""
        try:
            listed = self._filesystem.ls(f"{self._root}{folder}", detail=True)
        except (FileNotFoundError, NotADirectoryError) as error:
            _check_is_missing(error)
            return {}
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["type"] for entry in listed}


def _check_is_missing(error: OSError) -> None:
    """Check that nothing is there, where a filesystem says so.

    That of http:// also says it when nobody answers, or with an error of the server.

    Raises:
        Exception: what really happened.
    """
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return
    is_network = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    if is_network and getattr(cause, "status", None) not in _MISSING_STATUSES:
        raise cause


def _folder_names(entries: Mapping[str, str]) -> Iterator[str]:
    for name, kind in sorted(entries.items()):
        if kind == "directory" and is_adapter_id(name):
            yield name


def _is_adapter(entries: Mapping[str, str]) -> bool:
    return entries.get(CONFIG_NAME) == entries.get(WEIGHTS_NAME) == "file"


def _stamp(info: Mapping[str, Any]) -> str:
    told = json.dumps(info, sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
