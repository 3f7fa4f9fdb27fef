"""Where adapters come from, and how exactly one version of an adapter is read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_VERSION_DIGITS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """One version of an adapter on a local disk.

    Attributes:
        adapter_id: whose.
        folder: its real path; holds ``adapter_config.json`` and ``adapter_model.safetensors``.
            They may change at any time: ``read_contents`` reads this version or refuses.
        version: short hash of the contents of both files.
        num_bytes: size of both files.
    """

    adapter_id: str
    folder: Path
    version: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContents:
    """What the two files of one version hold."""

    config: bytes
    weights: bytes


class FilesChangedError(Exception):
    """The files are not the version that was asked for. Never leaves ``models.adapters``."""


class AdapterSource(Protocol):
    """Where adapters are found. Every method may be called from any thread."""

    def find(self, adapter_id: str) -> AdapterFiles:
        """Return the current version; waits for the disk, so never on an event loop.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar.
            AdapterNotFoundError: there is no such adapter.
            AdapterIncompatibleError: there is one in a form that is never read.
            AdapterLoadFailedError: its files cannot be read now.
        """
        ...

    def recall(self, adapter_id: str) -> AdapterFiles | None:
        """Return what ``find`` would answer without a look at the disk; None if it would look."""
        ...

    def forget(self, adapter_id: str) -> None:
        """Make the next ``find`` begin anew, since the version it gave can no longer be read."""
        ...

    def list_ids(self) -> tuple[str, ...]:
        """Return the adapters there are, sorted, up to a limit; never on an event loop."""
        ...


def read_contents(files: AdapterFiles) -> AdapterContents:
    """Read exactly one version into memory.

    The files may be rewritten while they are read, and a mapped file that is cut short ends the
    process at its next use. So both are read whole, and what was read is hashed: weights that are
    made of the result are of ``files.version``, whatever happens on the disk meanwhile.

    Raises:
        FilesChangedError: the files are not of this version any more.
    """
    try:
        config = _read_at_most(files.folder / CONFIG_NAME, files.num_bytes)
        weights = _read_at_most(files.folder / WEIGHTS_NAME, files.num_bytes)
    except FileNotFoundError as error:
        raise FilesChangedError(files.adapter_id) from error
    digest = VersionDigest()
    for content in (config, weights):
        digest.add_file(len(content), [content])
    if digest.version != files.version:
        raise FilesChangedError(files.adapter_id)
    return AdapterContents(config=config, weights=weights)


class VersionDigest:
    """Computes a version: add the config, then the weights."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    @property
    def version(self) -> str:
        """Of all that was added."""
        return self._digest.hexdigest()[:_VERSION_DIGITS]

    def add_file(self, num_bytes: int, chunks: Iterable[bytes]) -> None:
        """Add one file, piece by piece."""
        # The size in front: no byte can go from one file to the other unseen.
        self._digest.update(num_bytes.to_bytes(8, "little"))
        for chunk in chunks:
            self._digest.update(chunk)


def _read_at_most(path: Path, num_bytes: int) -> bytes:
    """Read a file that should have no more bytes; one more shows that it has."""
    with path.open("rb") as file:
        return file.read(num_bytes + 1)
