"""The grammar of adapter ids. Looks nothing up."""

from __future__ import annotations

import re

from models.errors import InvalidAdapterIdError

MAX_SEGMENT_CHARACTERS = 96

# ASCII only. A segment does not begin with ".", so it is never "." or ".." and no hidden file; no
# ":" leaves "base:adapter" with one reading.
_SEGMENT = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_SEGMENT_CHARACTERS - 1}}}"
_ADAPTER_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?")


def is_adapter_id(text: str) -> bool:
    """Return whether a text is one or two segments of the grammar, joined by "/"."""
    return _ADAPTER_ID.fullmatch(text) is not None


def check_adapter_id(adapter_id: str) -> None:
    """Check that an id keeps the grammar, before anything is done with it.

    Raises:
        InvalidAdapterIdError: it does not.
    """
    if not is_adapter_id(adapter_id):
        raise InvalidAdapterIdError(adapter_id)
