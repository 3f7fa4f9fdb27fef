"""Amounts spent, by the second: the arithmetic under every budget. Reads no clock."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType


class Unit(enum.StrEnum):
    """What is counted."""

    TOKENS = "tokens"
    REQUESTS = "requests"
    RUNNING = "running_requests"


# For how many seconds what was spent counts. A running request counts until it is given back.
SPAN_S: Mapping[Unit, float] = MappingProxyType(
    {Unit.TOKENS: 60.0, Unit.REQUESTS: 60.0, Unit.RUNNING: math.inf}
)


class Window:
    """What was spent within the last seconds.

    An amount belongs to a second and counts for a span after the end of that second, so that
    within no span of time more was spent than the total at its end says.

    Invariants: no amount is 0 or less; the total is their sum; no second is before the first.
    """

    __slots__ = ("_amounts", "_first", "_span_s", "_total")

    def __init__(self, span_s: float) -> None:
        """Begin with nothing spent.

        Args:
            span_s: for how long an amount counts, in seconds.
        """
        self._span_s = span_s
        self._amounts: dict[int, int] = {}
        # Perhaps not there any more.
        self._first: float = math.inf
        self._total = 0

    @property
    def amounts(self) -> Mapping[int, int]:
        """Second -> amount, of what has not been dropped yet."""
        return self._amounts

    def get(self, second: int) -> int:
        """Return what was spent in a second; 0 if it does not count any more."""
        return self._amounts.get(second, 0)

    def set(self, second: int, amount: int) -> None:
        """Replace what was spent in a second.

        Args:
            second: of the owner's clock.
            amount: at least 0.
        """
        self._total += amount - self._amounts.pop(second, 0)
        if amount:
            self._amounts[second] = amount
            self._first = min(self._first, second)

    def is_over(self, second: float, now_s: float) -> bool:
        """Whether what was spent in a second does not count any more."""
        return now_s >= second + 1 + self._span_s

    def total(self, now_s: float) -> int:
        """Return what counts now, and drop what does not."""
        if self.is_over(self._first, now_s):
            for second in [second for second in self._amounts if self.is_over(second, now_s)]:
                self._total -= self._amounts.pop(second)
            self._first = min(self._amounts, default=math.inf)
        return self._total

    def first_end_s(self) -> float:
        """Return the time at which the first of what counts ends to; infinite if nothing does."""
        return min(self._amounts, default=math.inf) + 1 + self._span_s

    def last_end_s(self) -> float:
        """Return the time at which all of it has ended to count; -infinite if nothing counts."""
        return max(self._amounts) + 1 + self._span_s if self._amounts else -math.inf

    def endings(self) -> Iterable[tuple[float, int]]:
        """Yield (time at which it ends to count, amount) of what counts, in any order."""
        for second, amount in self._amounts.items():
            yield second + 1 + self._span_s, amount
