"""``medley up`` as a person starts it: how long that takes, and what its processes hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path(__file__).parents[2]
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 30.0
_READY_MARK = "Medley is ready"
# How Ray names the process of a replica of the application "medley".
_REPLICA_MARK = "ray::ServeReplica:medley:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProcess:
    """A running service.

    Attributes:
        port: of 127.0.0.1.
        started_at_s: time.monotonic() before its first process began.
        ready_s: seconds from then to its ready line.
        process: the launcher.
    """

    port: int
    started_at_s: float
    ready_s: float
    process: subprocess.Popen[str]


def replica_rss_bytes(root_pid: int) -> dict[str, int]:
    """Return the resident memory of each replica below a process, by its deployment's name."""
    found = {}
    for process in psutil.Process(root_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = (process.cmdline() or [""])[0]
            if title.startswith(_REPLICA_MARK):
                # A replica that is busy has its method's name behind its own.
                name = title.removeprefix(_REPLICA_MARK).partition(".")[0]
                found[name] = process.memory_info().rss
    return found


@contextlib.contextmanager
def running_service(cache_folder: Path, *words: str) -> Iterator[ServiceProcess]:
    """Start the service and wait until it is ready; end it behind the context.

    Args:
        cache_folder: where the converted model lies.
        words: further ``key=value`` arguments.

    Raises:
        RuntimeError: it did not start.
    """
    port = _find_free_port()
    started_at_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.launch", "up", f"port={port}", *words],
        cwd=_ROOT,
        env={**os.environ, "MEDLEY_CACHE_DIR": str(cache_folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_until_ready(process)
        yield ServiceProcess(
            port=port,
            started_at_s=started_at_s,
            ready_s=time.monotonic() - started_at_s,
            process=process,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_STOP_LIMIT_S)


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Wait for the only line that the launcher writes to its standard output."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_LIMIT_S)
    line = process.stdout.readline() if readable else ""
    if _READY_MARK not in line:
        raise RuntimeError(f"the service did not start: {line or 'no word from it'}")


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
