"""Turns ``key=value`` words into a validated configuration, with errors for people.

Declares no argument of its own but host and port: the others are the fields of ServiceConfig.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import pydantic

from deployments.config import ServiceConfig
from models.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpArguments:
    """The words after ``medley up``.

    Attributes:
        host: address for HTTP.
        port: port for HTTP.
        builder: the builder's arguments as given, validated.
    """

    host: str
    port: int
    builder: dict[str, Any]


def parse_up_arguments(words: Sequence[str], defaults: dict[str, Any]) -> UpArguments:
    """Read and validate ``key=value`` words.

    Args:
        words: the command line after ``up``.
        defaults: builder arguments that a word of the same key replaces.

    Raises:
        ConfigError: naming the word or the field.
    """
    values = _split_words(words)
    host = values.pop("host", DEFAULT_HOST)
    port = _parse_port(values.pop("port", str(DEFAULT_PORT)))
    builder = {**defaults, **values}
    try:
        ServiceConfig.model_validate(builder).check()
    except pydantic.ValidationError as error:
        raise ConfigError("", describe_problems(error)) from error
    return UpArguments(host=host, port=port, builder=builder)


def describe_problems(error: pydantic.ValidationError) -> str:
    """Return one line that names every field with its problem.

    Args:
        error: of ServiceConfig or of one of Serve's schemas.
    """
    return "; ".join(_describe(problem) for problem in error.errors(include_url=False))


def _describe(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = [*ServiceConfig.model_fields.keys() - {"models"}, "host", "port"]
        near = difflib.get_close_matches(field, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(sorted(known))}"
        return f"unknown argument '{field}' ({hint})"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{field}: {reason}" if field else reason


def _split_words(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise ConfigError("", f"'{word}' is not of the form key=value")
        if key in values:
            raise ConfigError("", f"'{key}' is given twice")
        values[key] = value
    return values


def _parse_port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_PORT:
        raise ConfigError("port", f"'{text}' is not a number from 1 to {_MAX_PORT}")
    return int(text)
