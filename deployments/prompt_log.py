"""The log of requests whose callers agreed to it (``log_prompt``): JSON lines, rotated.

Everything else that Medley writes holds no prompt and no answer. What is written here is the
prompt as it was sent and the answer as it was told, with enough to find both again.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import logging.handlers
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from deployments.records import AdmissionRecord, Message
from deployments.translate import Job

_logger = logging.getLogger("ray.serve")
_OWNER_ONLY = 0o600


class LoggedRequest:
    """What is logged of one request, as it goes by. Owner: the event loop."""

    def __init__(self, job: Job) -> None:
        """Note nothing yet.

        Args:
            job: of the request.
        """
        self._job = job
        self._choices: dict[tuple[int, int], dict[str, Any]] = {}
        self._adapter_versions: list[str | None] = []

    def note_admissions(self, admissions: Sequence[AdmissionRecord]) -> None:
        """Take the versions of the adapter."""
        self._adapter_versions = [admission["adapter_version"] for admission in admissions]

    def note_message(self, prompt_index: int, message: Message) -> None:
        """Take what was answered to a prompt."""
        for record in message:
            if record["kind"] == "delta":
                self._note(prompt_index, dict(record))

    def to_line(self, outcome: str, now: datetime.datetime) -> bytes:
        """Return what is logged of the request, without a line end.

        Args:
            outcome: "complete", or the class of what ended it early.
            now: time of the end.
        """
        job = self._job
        return orjson.dumps(
            {
                "time": now.isoformat(),
                "id": job.response_id,
                "model": job.model_id,
                "adapter": job.calls[0].get("adapter_id"),
                "adapter_versions": self._adapter_versions,
                "outcome": outcome,
                "metadata": job.extras.get("metadata"),
                "sampling": job.calls[0]["sampling"],
                "prompts": [{**call["prompt"], "seed": call["seed"]} for call in job.calls],
                "choices": [
                    {"prompt": prompt, "choice": choice, **told}
                    for (prompt, choice), told in sorted(self._choices.items())
                ],
            }
        )

    def _note(self, prompt_index: int, delta: dict[str, Any]) -> None:
        told = self._choices.setdefault(
            (prompt_index, delta["choice"]), {"text": "", "token_ids": [], "finish_reason": None}
        )
        told["text"] += delta["text"]
        told["token_ids"] += delta["token_ids"]
        told["finish_reason"] = delta["finish_reason"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogConfig:
    """Where the log is, and how much of it is kept.

    Attributes:
        folder: one file per ingress replica lies there.
        max_bytes: of one file before the next is begun.
        num_kept: older files that are kept besides.
    """

    folder: Path
    max_bytes: int
    num_kept: int


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class PromptLog:
    """Writes lines in a thread of its own, so that no event loop waits for a disk.

    Owner: any thread may write.
    """

    def __init__(
        self,
        config: PromptLogConfig,
        name: str,
        clock: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        """Begin with the first line.

        Args:
            config: where and how much.
            name: of the file, different for every process that writes.
            clock: time in UTC.
        """
        self._path = config.folder / f"{name}.jsonl"
        self._config = config
        self._clock = clock
        self._lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._listener: logging.handlers.QueueListener | None = None

    def write(self, request: LoggedRequest, outcome: str) -> None:
        """Write one request; a disk that fails is told in the log of the service, once a line."""
        line = request.to_line(outcome, self._clock()).decode()
        if self._listener is None:
            self._listener = self._start()
        self._lines.put(logging.LogRecord("", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Write what waits and end the thread. Idempotent."""
        if self._listener is not None:
            self._listener.stop()
            for handler in self._listener.handlers:
                handler.close()
            self._listener = None

    def _start(self) -> logging.handlers.QueueListener:
        listener = logging.handlers.QueueListener(self._lines, _LazyFile(self._path, self._config))
        listener.start()
        return listener


class _LazyFile(logging.handlers.RotatingFileHandler):
    """Opens its file, readable by its owner only, with the first line."""

    def __init__(self, path: Path, config: PromptLogConfig) -> None:
        super().__init__(
            path,
            maxBytes=config.max_bytes,
            backupCount=config.num_kept,
            encoding="utf-8",
            delay=True,
        )
        self.setFormatter(logging.Formatter("%(message)s"))
        self._path = path

    def _open(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.touch(mode=_OWNER_ONLY)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's
        """Tell that a line is lost, without the line."""
        _logger.exception("a line of the prompt log could not be written to %s", self._path)
