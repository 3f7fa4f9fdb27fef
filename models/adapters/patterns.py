"""Regular expressions of an adapter's configuration, under a limit of time. No torch.

Nobody has vetted them, and one such as ``(a+)+b`` keeps Python's own engine busy for ages, with the
interpreter locked. So a pattern has to be one for Python's engine, which gives it its meaning, and
is run by ``regex``, which stops in time and lets other threads run meanwhile.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable

import regex

from models.adapters.faults import AdapterFaultError, shown

_MAX_PATTERN_CHARACTERS = 10_000
# A match takes microseconds, and there are hundreds: getting the interpreter's lock back after
# each could cost milliseconds beside a busy thread. So only one that takes longer gives it up.
_QUICK_MATCH_S = 0.002


class PatternMatcher:
    """Matches the patterns of one adapter, as long as its time lasts."""

    def __init__(self, budget_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the time.

        Args:
            budget_s: for all patterns of an adapter together.
            clock: gives seconds.
        """
        self._clock = clock
        self._deadline_s = clock() + budget_s
        self._compiled = functools.cache(_compile)

    def fullmatch(self, pattern: str, text: str) -> regex.Match[str] | None:
        """Match the whole text, as ``re.fullmatch`` does.

        Raises:
            AdapterFaultError: the pattern is none, or the time is over.
        """
        return self._run(self._compiled(pattern).fullmatch, pattern, text)

    def match(self, pattern: str, text: str) -> regex.Match[str] | None:
        """Match the beginning of the text, as ``re.match`` does.

        Raises:
            AdapterFaultError: the pattern is none, or the time is over.
        """
        return self._run(self._compiled(pattern).match, pattern, text)

    def _run(
        self, method: Callable[..., regex.Match[str] | None], pattern: str, text: str
    ) -> regex.Match[str] | None:
        try:
            if self._left_s() > 0:
                return method(text, timeout=_QUICK_MATCH_S, concurrent=False)
        except TimeoutError:
            pass
        try:
            if (left_s := self._left_s()) > 0:
                return method(text, timeout=left_s, concurrent=True)
        except TimeoutError:
            pass
        raise AdapterFaultError(
            f"its patterns take too long to match; the last was '{shown(pattern)}'"
        )

    def _left_s(self) -> float:
        return self._deadline_s - self._clock()


def _compile(pattern: str) -> regex.Pattern[str]:
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise AdapterFaultError(
            f"a pattern has {len(pattern)} characters; the limit is {_MAX_PATTERN_CHARACTERS}"
        )
    try:
        with warnings.catch_warnings():
            # Either engine warns of what it may read otherwise in its future.
            warnings.simplefilter("ignore")
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise AdapterFaultError(f"'{shown(pattern)}' is no regular expression") from error
