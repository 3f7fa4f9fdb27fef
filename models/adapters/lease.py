"""Lease: a request's hold on the weights of its adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic

from models.adapters.host_tier import HostEntry, W
from models.requests import AdapterRef


class Lease(Generic[W]):
    """A request's hold on one version of an adapter: it stays in host memory until ``release``.

    Owner: any thread, one at a time; ``release`` from any thread at any time. Also a context
    manager.
    """

    def __init__(self, entry: HostEntry[W], give_back: Callable[[HostEntry[W]], None]) -> None:
        self._entry = entry
        self._give_back = give_back
        self._lock = threading.Lock()
        self._is_released = False

    @property
    def ref(self) -> AdapterRef:
        """The adapter and the version that the request keeps to its end."""
        return self._entry.ref

    @property
    def weights(self) -> W:
        """The weights, until the lease is released."""
        if self._is_released or self._entry.weights is None:
            raise RuntimeError(f"the lease of {self.ref} is released")
        return self._entry.weights

    def release(self) -> None:
        """Give the hold back. Idempotent."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        self._give_back(self._entry)

    def __enter__(self) -> Lease[W]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
