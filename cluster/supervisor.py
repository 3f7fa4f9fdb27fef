"""Keeps one child process and its whole tree, and ends all of it on the first signal.

The child runs in a session of its own, so that a terminal's Ctrl-C or hang-up reaches only this
process, which then asks the child to end. Knows nothing of Ray or Serve.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from cluster.process_tree import MakeWatch, adopt_orphans, end_remaining

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED_STATUS = 130

# ``make`` passes a SIGTERM on that the whole process group got too: one request, two signals.
_SAME_REQUEST_S = 0.5
# What an orderly child leaves behind is gone within this time.
_PATIENCE_S = 1.0
_PARENT_POLL_S = 0.5


class StopSignals:
    """Counts requests to stop, from the moment it is made.

    A signal that the parent had ignored (a shell does so to what it starts with ``&``) counts too.

    So does one that only the parent got and keeps to itself (``make`` does).

    Owner: the main thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Install the handlers.

        Args:
            clock: seconds, never going back.
        """
        self._clock = clock
        self._last_s = -_SAME_REQUEST_S
        self._parent = MakeWatch(os.getppid(), STOP_SIGNALS)
        self.num_requests = 0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # A handler must exist for the end of a child to wake ``wait``.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal arrives, or less.

        Args:
            timeout_s: seconds at most; None names no limit.
        """
        is_parent_watched = self._parent.is_useful and not self.num_requests
        if is_parent_watched:
            timeout_s = _PARENT_POLL_S if timeout_s is None else min(timeout_s, _PARENT_POLL_S)
        readable, _, _ = select.select([self._woken], [], [], timeout_s)
        if readable:
            self._woken.recv(4096)
        elif is_parent_watched and self._parent.is_ending():
            self._count()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._count()

    def _count(self) -> None:
        now_s = self._clock()
        if now_s - self._last_s >= _SAME_REQUEST_S:
            self.num_requests += 1
            self._last_s = now_s


def supervise(
    command: Sequence[str],
    signals: StopSignals,
    *,
    stdin: bytes,
    environment: Mapping[str, str],
    stop_limit_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run a command until it ends or a signal asks for its end; leave no process behind.

    Args:
        command: program and arguments. SIGINT asks it to end.
        signals: the requests to stop, counted since before this call.
        stdin: what the command reads.
        environment: its variables.
        stop_limit_s: seconds from the first signal to the kill of what still runs.
        say: prints a line for the user.
        clock: seconds, never going back.

    Returns:
        0 after a requested stop, INTERRUPTED_STATUS if a second signal cut it short, else 0 or 1
        as the child succeeded or failed.
    """
    adopt_orphans()
    if signals.num_requests:
        return 0
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        _write_all(child, stdin)
        return _wait(child, signals, stop_limit_s, say, clock)
    finally:
        is_orderly = child.poll() is not None and signals.num_requests <= 1
        end_remaining(child.pid, patience_s=_PATIENCE_S if is_orderly else 0.0)
        child.wait()


def _write_all(child: subprocess.Popen[bytes], stdin: bytes) -> None:
    assert child.stdin is not None
    # A child that ends before reading has a status that says why.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(stdin)
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


def _wait(
    child: subprocess.Popen[bytes],
    signals: StopSignals,
    stop_limit_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> int:
    """Wait for the child's end, a second request, or the limit after the first."""
    deadline_s: float | None = None
    while True:
        status = child.poll()
        if status is not None and not signals.num_requests:
            if status < 0:
                say(f"the process that serves was ended by {signal.Signals(-status).name}")
            return 0 if status == 0 else 1
        if signals.num_requests > 1:
            say("stopping now: what still runs is killed")
            return INTERRUPTED_STATUS
        if status is not None:
            return 0
        if signals.num_requests and deadline_s is None:
            say("stopping (once more to kill at once)")
            deadline_s = clock() + stop_limit_s
            child.send_signal(signal.SIGINT)
        if deadline_s is not None and clock() >= deadline_s:
            return 0
        signals.wait(None if deadline_s is None else max(0.0, deadline_s - clock()))
