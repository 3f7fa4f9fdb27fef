"""The supervisor in a process of its own, over small children that need no Ray."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Ten times what a step takes on a busy machine.
_LIMIT_S = 30.0
_ROOT = Path(__file__).parents[3]

_SUPERVISOR = """
import os, sys
from cluster.supervisor import StopSignals, supervise

signals = StopSignals()
print("counting", flush=True)
status = supervise(
    [sys.executable, "-c", sys.argv[1]],
    signals,
    stdin=b"hello",
    environment=dict(os.environ),
    stop_limit_s=float(sys.argv[2]),
    say=lambda line: print(line, flush=True),
)
sys.exit(status)
"""

# Starts a grandchild that ignores every polite signal in a session of its own, then says so.
_WITH_GRANDCHILD = """
import subprocess, sys, time
code = (
    "import signal, time\\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\\n"
    "    signal.signal(number, signal.SIG_IGN)\\n"
    "print('grandchild', flush=True)\\n"
    "time.sleep(600)\\n"
)
grandchild = subprocess.Popen(
    [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True
)
grandchild.stdout.readline()
print("pid", grandchild.pid, flush=True)
"""

_ORDERLY = """
import signal, sys, threading
stop = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stop.set())
print("child ready", flush=True)
stop.wait()
print("child ends in order", flush=True)
"""

_STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("child ready", flush=True)
time.sleep(600)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(child: str, stop_limit_s: float = _LIMIT_S, **options: object) -> object:
        process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR, textwrap.dedent(child), str(stop_limit_s)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _read_until(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"ended without '{start}'")


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_child_in_order_with_status_0(
    start: Start, number: signal.Signals
) -> None:
    process = start(_ORDERLY)
    _read_until(process, "child ready")

    process.send_signal(number)
    output, _ = process.communicate(timeout=_LIMIT_S)

    assert "child ends in order" in output
    assert process.returncode == 0


def test_a_signal_counts_even_if_the_shell_had_it_ignored(start: Start) -> None:
    ignored = {signal.SIGINT: signal.SIG_IGN}
    previous = {number: signal.signal(number, handler) for number, handler in ignored.items()}
    try:
        process = start(_ORDERLY)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    _read_until(process, "child ready")

    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=_LIMIT_S) == 0


def test_a_child_that_does_not_end_is_killed_at_the_limit(start: Start) -> None:
    process = start(_STUBBORN, stop_limit_s=0.5)
    _read_until(process, "child ready")

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=_LIMIT_S) == 0


def test_a_second_signal_kills_at_once(start: Start) -> None:
    process = start(_STUBBORN, stop_limit_s=600)
    _read_until(process, "child ready")

    process.send_signal(signal.SIGINT)
    _read_until(process, "stopping")
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=_LIMIT_S) == 130


def test_two_signals_at_the_same_time_are_one_request(start: Start) -> None:
    process = start(_ORDERLY)
    _read_until(process, "child ready")

    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=_LIMIT_S)

    assert "child ends in order" in output
    assert process.returncode == 0


def test_a_terminals_signal_to_the_whole_group_reaches_the_child_only_through_the_supervisor(
    start: Start,
) -> None:
    process = start(_ORDERLY, start_new_session=True)
    _read_until(process, "child ready")

    os.killpg(process.pid, signal.SIGHUP)
    output, _ = process.communicate(timeout=_LIMIT_S)

    assert "child ends in order" in output
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_signal_that_only_make_got_ends_the_child_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "supervisor.py").write_text(_SUPERVISOR)
    (tmp_path / "Makefile").write_text(
        f"all:\n\t@exec {sys.executable} supervisor.py '$(CHILD)' {_LIMIT_S}\n"
    )
    child = _ORDERLY.strip().replace("\n", "; ").replace("$", "$$").replace("'", '"')
    with subprocess.Popen(
        ["make", f"CHILD={child}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as make:
        _read_until(make, "child ready")

        make.send_signal(number)
        output, _ = make.communicate(timeout=_LIMIT_S)

    assert "child ends in order" in output


def test_no_descendant_is_left_when_the_child_ends_by_itself(start: Start) -> None:
    process = start(_WITH_GRANDCHILD)
    pid = int(_read_until(process, "pid").split()[1])

    status = process.wait(timeout=_LIMIT_S)

    assert status == 0
    assert _is_gone(pid)


def test_no_descendant_is_left_when_the_child_is_killed(start: Start) -> None:
    process = start(_WITH_GRANDCHILD + "time.sleep(600)\n")
    pid = int(_read_until(process, "pid").split()[1])
    (child,) = psutil.Process(process.pid).children()

    child.kill()
    output, _ = process.communicate(timeout=_LIMIT_S)

    assert "SIGKILL" in output
    assert process.returncode == 1
    assert _is_gone(pid)


def test_a_childs_failure_is_the_status(start: Start) -> None:
    assert start("raise SystemExit(7)").wait(timeout=_LIMIT_S) == 1


def test_the_child_reads_its_input(start: Start) -> None:
    process = start("import sys\nprint('read', sys.stdin.read(), flush=True)")

    assert _read_until(process, "read") == "read hello"


def test_a_child_that_asked_to_end_with_its_parent_does(start: Start) -> None:
    process = start(
        "import os, time\n"
        "from cluster.process_tree import end_with_parent\n"
        "end_with_parent(os.getppid())\n"
        "print('child ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    _read_until(process, "child ready")
    (child,) = psutil.Process(process.pid).children()

    process.kill()

    child.wait(timeout=_LIMIT_S)
