"""What is wrong with an adapter's files, told before anybody says whose they are. No torch."""

from __future__ import annotations

_MAX_SHOWN_CHARACTERS = 120


class AdapterFaultError(Exception):
    """Something in an adapter's files cannot be used; its text is one sentence for the caller.

    Never leaves ``models.adapters``: whoever knows the adapter's id turns it into an
    ``AdapterIncompatibleError``.
    """


def shown(value: object) -> str:
    """Return text from an adapter's files as a message may show it: one short line."""
    text = value if isinstance(value, str) else repr(value)
    printable = "".join(char if char.isprintable() else "?" for char in text)
    if len(printable) <= _MAX_SHOWN_CHARACTERS:
        return printable
    return printable[:_MAX_SHOWN_CHARACTERS] + "..."


def shown_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as messages write it, such as ``[8, 64]``."""
    return shown(str(list(shape)))
