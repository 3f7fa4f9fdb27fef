"""What the ``medley`` command says to the person who started it.

Progress and failures go to standard error, the one line that tells it is ready to standard output.
A terminal that is gone never stops the service: lines are then lost.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Console:
    """Lines with the seconds since the start.

    Owner: any one thread.
    """

    def __init__(
        self,
        progress: TextIO,
        result: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the count of seconds.

        Args:
            progress: where progress and failures go.
            result: where results go.
            clock: seconds, never going back.
        """
        self._progress = progress
        self._result = result
        self._clock = clock
        self._start_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start_s

    def say(self, text: str) -> None:
        """Print one line of progress."""
        _write(self._progress, f"[{self.elapsed_s:5.1f} s] {text}")

    def warn(self, text: str) -> None:
        """Print what must not be missed."""
        _write(self._progress, text)

    def fail(self, text: str) -> None:
        """Print why it ends."""
        _write(self._progress, f"medley: {text}")

    def announce(self, text: str) -> None:
        """Print a result."""
        _write(self._result, text)


def open_console() -> Console:
    """Return the console of this process."""
    return Console(sys.stderr, sys.stdout)


def _write(stream: TextIO, line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(line + "\n")
        stream.flush()
