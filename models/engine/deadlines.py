"""Deadlines: which open requests have run out of time. Ends none itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from models.engine.open_request import OpenRequest
from models.errors import AdapterSlotTimeoutError, DeadlineExceededError, ModelServiceError


class Deadlines:
    """A request's own time limit, and how long it may wait for a slot for its adapter.

    Owner: step thread.
    Invariants: no open request's deadline is before ``next_s``; a request that has ended may leave
    it too early.
    """

    def __init__(self, max_slot_wait_s: float) -> None:
        """Watch nobody yet.

        Args:
            max_slot_wait_s: most seconds that a request waits for a slot.
        """
        self._max_slot_wait_s = max_slot_wait_s
        self._next_s = math.inf

    @property
    def next_s(self) -> float:
        """Time by which ``overdue`` must be asked; infinity if there is no deadline."""
        return self._next_s

    def add(self, opened: OpenRequest) -> None:
        """Watch a request that was admitted."""
        if opened.prepared.request.adapter is not None:
            opened.slot_deadline_s = opened.prepared.arrival_s + self._max_slot_wait_s
        self._next_s = min(self._next_s, _deadline_s(opened))

    def forget_all(self) -> None:
        """Take note that no request is open."""
        self._next_s = math.inf

    def overdue(
        self, requests: Iterable[OpenRequest], now_s: float
    ) -> Iterator[tuple[OpenRequest, ModelServiceError]]:
        """Yield the requests whose time is over, with the error that ends each.

        Args:
            requests: all open ones; the caller may end those that were yielded.
            now_s: the engine clock's time.
        """
        if now_s < self._next_s:
            return
        self._next_s = math.inf
        for opened in list(requests):
            error = self._check(opened, now_s)
            if error is not None:
                yield opened, error
            else:
                self._next_s = min(self._next_s, _deadline_s(opened))

    def _check(self, opened: OpenRequest, now_s: float) -> ModelServiceError | None:
        request = opened.prepared.request
        if opened.prepared.deadline_s <= now_s:
            return DeadlineExceededError(request.timeout_s or 0.0)
        if opened.slot_deadline_s > now_s or request.adapter is None:
            return None
        if opened.is_waiting_for_slot:
            return AdapterSlotTimeoutError(request.adapter.id, self._max_slot_wait_s)
        # One that has run waits for no slot that others do not have to wait for as well; one that
        # waits for other reasons (blocks, its turn) is looked at again after as long.
        opened.slot_deadline_s = math.inf if opened.has_run else now_s + self._max_slot_wait_s
        return None


def _deadline_s(opened: OpenRequest) -> float:
    return min(opened.prepared.deadline_s, opened.slot_deadline_s)
