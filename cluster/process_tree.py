"""The processes below this one: adopting them, dying with a parent, ending what is left.

Knows nothing of Ray or Serve. The two ties to the kernel are Linux's; elsewhere they do nothing,
and processes are still found by session and parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
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
