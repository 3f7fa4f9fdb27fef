"""FailureMemory: failures that are told again for a while instead of being met again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

from models.errors import ModelServiceError

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    error: ModelServiceError
    until_s: float


class FailureMemory(Generic[K]):
    """The last failures by key, each for a time; the oldest go when there are too many.

    Owner: whoever holds the lock of its user.
    """

    def __init__(self, ttl_s: float, max_num_failures: int) -> None:
        """Start empty.

        Args:
            ttl_s: seconds for which a failure is remembered.
            max_num_failures: most of them.
        """
        self._ttl_s = ttl_s
        self._max_num_failures = max_num_failures
        self._failures: dict[K, _Failure] = {}

    def __len__(self) -> int:
        """Return how many are remembered, some perhaps for too long already."""
        return len(self._failures)

    def remember(self, key: K, error: ModelServiceError, now_s: float) -> None:
        """Take note of a failure."""
        self._failures.pop(key, None)
        self._failures[key] = _Failure(copy.copy(error), now_s + self._ttl_s)
        if len(self._failures) > self._max_num_failures:
            del self._failures[next(iter(self._failures))]

    def recall(self, key: K, now_s: float) -> ModelServiceError | None:
        """Return a copy of the failure, for one caller to raise; None if there is none any more."""
        failure = self._failures.get(key)
        if failure is None:
            return None
        if now_s >= failure.until_s:
            del self._failures[key]
            return None
        return copy.copy(failure.error)

    def forget(self, key: K) -> None:
        """Forget a failure, if there is one."""
        self._failures.pop(key, None)
