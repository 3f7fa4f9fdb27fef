"""Reads the API keys from a file or a folder, and looks every second whether they have changed.

A file is YAML (or JSON, which is YAML too): a list of records as ``medley hash-key`` prints them.
A folder, such as a Kubernetes Secret is mounted as, has one or more files of that form. What is
read replaces all that was read before.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deployments.api_keys import ApiKey, Grants, KeyRing
from models.errors import ConfigError

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")

FIELD = "api_keys_file"
LOOK_INTERVAL_S = 1.0
_MAX_BYTES = 8 << 20
KEY_NAME = re.compile(r"[!-~]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# A whole name, or the beginning of names and a star.
_PATTERN = re.compile(r"[^*\s]*\*?")
# The C parser, where PyYAML has it: thirty times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Limit = Annotated[int, Field(ge=0, le=10**12)]


class KeyRecord(BaseModel):
    """One record of the file.

    Attributes:
        name: whose key it is; different for every record. Printable ASCII without spaces.
        sha256: SHA-256 of the key, in hexadecimal digits; ``medley hash-key`` makes it.
        models: what it allows; see ``Grants``.
        adapters: what it allows; see ``Grants``.
        tokens_per_minute: see ``ApiKey``.
        requests_per_minute: see ``ApiKey``.
        max_running_requests: see ``ApiKey``.
    """

    # Somebody may have written the key itself where its hash belongs.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str
    sha256: str
    models: tuple[str, ...] = Grants().models
    adapters: tuple[str, ...] = Grants().adapters
    tokens_per_minute: Limit = 0
    requests_per_minute: Limit = 0
    max_running_requests: Limit = 0

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not KEY_NAME.fullmatch(value):
            raise ValueError("must be 1 to 128 printable ASCII characters without spaces")
        return value

    @field_validator("sha256")
    @classmethod
    def _check_digest(cls, value: str) -> str:
        if not _DIGEST.fullmatch(value.lower()):
            raise ValueError("must be 64 hexadecimal digits, as medley hash-key prints them")
        return value.lower()

    @field_validator("models", "adapters", mode="before")
    @classmethod
    def _read_patterns(cls, value: Any) -> Any:
        """Read a single pattern as a list of one."""
        return (value,) if isinstance(value, str) else value

    @field_validator("models", "adapters")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not pattern or not _PATTERN.fullmatch(pattern):
                raise ValueError("a pattern is a name, or the beginning of names and one '*'")
        return value

    def to_api_key(self) -> ApiKey:
        """Return what the service keeps of it."""
        return ApiKey(
            name=self.name,
            digest=bytes.fromhex(self.sha256),
            grants=Grants(models=self.models, adapters=self.adapters),
            tokens_per_minute=self.tokens_per_minute,
            requests_per_minute=self.requests_per_minute,
            max_running_requests=self.max_running_requests,
        )


def read_keys(path: Path) -> KeyRing:
    """Return the keys of a file, or of all files of a folder.

    Raises:
        ConfigError: it cannot be read, or what it has are no keys. Tells no value of it.
    """
    return _parse(_read(path))


class KeyFile:
    """The keys as they are now: a thread reads the file again and again.

    While a new version is broken, the keys of the last good one hold.

    Owner: any thread may read ``ring``; ``look`` belongs to one thread.
    """

    def __init__(self, path: Path) -> None:
        """Read it once.

        Args:
            path: of a file, or of a folder.

        Raises:
            ConfigError: it is broken now.
        """
        self._path = path
        self._contents = _read(path)
        self._ring = _parse(self._contents)
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def ring(self) -> KeyRing:
        """The keys."""
        return self._ring

    def look(self) -> None:
        """Read the file, and take its keys if they are good and others."""
        try:
            contents = _read(self._path)
            if contents == self._contents and not self._problem:
                return
            self._ring = _parse(contents)
        except ConfigError as error:
            self._report(str(error))
            return
        self._contents, self._problem = contents, ""
        _logger.warning("the API keys were read again: there are %d now", len(self._ring))

    def watch(self) -> None:
        """Look from now on every second, in a thread that ends with the process."""
        self._thread = threading.Thread(target=self._run, name="api-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _logger.error(
                "the API keys cannot be read; the %d keys of before hold on. %s",
                len(self._ring),
                problem,
            )

    def _run(self) -> None:
        while not self._stop.wait(LOOK_INTERVAL_S):
            try:
                self.look()
            except Exception:
                # The thread must outlive whatever a file makes of a parser.
                _logger.exception("the API keys cannot be looked at")


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    """One file as it was read."""

    path: Path
    text: bytes = dataclasses.field(repr=False)


def _read(path: Path) -> tuple[_Content, ...]:
    try:
        # A mounted Secret has its versions in hidden folders and links to them.
        paths = (
            sorted(file for file in path.iterdir() if not file.name.startswith("."))
            if path.is_dir()
            else [path]
        )
        contents = []
        room_bytes = _MAX_BYTES
        for file in paths:
            if file.is_dir():
                continue
            with file.open("rb") as stream:
                text = stream.read(room_bytes + 1)
            room_bytes -= len(text)
            if room_bytes < 0:
                raise ConfigError(FIELD, f"there are more than {_MAX_BYTES} bytes at '{path}'")
            contents.append(_Content(file, text))
    except OSError as error:
        raise ConfigError(FIELD, f"cannot read '{path}': {error.strerror}") from None
    if not contents:
        raise ConfigError(FIELD, f"there is no file in the folder '{path}'")
    return tuple(contents)


def _parse(contents: tuple[_Content, ...]) -> KeyRing:
    names: dict[str, Path] = {}
    digests: dict[bytes, str] = {}
    keys = []
    for content in contents:
        for record in _Records.parse(content).records:
            key = record.to_api_key()
            if key.name in names:
                raise ConfigError(FIELD, f"'{content.path}': '{key.name}' names two keys")
            if key.digest in digests:
                raise ConfigError(
                    FIELD,
                    f"'{content.path}': '{key.name}' and '{digests[key.digest]}' have one key",
                )
            names[key.name] = content.path
            digests[key.digest] = key.name
            keys.append(key)
    return KeyRing(keys)


class _Records(BaseModel):
    """The records of one file."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    records: tuple[KeyRecord, ...]

    @classmethod
    def parse(cls, content: _Content) -> Self:
        """Read a file; an empty one is broken: it may be half written.

        Raises:
            ConfigError: naming the file and the place.
        """
        where = f"'{content.path}'"
        try:
            # The safe loader, whichever of the two.
            value = yaml.load(content.text, Loader=_LOADER)
        except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            place = "" if mark is None else f" (line {mark.line + 1})"
            raise ConfigError(FIELD, f"{where} is not valid YAML{place}") from None
        if not isinstance(value, list):
            raise ConfigError(FIELD, f"{where} must hold a list of keys, '- name: ...'")
        try:
            return cls.model_validate({"records": value})
        except ValidationError as error:
            raise ConfigError(FIELD, f"{where}: {_describe(error)}") from None


def _describe(error: ValidationError) -> str:
    """Return what is wrong with the first record that is, without its values."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place: list[str] = []
    for part in problem["loc"][1:]:
        place.append(f"record {part + 1}" if isinstance(part, int) and not place else str(part))
    if problem["type"] == "extra_forbidden":
        return f"{place[0]}: there is no field '{place[-1][:64]}'"
    return f"{', '.join(place)}: {problem['msg'].removeprefix('Value error, ')}"
