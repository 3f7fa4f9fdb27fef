"""Exports what adapters were used for as metrics of Ray, now and then. Counts nothing itself.

Ray adds the prefix ``ray_`` to every name, ``_total`` to those of counters, and tags that tell
replicas apart. Every metric has the tag ``model``; counters have the tag ``adapter`` too, whose
values ``models.adapters.meter`` bounds.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from ray.util.metrics import Counter, Gauge

from models.adapters.meter import AdapterTotals

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")

PERIOD_S = 5.0

# Field of AdapterTotals -> name and description of its counter.
_COUNTERS = {
    "num_requests": ("medley_adapter_requests", "Requests that got their adapter."),
    "num_generated_tokens": ("medley_adapter_generated_tokens", "Tokens of their answers."),
    "num_hits": ("medley_adapter_hits", "Requests that found their adapter in host memory."),
    "num_loads": ("medley_adapter_loads", "Loads of adapters into host memory."),
    "load_s": ("medley_adapter_load_seconds", "Seconds that these loads took."),
    "num_failed_loads": ("medley_adapter_failed_loads", "Loads of adapters that failed."),
    "num_evictions": ("medley_adapter_evictions", "Adapters that made room in host memory."),
}
_HOST_BYTES = ("medley_adapter_host_bytes", "Bytes of adapters in host memory.")
_NUM_RESIDENT = ("medley_adapters_resident", "Adapters that have a slot on the device.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReading:
    """What is exported at one time.

    Attributes:
        totals: by adapter id.
        host_bytes: of all adapters in host memory.
        num_resident: adapters that have a device slot.
    """

    totals: Mapping[str, AdapterTotals]
    host_bytes: int
    num_resident: int


class Metrics(Protocol):
    """Where values go; Ray's, but for tests."""

    def add(self, name: str, description: str, value: float, tags: Mapping[str, str]) -> None:
        """Add to a counter."""
        ...

    def set(self, name: str, description: str, value: float, tags: Mapping[str, str]) -> None:
        """Set a gauge."""
        ...


class RayMetrics:
    """Metrics of this Ray worker, each made when it is first used. Owner: one thread."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def add(self, name: str, description: str, value: float, tags: Mapping[str, str]) -> None:
        """Add to a counter."""
        if name not in self._counters:
            self._counters[name] = Counter(name, description, tag_keys=tuple(tags))
        self._counters[name].inc(value, tags=dict(tags))

    def set(self, name: str, description: str, value: float, tags: Mapping[str, str]) -> None:
        """Set a gauge."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description, tag_keys=tuple(tags))
        self._gauges[name].set(value, tags=dict(tags))


class AdapterMetrics:
    """A thread that exports every PERIOD_S seconds what has changed.

    Owner: ``start`` and ``stop`` any thread, once each; ``update`` the thread, or a test.
    """

    def __init__(
        self,
        model_id: str,
        read: Callable[[], AdapterReading],
        metrics: Metrics | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """Export nothing yet.

        Args:
            model_id: value of the tag ``model``.
            read: tells what there is now; any thread may call it.
            metrics: where values go; None takes Ray's.
            period_s: seconds between two exports.
        """
        self._model_id = model_id
        self._read = read
        self._metrics = metrics or RayMetrics()
        self._period_s = period_s
        self._exported: dict[str, AdapterTotals] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="medley-adapter-metrics", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a last export. Idempotent; also if it was never started."""
        self._is_stopped.set()

    def update(self) -> None:
        """Export what has changed since the last time."""
        reading = self._read()
        for adapter_id, totals in reading.totals.items():
            before = self._exported.get(adapter_id, AdapterTotals())
            if totals == before:
                continue
            tags = {"model": self._model_id, "adapter": adapter_id}
            for field, (name, description) in _COUNTERS.items():
                added = getattr(totals, field) - getattr(before, field)
                if added > 0:
                    self._metrics.add(name, description, added, tags)
            self._exported[adapter_id] = totals
        tags = {"model": self._model_id}
        self._metrics.set(*_HOST_BYTES, reading.host_bytes, tags)
        self._metrics.set(*_NUM_RESIDENT, reading.num_resident, tags)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_stopped.wait(self._period_s)
            try:
                self.update()
            except Exception as error:  # noqa: BLE001 - metrics never end a replica
                _logger.warning("metrics of adapters: %s", type(error).__name__)
