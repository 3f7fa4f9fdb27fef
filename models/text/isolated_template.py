"""IsolatedTemplate: a chat template that is not trusted, rendered in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ChatTemplateError, DrainingError, InvalidRequestError
from models.requests import ChatPrompt
from models.text.template_worker import LENGTH_BYTES, READY

MAX_TEMPLATE_BYTES = 256 << 10

_ROOT = Path(__file__).parents[2]
_SCRIPT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from models.text.template_worker import main; main()"
)
_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class TemplateProcessError(Exception):
    """The process did not answer; its text says why. Never leaves ``models.text``."""


class TemplateProcess:
    """The process, started when it is first asked, and again after it had to be ended.

    One request at a time: the others wait for ``timeout_s`` each at most.

    Owner: any thread. Lifetime: ends with ``close``, or with this process.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        """Start nothing yet.

        Args:
            timeout_s: seconds after which a process that has not answered is ended.
        """
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; ``template_worker`` has their schema.

        Raises:
            TemplateProcessError: there was none in time, or the process ended.
            DrainingError: this was closed.
        """
        encoded = json.dumps(request).encode()
        message = len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded
        with self._lock:
            if self._is_closed:
                raise DrainingError
            try:
                process = self._started()
                assert process.stdin is not None
                process.stdin.write(message)
                process.stdin.flush()
                return self._read(process, self._timeout_s)
            except (OSError, ValueError, TemplateProcessError) as error:
                self._end()
                if isinstance(error, TemplateProcessError):
                    raise
                raise TemplateProcessError("it broke off") from error

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _SCRIPT, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
            )
            if self._read(self._process, _START_TIMEOUT_S) != READY:
                raise TemplateProcessError("it did not start")
        return self._process

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        length = int.from_bytes(self._read_exactly(process, LENGTH_BYTES, deadline_s), "big")
        if length > _MAX_ANSWER_BYTES:
            raise TemplateProcessError("its text is too long")
        answer: dict[str, Any] = json.loads(self._read_exactly(process, length, deadline_s))
        return answer

    def _read_exactly(
        self, process: subprocess.Popen[bytes], num_bytes: int, deadline_s: float
    ) -> bytes:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        parts = []
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while num_bytes:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(1000 * left_s):
                raise TemplateProcessError(f"rendering takes more than {self._timeout_s:g} s")
            part = os.read(descriptor, min(num_bytes, _READ_BYTES))
            if not part:
                raise TemplateProcessError("rendering takes too much memory, or broke off")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What was not sent is not wanted any more.
                with contextlib.suppress(OSError):
                    pipe.close()


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedTemplate:
    """A chat template of an adapter or a request; renders as ``ChatTemplate`` does.

    Attributes:
        process: where.
        adapter_id: whose; errors name it. "" is the request's own.
        source: Jinja text.
        special_tokens: variables such as ``bos_token`` that it may name.
    """

    process: TemplateProcess
    adapter_id: str
    source: str
    special_tokens: Mapping[str, str]

    def check(self) -> str:
        """Return why the template does not compile; "" if it does."""
        answer = self._ask(None)
        return str(answer.get("reason", ""))

    def render(self, prompt: ChatPrompt) -> str:
        """Turn messages into the text of a prompt.

        Raises:
            InvalidRequestError: the messages or variables are at fault.
            ChatTemplateError: the template refused the messages, or did too much.
        """
        answer = self._ask({**_fields_of(prompt)})
        if "text" in answer:
            return str(answer["text"])
        if answer["failed"] == "request":
            raise InvalidRequestError(answer["param"], answer["reason"])
        raise self._error(answer["reason"])

    def _ask(self, prompt: Mapping[str, Any] | None) -> dict[str, Any]:
        request = {
            "source": self.source,
            "special_tokens": dict(self.special_tokens),
            "prompt": prompt,
        }
        try:
            return self.process.ask(request)
        except TemplateProcessError as error:
            raise self._error(str(error)) from error

    def _error(self, reason: str) -> ChatTemplateError:
        owner = f"that of adapter '{self.adapter_id}'" if self.adapter_id else "the request's own"
        return ChatTemplateError(f"{reason} (the template is {owner})")


def _fields_of(prompt: ChatPrompt) -> dict[str, Any]:
    fields = {field.name: getattr(prompt, field.name) for field in dataclasses.fields(prompt)}
    return {**fields, "template": ""}
