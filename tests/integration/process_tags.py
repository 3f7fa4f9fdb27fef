"""Marks all processes that a test starts, and finds them again, also those that lost their parent.

The mark is a variable: a process hands its environment down, whatever session or parent it gets.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

_VARIABLE = "MEDLEY_TEST_TAG"
_POLL_S = 0.2


class ProcessTag:
    """The mark of one tree of processes."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """What the first process of the tree must have in its environment."""
        return {_VARIABLE: self._value}

    def processes(self) -> list[psutil.Process]:
        """Every marked process that runs."""
        return list(self._find())

    def wait_until_gone(self, limit_s: float) -> list[psutil.Process]:
        """Return what still runs after this time."""
        end_s = time.monotonic() + limit_s
        while (remaining := self.processes()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        return remaining

    def _find(self) -> Iterator[psutil.Process]:
        mark = f"{_VARIABLE}={self._value}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    yield psutil.Process(pid)
