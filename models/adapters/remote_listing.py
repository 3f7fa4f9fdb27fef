"""RemoteListing: which adapters an origin lists, asked now and then in a thread."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from models.adapters.origin import AdapterOrigin
from models.errors import DrainingError

_logger = logging.getLogger(__name__)

_MAX_NUM_LISTED = 10_000
# A list that takes long is made again after so many times as long.
_REST = 10
# What has been found of a long first list is told in pieces.
_PIECE = 64


class RemoteListing:
    """The ids that an origin has, some seconds old; bounded.

    Owner: any thread; ``read`` waits for a moment.
    Lifetime: the thread starts with the first ``read`` and ends with ``close``.
    """

    def __init__(
        self,
        origin: AdapterOrigin,
        clock: Callable[[], float],
        check_open: Callable[[], None],
        *,
        check_interval_s: float,
        max_wait_s: float,
    ) -> None:
        """Ask nobody yet.

        Args:
            origin: what is asked.
            clock: seconds.
            check_open: called between two questions; what it raises ends the work.
            check_interval_s: seconds in which the origin is asked once.
            max_wait_s: most seconds that ``read`` waits for an answer.
        """
        self._origin = origin
        self._clock = clock
        self._check_open = check_open
        self._check_interval_s = check_interval_s
        self._max_wait_s = max_wait_s
        self._lock = threading.Lock()
        self._ids: tuple[str, ...] = ()
        self._is_complete = False
        self._again_at_s = -math.inf
        self._asking: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="medley-adapter-list")

    def read(self) -> tuple[str, ...]:
        """Return the ids that the origin listed last, in its order."""
        with self._lock:
            is_idle = self._asking is None or self._asking.done()
            is_due = is_idle and self._clock() >= self._again_at_s
            if is_due:
                self._check_open()
                self._asking = self._thread.submit(self._ask)
            asking = self._asking
            is_waited_for = is_due or not self._is_complete
        if asking is not None and is_waited_for and not asking.cancelled():
            wait([asking], self._max_wait_s)
        return self._ids

    def close(self, max_wait_s: float) -> None:
        """End the thread, which an origin may keep for a while. Idempotent."""
        with self._lock:
            self._again_at_s = math.inf
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._asking is not None and not self._asking.cancelled():
            wait([self._asking], max_wait_s)

    def _ask(self) -> None:
        started_s = self._clock()
        found: list[str] = []
        try:
            listed = self._origin.list_ids(self._check_open)
            for adapter_id in itertools.islice(listed, _MAX_NUM_LISTED):
                found.append(adapter_id)
                if not self._is_complete and len(found) % _PIECE == 0:
                    self._ids = tuple(found)
            self._ids = tuple(found)
            self._is_complete = True
        except DrainingError:
            return
        except Exception as error:  # noqa: BLE001 - every library has its own
            _logger.warning("adapters cannot be listed now (%s)", type(error).__name__)
        finally:
            now_s = self._clock()
            rest_s = max(self._check_interval_s, _REST * (now_s - started_s))
            with self._lock:
                self._again_at_s = max(self._again_at_s, now_s + rest_s)
