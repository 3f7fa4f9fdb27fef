"""This process's relatives: adopting orphans, ending with a parent, ending what is left below.

Knows nothing of Ray or Serve. The ties to the kernel are Linux's; elsewhere they do nothing,
and processes are still found by session and parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAKE_NAMES = ("make", "gmake")
_MAX_KILL_ROUNDS = 5
_KILL_WAIT_S = 1.0


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent_pid: int) -> None:
    """Get SIGINT when the parent dies, however it dies.

    Args:
        parent_pid: the parent; if it died before the call, the signal comes at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGINT)


class MakeWatch:
    """Tells when a parent that is ``make`` got a signal, which it keeps to itself.

    On SIGINT or SIGHUP ``make`` stops catching that signal and waits for its children before it
    ends, but passes nothing on. A terminal signals the whole group; ``kill`` does not, nor does a
    connection that breaks off while ``make`` leads the session. Other parents are not watched: a
    shell changes its handlers all the time.

    Owner: one thread.
    """

    def __init__(self, parent_pid: int, numbers: Iterable[signal.Signals]) -> None:
        """Remember which signals the parent catches.

        Args:
            parent_pid: the parent.
            numbers: signals of interest.
        """
        self._path = Path("/proc") / str(parent_pid) / "status"
        wanted = sum(1 << (number - 1) for number in numbers)
        is_make = self._read("Name") in _MAKE_NAMES
        self._caught = self._read_mask("SigCgt") & wanted if is_make else 0

    @property
    def is_useful(self) -> bool:
        """Whether the parent is ``make`` and catches any of them."""
        return self._caught != 0

    def is_ending(self) -> bool:
        """Whether the parent is in the handler of one of them, which it catches no more."""
        given_up = self._caught & ~self._read_mask("SigCgt")
        return given_up & self._read_mask("SigBlk") != 0

    def _read_mask(self, name: str) -> int:
        return int(self._read(name) or "0", 16)

    def _read(self, name: str) -> str:
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return ""
        values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
        return values[0] if values else ""


def find_remaining(session_id: int) -> list[psutil.Process]:
    """Every process below this one, and every one of a session that a child of this one leads.

    Args:
        session_id: the child's process id.
    """
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session_id:
                found.setdefault(process.pid, process)
    return list(found.values())


def end_remaining(session_id: int, *, patience_s: float) -> int:
    """Wait for the rest of a process tree, then kill what has not ended.

    Args:
        session_id: the child's process id.
        patience_s: seconds to wait before killing; 0 kills at once.

    Returns:
        How many processes had to be killed.
    """
    _, alive = psutil.wait_procs(find_remaining(session_id), timeout=patience_s)
    num_killed = 0
    # A dying process may have started another one meanwhile, so look again after each round.
    for _ in range(_MAX_KILL_ROUNDS):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                num_killed += 1
        psutil.wait_procs(alive, timeout=_KILL_WAIT_S)
        alive = find_remaining(session_id)
        if not alive:
            break
    return num_killed


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
