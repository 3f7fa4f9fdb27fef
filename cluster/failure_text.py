"""Finds the one readable sentence in the traceback text that Serve keeps of a failed start.

Serve hands out the failure of a replica's constructor only as text, so text is all there is.
"""

from __future__ import annotations

import dataclasses
import re

from models.errors import ConfigError

# Serve writes this word before the traceback, also while it still retries.
_ERROR_MARK = "Error:\n"
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# An exception as the last line of a traceback: "models.errors.ConfigError: model: ...".
_EXCEPTION_LINE = re.compile(r"^(?P<name>(?:\w+\.)*\w+): (?P<text>.*)$")
_CONFIG_ERROR_NAME = f"{ConfigError.__module__}.{ConfigError.__qualname__}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """Why a replica did not start.

    Attributes:
        text: one line for a person.
        is_final: the next try would fail the same way.
    """

    text: str
    is_final: bool


def read_failure(message: str) -> StartFailure | None:
    """Read a deployment's status message.

    Args:
        message: as ``serve.status()`` has it.

    Returns:
        None if the message tells of no failure.
    """
    _, mark, report = _ANSI_COLOUR.sub("", message).partition(_ERROR_MARK)
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    if not mark or not lines:
        return None
    for line in reversed(lines):
        match = _EXCEPTION_LINE.match(line)
        if match and match["name"] == _CONFIG_ERROR_NAME:
            return StartFailure(text=match["text"], is_final=True)
    for line in reversed(lines):
        match = _EXCEPTION_LINE.match(line)
        if match:
            name = match["name"].rpartition(".")[2]
            return StartFailure(text=f"{name}: {match['text']}", is_final=False)
    return StartFailure(text=lines[-1], is_final=False)
