"""The open generations of one ingress replica, and how they end when it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from deployments.calls import GenerationCall
from deployments.generation import GenerateHandle, Generation
from models.errors import DrainingError

# After the grace time: long enough to write the last event of every stream.
_LAST_EVENT_S = 1.0


class OpenRequests:
    """Holds generations until told to stop, and knows which are open.

    Owner: the ingress's event loop.
    """

    def __init__(self) -> None:
        self._open: set[Generation] = set()
        self._is_draining = False
        self._all_closed = asyncio.Event()

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            DrainingError: this replica stops.
        """
        if self._is_draining:
            raise DrainingError

    @contextlib.contextmanager
    def open(self, handle: GenerateHandle, calls: Sequence[GenerationCall]) -> Iterator[Generation]:
        """Hold a generation and cancel it at the end, however that comes.

        Args:
            handle: the model's.
            calls: one per prompt.

        Raises:
            DrainingError: this replica stops.
        """
        self.check_open()
        generation = Generation(handle, calls)
        self._open.add(generation)
        try:
            yield generation
        finally:
            generation.cancel()
            self._open.discard(generation)
            if not self._open:
                self._all_closed.set()

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, wait for the open ones, then end those that are left.

        Args:
            grace_s: seconds that they get to finish.

        Returns:
            How many were ended by a DrainingError.
        """
        self._is_draining = True
        await self._wait_until_closed(grace_s)
        left = list(self._open)
        for generation in left:
            generation.end(DrainingError())
        await self._wait_until_closed(_LAST_EVENT_S)
        return len(left)

    async def _wait_until_closed(self, timeout_s: float) -> None:
        if not self._open:
            return
        self._all_closed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed.wait(), timeout_s)
