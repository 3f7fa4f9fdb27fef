"""AdapterFolder: the files of adapters as they lie on the disk now. Remembers nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from models.adapters.ids import is_adapter_id
from models.adapters.source import (
    CONFIG_NAME,
    PICKLE_NAME,
    TEXT_NAMES,
    WEIGHTS_NAME,
    AdapterFiles,
    VersionDigest,
)
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    ModelServiceError,
)

_MAX_HEADER_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20

# Of each file: inode, size, times of content and of inode change in ns. The last one tells of a
# rewrite that sets the time of content back. Of a file of TEXT_NAMES that is not there: nothing.
Fingerprint = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocatedFiles:
    """Where the files of an adapter are, and the state they are in.

    Attributes:
        folder: the adapter's folder; a real path, as the others.
        config: ``adapter_config.json``.
        weights: ``adapter_model.safetensors``.
        texts: those of TEXT_NAMES that there are.
        fingerprint: changes whenever one of these does, but for a write within the same tick
            (a few milliseconds) of the clock that times files.
    """

    folder: Path
    config: Path
    weights: Path
    texts: Mapping[str, Path]
    fingerprint: Fingerprint

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Sizes of all files: of the config, of the weights, of texts in their order."""
        return tuple(state[1] for state in self.fingerprint if state)


@dataclasses.dataclass(frozen=True, slots=True)
class HashedFiles:
    """A version, and the state of the files that it was computed from."""

    files: AdapterFiles
    fingerprint: Fingerprint


class UnusableFilesError(Exception):
    """The folder is there, but its files cannot be used now. Never leaves ``models.adapters``.

    Attributes:
        error: what to tell whoever has no former version.
        fingerprint: the state that the files are in; empty if it cannot be told.
    """

    def __init__(self, error: ModelServiceError, fingerprint: Fingerprint = ()) -> None:
        super().__init__(error, fingerprint)
        self.error = error
        self.fingerprint = fingerprint


