"""An origin of adapters that is not on this machine: what it tells, and how it fails."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from models.adapters.source import CONFIG_NAME, TEXT_NAMES, WEIGHTS_NAME
from models.errors import ModelServiceError

# All that is ever fetched of an adapter.
FILE_NAMES = (CONFIG_NAME, WEIGHTS_NAME, *TEXT_NAMES)


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as its origin tells of it.

    Attributes:
        name: one of FILE_NAMES.
        num_bytes: its size.
        stamp: differs once the file was rewritten, as far as the origin can tell.
    """

    name: str
    num_bytes: int
    stamp: str


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteState:
    """The files of one adapter as their origin tells of them now; it has config and weights.

    Attributes:
        files: in the order of FILE_NAMES.
        revision: names this state to the origin, "" where it knows no revisions.
    """

    files: tuple[RemoteFile, ...]
    revision: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def stamp(self) -> str:
        """Differs once a file was rewritten."""
        return " ".join(file.stamp for file in self.files)

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """File name -> size."""
        return {file.name: file.num_bytes for file in self.files}


class RemoteUnusableError(Exception):
    """The origin answers, but not with an adapter. Never leaves ``models.adapters``.

    Attributes:
        error: what to tell whoever has no former version.
        stamp: of the state that it is in; "" says that nothing is there at all.
    """

    def __init__(self, error: ModelServiceError, stamp: str) -> None:
        super().__init__(error, stamp)
        self.error = error
        self.stamp = stamp


class OriginError(Exception):
    """The origin does not say what it must; its text is for the caller.

    Never leaves ``models.adapters``.
    """


class RemoteChangedError(Exception):
    """Files were rewritten while they were fetched. Never leaves ``models.adapters``."""


class AdapterOrigin(Protocol):
    """Where adapters are fetched from. Every method waits for the network; any thread.

    Whatever else they raise says that the origin cannot be reached.
    """

    def look(self, adapter_id: str) -> RemoteState:
        """Ask for the state of an adapter's files; fetches none.

        Args:
            adapter_id: keeps the grammar.

        Raises:
            RemoteUnusableError: there is none, or not in a form that is read.
        """
        ...

    def fetch(
        self, adapter_id: str, state: RemoteState, folder: Path, check_open: Callable[[], None]
    ) -> None:
        """Write the files of a state into an empty folder, never more bytes than it tells of.

        Args:
            adapter_id: whose.
            state: as ``look`` told.
            folder: on the local disk.
            check_open: called every few megabytes; what it raises ends the work.

        Raises:
            RemoteChangedError: the files are not in this state any more.
        """
        ...

    def list_ids(self, check_open: Callable[[], None]) -> Iterator[str]:
        """Yield the ids of adapters as they are found, each in the grammar of ids.

        Args:
            check_open: called between two questions; what it raises ends the work.
        """
        ...


def describe_failure(error: BaseException) -> str:
    """Return why an origin cannot be reached, without what its exception says.

    Those words tell addresses, and sometimes keys, even where they should be the operating
    system's own; what its number means does not.
    """
    if isinstance(error, OriginError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"its store cannot be reached ({type(error).__name__})"
