"""Puts the same questions to the base model and two adapters: ``python -m examples.demo_adapters``.

Trains the adapters first unless they are there, serves the bundled model through ``medley up``,
asks everything at once over HTTP, and ends the service. Loads no torch in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cluster.arguments import parse_up_arguments
from cluster.settings import read_settings
from deployments.config import ServiceConfig
from examples.lessons import DEMO_QUESTIONS, STYLES
from models.errors import ConfigError

_BASE = "base"
_MAX_ANSWER_TOKENS = 40
_REQUEST_LIMIT_S = 120.0
# ``medley up`` itself ends within 10 s.
_STOP_LIMIT_S = 20.0
_COLUMN_CHARACTERS = 32
_WEIGHTS_NAME = "adapter_model.safetensors"


class DemoError(Exception):
    """The demonstration cannot go on; its text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request.

    Attributes:
        text: of the assistant.
        seconds: from the request to the whole answer.
    """

    text: str
    seconds: float


def train_missing(folder: Path) -> None:
    """Train those adapters that are not in ``folder`` yet, in a process of their own.

    Raises:
        DemoError: that failed.
    """
    missing = [name for name in STYLES if not (folder / name / _WEIGHTS_NAME).is_file()]
    if not missing:
        return
    _say(f"training {' and '.join(missing)}, once; a minute or two each")
    command = [sys.executable, "-m", "examples.train_adapters", "--out", str(folder), *missing]
    if subprocess.run(command, check=False).returncode != 0:
        raise DemoError("the adapters could not be trained")


@contextlib.contextmanager
def serve(words: Sequence[str]) -> Iterator[None]:
    """Serve with ``medley up`` and these words; it has ended in order behind the context.

    Raises:
        DemoError: it does not start, or does not end with success.
    """
    command = [sys.executable, "-m", "cluster.launch", "up", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        # Its one line on standard output comes when it is ready; without one it has failed.
        if not server.stdout.readline():
            server.wait()
            raise DemoError("the service did not start")
        yield
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        status = server.wait(_STOP_LIMIT_S)
    if status != 0:
        raise DemoError(f"the service ended with status {status}")


def ask(url: str, model_id: str, adapter_id: str | None, question: str) -> Answer:
    """Put one question to the base model (None) or an adapter.

    Raises:
        DemoError: the answer is not one of success.
    """
    body = {
        "model": model_id,
        "peft": adapter_id,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": _MAX_ANSWER_TOKENS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_LIMIT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise DemoError(f"status {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise DemoError(f"no answer from {url}: {error}") from error
    return Answer(answer["choices"][0]["message"]["content"], time.monotonic() - start_s)


def ask_all(url: str, model_id: str) -> list[dict[str, Answer]]:
    """Put every question to the base model and to each adapter, all at once.

    Returns:
        For each question the answers by who gave them, in the order of the columns.
    """
    speakers: dict[str, str | None] = {_BASE: None, **{name: name for name in STYLES}}
    with ThreadPoolExecutor(len(speakers) * len(DEMO_QUESTIONS)) as pool:
        pending = [
            {
                name: pool.submit(ask, url, model_id, peft, question)
                for name, peft in speakers.items()
            }
            for question in DEMO_QUESTIONS
        ]
        return [{name: job.result() for name, job in row.items()} for row in pending]


def format_table(rows: Sequence[dict[str, Answer]]) -> str:
    """Return the answers side by side, below their questions."""
    lines = [_format_line(list(rows[0]))]
    for question, row in zip(DEMO_QUESTIONS, rows, strict=True):
        lines += ["", f"> {question}"]
        columns = [_wrap(answer.text) for answer in row.values()]
        for index in range(max(map(len, columns))):
            lines.append(_format_line([_line_at(column, index) for column in columns]))
    return "\n".join(lines)


def _wrap(text: str) -> list[str]:
    return [
        line
        for paragraph in text.strip().splitlines()
        for line in textwrap.wrap(paragraph, _COLUMN_CHARACTERS)
    ]


def _line_at(column: Sequence[str], index: int) -> str:
    return column[index] if index < len(column) else ""


def _format_line(cells: Sequence[str]) -> str:
    return " | ".join(f"{cell:{_COLUMN_CHARACTERS}}" for cell in cells).rstrip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that the service is ended on the way out."""
    raise KeyboardInterrupt


def main(words: Sequence[str]) -> int:
    """Run the demonstration.

    Args:
        words: further ``key=value`` words for ``medley up``, such as "port=8080".

    Returns:
        The exit status.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        folder = read_settings().cache_folder / "adapters"
        words = [f"adapters={folder}", *words]
        arguments = parse_up_arguments(words, {})
        model_id = ServiceConfig.model_validate(arguments.builder).model_id
        train_missing(folder)
        with serve(words):
            start_s = time.monotonic()
            rows = ask_all(f"http://{arguments.host}:{arguments.port}", model_id)
            seconds = time.monotonic() - start_s
            num_answers = sum(map(len, rows))
            print(
                f"\n{format_table(rows)}\n\n{num_answers} answers, asked at once: {seconds:.1f} s"
            )
    except (ConfigError, DemoError) as error:
        _say(f"demo_adapters: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
