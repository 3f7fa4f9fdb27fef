"""The ``medley`` command as a person starts it: a process, signals, a port, real HTTP."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import CACHE_FOLDER
from tests.integration.process_tags import ProcessTag

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
# A start takes some 20 s on a quiet machine.
_START_LIMIT_S = 300.0
# The launcher kills what is left after 8 s; the rest is for a busy machine.
_STOP_LIMIT_S = 30.0
_MODEL_ID = "smollm2-135m-instruct"


class Launcher:
    """A running ``medley up`` and the lines that it wrote."""

    def __init__(self, folder: Path, *words: str, cache_folder: Path = CACHE_FOLDER) -> None:
        self.port = _find_free_port()
        self._tag = ProcessTag()
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cluster.launch", "up", f"port={self.port}", *words],
                cwd=_ROOT,
                env={
                    **os.environ,
                    "MEDLEY_CACHE_DIR": str(cache_folder),
                    **self._tag.environment,
                },
                stdout=stdout,
                stderr=stderr,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until a text stands in one of the streams."""
        pause = threading.Event()
        for _ in range(int(_START_LIMIT_S / 0.1)):
            if text in self.stdout + self.stderr:
                return
            assert self.process.poll() is None, self.stderr
            pause.wait(0.1)
        raise AssertionError(f"no '{text}' in time:\n{self.stderr}")

    def stop(self, *numbers: signal.Signals) -> tuple[int, list[psutil.Process]]:
        """Send signals, a second apart; return the exit status and the processes that are left."""
        pause = threading.Event()
        for index, number in enumerate(numbers):
            if index:
                pause.wait(1.0)
            self.process.send_signal(number)
        status = self.process.wait(timeout=_STOP_LIMIT_S)
        return status, self._tag.processes()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _launch(folder: Path, *words: str, cache_folder: Path = CACHE_FOLDER) -> Iterator[Launcher]:
    launcher = Launcher(folder, *words, cache_folder=cache_folder)
    try:
        yield launcher
    finally:
        if launcher.process.poll() is None:
            launcher.stop(signal.SIGTERM)


def _run_to_its_end(folder: Path, *words: str) -> tuple[int, list[str]]:
    with _launch(folder, *words) as launcher:
        status = launcher.process.wait(timeout=_START_LIMIT_S)
        return status, launcher.stderr.splitlines()


@contextlib.contextmanager
def _open_stream(launcher: Launcher) -> Iterator[Iterator[str]]:
    """Ask for a long story; yield its lines from the first event on."""
    body = {
        "model": _MODEL_ID,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "stream": True,
        "max_tokens": 7000,
        "ignore_eos": True,
    }
    with httpx.stream(
        "POST", f"{launcher.url}/v1/chat/completions", json=body, timeout=_START_LIMIT_S
    ) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert "choices" in json.loads(first.removeprefix("data: "))
        yield lines


def _read_events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_a_started_service_answers_and_ends_in_order_with_a_stream_open(tmp_path: Path) -> None:
    # As a shell does it for what it starts with `&`.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.ExitStack() as stack:
        try:
            launcher = stack.enter_context(_launch(tmp_path))
        finally:
            signal.signal(signal.SIGINT, previous)
        launcher.wait_for("Medley is ready")

        (ready_line,) = launcher.stdout.splitlines()
        command = shlex.split(ready_line.partition("try: ")[2])
        answer = httpx.post(
            command[1],
            content=command[command.index("-d") + 1],
            headers=dict([command[command.index("-H") + 1].split(": ")]),
            timeout=_START_LIMIT_S,
        ).json()
        with _open_stream(launcher) as lines:
            status, remaining = launcher.stop(signal.SIGINT)
            events = _read_events(lines)

    assert re.search(r"KV cache: [1-9]\d* blocks of 16 tokens", launcher.stderr)
    assert command[:2] == ["curl", f"{launcher.url}/v1/chat/completions"]
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert "error" in json.loads(events[-1])
    assert "[DONE]" not in events
    assert (status, remaining) == (0, [])


def test_a_second_interrupt_ends_it_at_once_with_a_stream_open(tmp_path: Path) -> None:
    with _launch(tmp_path) as launcher:
        launcher.wait_for("Medley is ready")
        with _open_stream(launcher) as lines:
            status, remaining = launcher.stop(signal.SIGINT, signal.SIGINT)
            with contextlib.suppress(httpx.RemoteProtocolError):
                events = _read_events(lines)
                assert "[DONE]" not in events

    assert (status, remaining) == (130, [])


@pytest.mark.parametrize(
    ("progress", "number"),
    [
        ("starting Ray Serve", signal.SIGTERM),
        ("loading weights", signal.SIGHUP),
    ],
)
def test_a_signal_while_it_loads_ends_it_in_order(
    tmp_path: Path, progress: str, number: signal.Signals
) -> None:
    with _launch(tmp_path) as launcher:
        launcher.wait_for(progress)

        status, remaining = launcher.stop(number)

    assert (status, remaining) == (0, [])
    assert launcher.stdout == ""


def test_a_signal_while_it_converts_leaves_nothing_half_made(tmp_path: Path) -> None:
    cache_folder = tmp_path / "cache"
    with _launch(tmp_path, cache_folder=cache_folder) as launcher:
        launcher.wait_for("converting")

        status, remaining = launcher.stop(signal.SIGINT)

    assert (status, remaining) == (0, [])
    assert launcher.stdout == ""
    # Its final name is the mark of a complete copy; the next start removes what has none.
    assert [path.name for path in cache_folder.iterdir() if not path.name.startswith(".")] == []


def test_a_model_that_does_not_exist_is_told_in_one_line(tmp_path: Path) -> None:
    status, lines = _run_to_its_end(tmp_path, "model=/nowhere/at/all")

    assert status == 1
    assert lines[-1].startswith("medley: model: ")
    assert "/nowhere/at/all" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_model_that_the_replica_refuses_is_told_in_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"this is no model")

    status, lines = _run_to_its_end(tmp_path, f"model={damaged}")

    assert status == 1
    assert lines[-1].startswith("medley: model: ")
    assert "damaged.gguf" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_kv_budget_beyond_the_machine_is_told_in_one_line(tmp_path: Path) -> None:
    status, lines = _run_to_its_end(tmp_path, "kv_budget_bytes=10000000000000")

    assert status == 1
    # The replica finds it out, after progress of its own.
    assert [line for line in lines if line.startswith("medley: ")] == lines[-1:]
    assert lines[-1].startswith("medley: model: ")
    assert "GiB" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_model_of_another_kind_is_told_in_one_line(tmp_path: Path) -> None:
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    status, lines = _run_to_its_end(tmp_path, f"model={tmp_path}")

    assert status == 1
    assert [line for line in lines if line.startswith("medley: ")] == lines[-1:]
    assert "not a causal language model but BertForMaskedLM" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]

        run = subprocess.run(
            [sys.executable, "-m", "cluster.launch", "up", f"port={port}"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_START_LIMIT_S,
            check=False,
        )

    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        f"medley: cannot listen on 127.0.0.1 port {port}: Address already in use "
        "(choose another: port=...)"
    ]


def test_an_unknown_argument_is_a_misuse_told_in_one_line(tmp_path: Path) -> None:
    status, lines = _run_to_its_end(tmp_path, "modle=x")

    assert status == 2
    assert lines == ["medley: unknown argument 'modle' (did you mean 'model'?)"]