class AdapterFolder:
    """A root folder with one folder per adapter: ``<root>/<adapter id>``.

    The real paths of an adapter's folder and of all files have to lie in the real path of the
    root. Who can write to the root is trusted not to swap links while they are followed.

    Owner: any thread; every method waits for the disk.
    """

    def __init__(self, root: Path, retry_after_s: float) -> None:
        """Remember the root.

        Args:
            root: it may appear later.
            retry_after_s: seconds after which files that cannot be read may have changed.
        """
        self._root = root
        self._retry_after_s = retry_after_s

    def locate(self, adapter_id: str) -> LocatedFiles:
        """Find an adapter's files and look at their state.

        Args:
            adapter_id: keeps the grammar.

        Raises:
            AdapterNotFoundError: there is no such folder, or it leads out of the root.
            UnusableFilesError: a file is missing or cannot be looked at.
        """
        try:
            root = Path(os.path.realpath(self._root))
            folder = Path(os.path.realpath(root / adapter_id, strict=True))
            if root not in folder.parents or not folder.is_dir():
                raise AdapterNotFoundError(adapter_id)
            config, weights = (
                Path(os.path.realpath(folder / name, strict=True))
                for name in (CONFIG_NAME, WEIGHTS_NAME)
            )
            texts = dict(_existing_texts(folder))
            paths = (config, weights, *texts.values())
            states = {path: path.stat() for path in paths}
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(adapter_id) from None
        except OSError as error:
            raise self._unreadable(adapter_id, error) from error
        if not all(root in path.parents for path in paths):
            raise AdapterNotFoundError(adapter_id)
        # A pipe would never end, a device might.
        if not all(stat.S_ISREG(state.st_mode) for state in states.values()):
            raise AdapterNotFoundError(adapter_id)
        fingerprint = (
            _fingerprint_of(states[config]),
            _fingerprint_of(states[weights]),
            *(_fingerprint_of(states[texts[name]]) if name in texts else () for name in TEXT_NAMES),
        )
        return LocatedFiles(folder, config, weights, texts, fingerprint)

    def hash(self, adapter_id: str, check_open: Callable[[], None]) -> HashedFiles:
        """Compute the version of files that are whole and do not change meanwhile.

        Args:
            adapter_id: keeps the grammar.
            check_open: called about every megabyte; what it raises ends the work.

        Raises:
            AdapterNotFoundError: as ``locate``.
            UnusableFilesError: as ``locate``; or they are incomplete, or changed.
        """
        located = self.locate(adapter_id)
        unusable = UnusableFilesError(
            AdapterLoadFailedError(
                adapter_id, "its files are incomplete or being written", self._retry_after_s
            ),
            located.fingerprint,
        )
        digest = VersionDigest()
        sizes_bytes = located.sizes_bytes
        try:
            with located.config.open("rb") as config, located.weights.open("rb") as weights:
                if _is_cut_short(config, weights):
                    raise unusable
                for file, num_bytes in zip((config, weights), sizes_bytes[:2], strict=True):
                    digest.add_file(num_bytes, _chunks(file, check_open))
            for (name, path), num_bytes in zip(located.texts.items(), sizes_bytes[2:], strict=True):
                with path.open("rb") as text:
                    if name.endswith(".json") and not _is_json_whole(text):
                        raise unusable
                    digest.add_text(name, num_bytes, _chunks(text, check_open))
        except OSError as error:
            raise self._unreadable(adapter_id, error) from error
        if self.locate(adapter_id) != located:
            raise unusable
        files_of_version = AdapterFiles(
            adapter_id=adapter_id,
            folder=located.folder,
            version=digest.version,
            num_bytes=sum(sizes_bytes),
        )
        return HashedFiles(files_of_version, located.fingerprint)

    def is_adapter(self, adapter_id: str) -> bool:
        """Return whether ``locate`` finds the files; ``adapter_id`` keeps the grammar."""
        try:
            self.locate(adapter_id)
        except (AdapterNotFoundError, UnusableFilesError):
            return False
        return True

    def candidates(self) -> Iterator[str]:
        """Yield the folders whose names an id can have: of the root, and one level below."""
        for name in _folder_names(self._root):
            yield name
            for below in _folder_names(self._root / name):
                yield f"{name}/{below}"

    def _missing(self, adapter_id: str) -> Exception:
        folder = self._root / adapter_id
        if not folder.is_dir():
            return AdapterNotFoundError(adapter_id)
        if (folder / PICKLE_NAME).is_file() and not (folder / WEIGHTS_NAME).exists():
            return UnusableFilesError(
                AdapterIncompatibleError(
                    adapter_id, "its weights are pickled; only safetensors files are read"
                )
            )
        return UnusableFilesError(AdapterNotFoundError(adapter_id))

    def _unreadable(self, adapter_id: str, error: OSError) -> UnusableFilesError:
        # Without the path, which tells clients about this machine only.
        reason = error.strerror or type(error).__name__
        return UnusableFilesError(AdapterLoadFailedError(adapter_id, reason, self._retry_after_s))


def _existing_texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and real paths; a link to nothing is no file."""
    for name in TEXT_NAMES:
        if (folder / name).exists():
            yield name, Path(os.path.realpath(folder / name, strict=True))


def _fingerprint_of(state: os.stat_result) -> tuple[int, ...]:
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _folder_names(parent: Path) -> Iterator[str]:
    try:
        with os.scandir(parent) as entries:
            for entry in entries:
                if is_adapter_id(entry.name) and entry.is_dir():
                    yield entry.name
    except OSError:
        return


def _chunks(file: BinaryIO, check_open: Callable[[], None]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        check_open()
        yield chunk


def _is_cut_short(config: BinaryIO, weights: BinaryIO) -> bool:
    """Whether a file has fewer bytes than it should; other damage is found by its reader.

    Leaves both at their beginning.
    """
    num_header_bytes = int.from_bytes(weights.read(8), "little")
    num_missing_bytes = 0
    # A larger one is no header.
    if num_header_bytes <= _MAX_HEADER_BYTES:
        num_tensor_bytes = _num_tensor_bytes(weights.read(num_header_bytes))
        num_missing_bytes = 8 + num_header_bytes + num_tensor_bytes - weights.seek(0, os.SEEK_END)
    weights.seek(0)
    return num_header_bytes == 0 or num_missing_bytes > 0 or not _is_json_whole(config)


def _is_json_whole(file: BinaryIO) -> bool:
    """Whether a file ends as a JSON object does; one that is whole may still be none.

    Leaves it at its beginning.
    """
    file.seek(-min(64, file.seek(0, os.SEEK_END)), os.SEEK_END)
    is_whole = file.read().rstrip().endswith(b"}")
    file.seek(0)
    return is_whole


def _num_tensor_bytes(header: bytes) -> int:
    """Return how many bytes of tensors a header of safetensors tells of; 0 if it is none."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
        return 0
