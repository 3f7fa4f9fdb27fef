"""Where adapters come from, and how exactly one version of an adapter is read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
# Files that an adapter may have and need not: how prompts and answers are spelled. In the order in
# which they are hashed.
TEXT_NAMES = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
# Pickled weights, which are never read.
PICKLE_NAME = "adapter_model.bin"
# Of one file of TEXT_NAMES; the tokenizer.json of 256,000 tokens has 34 MB.
MAX_TEXT_FILE_BYTES = 64 << 20

_VERSION_DIGITS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """One version of an adapter on a local disk.

    Attributes:
        adapter_id: whose.
        folder: its real path; holds ``adapter_config.json``, ``adapter_model.safetensors`` and
            perhaps files of TEXT_NAMES. They may change at any time: ``read_contents`` reads this
            version or refuses.
        version: short hash of the contents of all these files.
        num_bytes: size of all these files.
    """

    adapter_id: str
    folder: Path
    version: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContents:
    """What the files of one version hold.

    Attributes:
        config: ``adapter_config.json``.
        weights: ``adapter_model.safetensors``.
        texts: those of TEXT_NAMES that there are.
    """

    config: bytes
    weights: bytes
    texts: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


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
    process at its next use. So all are read whole, and what was read is hashed: weights that are
    made of the result are of ``files.version``, whatever happens on the disk meanwhile.

    Raises:
        FilesChangedError: the files are not of this version any more.
    """
    try:
        config = _read_at_most(files.folder / CONFIG_NAME, files.num_bytes)
        weights = _read_at_most(files.folder / WEIGHTS_NAME, files.num_bytes)
    except FileNotFoundError as error:
        raise FilesChangedError(files.adapter_id) from error
    texts = {}
    for name in TEXT_NAMES:
        with contextlib.suppress(FileNotFoundError):
            texts[name] = _read_at_most(files.folder / name, files.num_bytes)
    digest = VersionDigest()
    for content in (config, weights):
        digest.add_file(len(content), [content])
    for name, content in texts.items():
        digest.add_text(name, len(content), [content])
    if digest.version != files.version:
        raise FilesChangedError(files.adapter_id)
    return AdapterContents(config=config, weights=weights, texts=texts)


class VersionDigest:
    """Computes a version: add the config, then the weights, then texts in their order."""

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

    def add_text(self, name: str, num_bytes: int, chunks: Iterable[bytes]) -> None:
        """Add one of the files that need not be there."""
        self.add_file(len(name), [name.encode()])
        self.add_file(num_bytes, chunks)


def _read_at_most(path: Path, num_bytes: int) -> bytes:
    """Read a file that should have no more bytes; one more shows that it has."""
    with path.open("rb") as file:
        return file.read(num_bytes + 1)
