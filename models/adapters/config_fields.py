"""Typed reading of a JSON object of which nothing may be overlooked. No torch.

Every key is taken, or ignored by name; what is then left over must be switched off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.adapters.faults import AdapterFaultError, shown

# How options say that they are not used.
_OFF: tuple[Any, ...] = (None, False, "", [], {})


class ConfigFields:
    """The keys of one ``adapter_config.json`` that nobody has looked at yet."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take a parsed JSON object."""
        self._values = dict(values)

    def is_given(self, name: str) -> bool:
        """Tell whether a key is there and not null; takes nothing."""
        return self._values.get(name) is not None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Take true or false; absent and null give the default.

        Raises:
            AdapterFaultError: it is something else.
        """
        value = self._take(name, default=default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """Take a text; absent and null are "".

        Raises:
            AdapterFaultError: it is something else.
        """
        value = self._take(name, default="")
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        return value

    def raw(self, name: str, *, default: Any) -> Any:
        """Take a value of any type; absent and null give the default."""
        return self._take(name, default=default)

    def count(self, name: str, *, default: int) -> int:
        """Take a whole number of at least 1.

        Raises:
            AdapterFaultError: it is something else.
        """
        return _as_count(name, self._take(name, default=default))

    def integer(self, name: str, *, default: int) -> int:
        """Take a whole number of any sign.

        Raises:
            AdapterFaultError: it is something else.
        """
        value = self._take(name, default=default)
        if not _is_integer(value):
            raise _wrong(name, value, "a whole number")
        return int(value)

    def number(self, name: str, *, default: float) -> float:
        """Take a finite number.

        Raises:
            AdapterFaultError: it is something else.
        """
        return _as_number(name, self._take(name, default=default))

    def counts(self, name: str) -> Mapping[str, int]:
        """Take a mapping from patterns to whole numbers of at least 1, in the file's order.

        Raises:
            AdapterFaultError: it is something else.
        """
        return {key: _as_count(name, value) for key, value in self._mapping(name).items()}

    def numbers(self, name: str) -> Mapping[str, float]:
        """Take a mapping from patterns to finite numbers, in the file's order.

        Raises:
            AdapterFaultError: it is something else.
        """
        return {key: _as_number(name, value) for key, value in self._mapping(name).items()}

    def indices(self, name: str) -> frozenset[int] | None:
        """Take one index or a list of them; absent, null and an empty list are None.

        Raises:
            AdapterFaultError: it is something else.
        """
        value = self._take(name, default=[])
        listed = value if isinstance(value, list) else [value]
        if not all(_is_integer(index) for index in listed):
            raise _wrong(name, value, "a list of layer indices")
        return frozenset(listed) or None

    def texts(self, name: str) -> tuple[str, ...]:
        """Take one text or a list of them; absent, null, "" and an empty list are ().

        Raises:
            AdapterFaultError: it is something else.
        """
        value = self._take(name, default="")
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in listed):
            raise _wrong(name, value, "a list of texts")
        return tuple(listed) if value else ()

    def names_or_pattern(self, name: str) -> frozenset[str] | str:
        """Take a list of names (as a set) or one pattern; absent, null and "" are the empty set.

        Raises:
            AdapterFaultError: it is something else.
        """
        texts = self.raw(name, default="")
        if isinstance(texts, str):
            return texts or frozenset()
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _wrong(name, texts, "a list of names or a pattern")
        return frozenset(texts)

    def ignore(self, *names: str) -> None:
        """Drop keys that change nothing when the adapter runs."""
        for name in names:
            self._values.pop(name, None)

    def refuse(self, names: Mapping[str, str]) -> None:
        """Drop keys that must be switched off.

        Args:
            names: what each key switches on, in words.

        Raises:
            AdapterFaultError: one is on.
        """
        for name, meaning in names.items():
            if self._values.pop(name, None) not in _OFF:
                raise AdapterFaultError(f"{meaning} ({name}) is not supported yet")

    def finish(self) -> None:
        """Check that nothing is left but unknown options that are switched off.

        Raises:
            AdapterFaultError: an unknown option is on; nobody knows what it changes.
        """
        for name, value in self._values.items():
            if value not in _OFF:
                raise AdapterFaultError(
                    f"its option '{shown(name)}' is not known here (value {shown(repr(value))})"
                )

    def _take(self, name: str, *, default: Any) -> Any:
        value = self._values.pop(name, None)
        return default if value is None else value

    def _mapping(self, name: str) -> dict[str, Any]:
        value = self._take(name, default={})
        if not isinstance(value, dict):
            raise _wrong(name, value, "a mapping from module names")
        return value


def _as_count(name: str, value: Any) -> int:
    if not _is_integer(value) or value < 1:
        raise _wrong(name, value, "a whole number of at least 1")
    return int(value)


def _as_number(name: str, value: Any) -> float:
    is_number = _is_integer(value) or isinstance(value, float)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, value, "a finite number")
    return number


def _is_integer(value: Any) -> bool:
    """Tell whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: Any, wanted: str) -> AdapterFaultError:
    return AdapterFaultError(f"its {name} must be {wanted}, not {shown(repr(value))}")
