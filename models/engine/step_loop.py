"""StepLoop: the thread that runs an engine, its inbox, and the way of events to their streams.

Knows no requests in the making: what is posted here has been checked and prepared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import math
import queue
import threading
from collections.abc import Callable

from models.adapters.weights import AdapterWeights
from models.engine.adapter_uses import AdapterUses
from models.engine.engine import Engine
from models.engine.intake import PreparedRequest
from models.engine.stats import EngineStats
from models.engine.stream import EventStream
from models.errors import DrainingError, EngineDeadError, ModelServiceError
from models.requests import GenerationEnd, GenerationEvent

_logger = logging.getLogger(__name__)

_Delivery = tuple[EventStream, GenerationEvent | ModelServiceError]


class _Phase(enum.Enum):
    """Where the loop is, said of the engine; it only moves down this list, and may skip."""

    NEW = "was not started"
    RUNNING = "runs"
    DRAINING = "is shutting down"
    STOPPED = "was shut down"
    DEAD = "died"


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    prepared: PreparedRequest
    stream: EventStream
    adapter: AdapterWeights | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    stream: EventStream


@dataclasses.dataclass(frozen=True, slots=True)
class _Steer:
    run: Callable[[AdapterUses], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Shutdown:
    deadline_s: float


_Command = _Add | _Abort | _Steer | _Shutdown


class StepLoop:
    """Runs an engine on a thread of its own until it is told to stop or a step fails.

    The inbox is bounded by construction: it holds at most one add and one abort per stream (and
    what operators ask for), and the front limits the streams that are not admitted yet, the
    scheduler those that are.

    The thread is a daemon: a process that ends without ``begin_shutdown`` must not hang on it.
    An orderly end goes through ``begin_shutdown`` and ``join``.

    Owner: ``post_*``, ``check_*``, ``begin_shutdown``, ``join`` and ``stats`` may be called from
    any thread; everything else belongs to the step thread.

    Invariants: events of one turn reach an event loop in one call; a stream gets nothing behind
    its last event; once the phase is STOPPED or DEAD no stream is open.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, EventStream] = {}
        self._is_draining = False
        self._drain_deadline_s = math.inf
        self._thread = threading.Thread(target=self._run, name="medley-step", daemon=True)
        # Guards _phase together with what is posted under it: nothing is posted to a loop that
        # has looked into its inbox for the last time.
        self._lock = threading.Lock()
        self._phase = _Phase.NEW
        self._death_reason = ""
        self._stats = engine.stats()
        # Written by the step thread, read by health checks: since when it has been working
        # without finishing a step.
        self._is_working = False
        self._progress_at_s = clock()

    @property
    def stats(self) -> EngineStats:
        """The snapshot that was taken after the last turn."""
        return self._stats

    @property
    def num_streams(self) -> int:
        """Streams of admitted requests that have not ended."""
        return len(self._streams)

    def start(self) -> None:
        """Start the thread. A loop starts once."""
        with self._lock:
            if self._phase is not _Phase.NEW:
                return
            self._phase = _Phase.RUNNING
        self._thread.start()

    def check_open(self) -> None:
        """Check whether new requests are taken.

        Raises:
            DrainingError: the loop is shutting down or was shut down.
            EngineDeadError: it died, or was not started.
        """
        phase = self._phase
        if phase in (_Phase.DRAINING, _Phase.STOPPED):
            raise DrainingError
        if phase is not _Phase.RUNNING:
            raise EngineDeadError(self._reason(phase))

    def check_health(self, stall_timeout_s: float) -> None:
        """Check that the loop runs and gets on; having no work is healthy, so is draining.

        Args:
            stall_timeout_s: longest time without a finished step while there is work.

        Raises:
            EngineDeadError: it died, was not started, was shut down, or stalls.
        """
        phase = self._phase
        if phase not in (_Phase.RUNNING, _Phase.DRAINING):
            raise EngineDeadError(self._reason(phase))
        # In this order: who has just begun to work has refreshed its progress before.
        if not self._is_working:
            return
        stalled_s = self._clock() - self._progress_at_s
        if stalled_s > stall_timeout_s:
            raise EngineDeadError(f"no step was finished in {stalled_s:.0f} s")

    def post_add(
        self,
        prepared: PreparedRequest,
        stream: EventStream,
        adapter: AdapterWeights | None = None,
    ) -> None:
        """Hand over a request; its admission or an error comes through the stream.

        Args:
            prepared: what it is.
            stream: where its events go.
            adapter: weights of its adapter.

        Raises:
            DrainingError, EngineDeadError: as ``check_open``; the stream gets nothing.
        """
        with self._lock:
            self.check_open()
            self._inbox.put(_Add(prepared, stream, adapter))

    def post_abort(self, stream: EventStream) -> None:
        """Say that a stream's consumer has left. Idempotent, and harmless if it has ended."""
        self._inbox.put(_Abort(stream))

    def post_steering(self, run: Callable[[AdapterUses], None]) -> None:
        """Have something quick done to the adapters, before the next step; never, if it ended.

        Args:
            run: must not raise.
        """
        self._inbox.put(_Steer(run))

    def begin_shutdown(self, drain_timeout_s: float) -> None:
        """Take no new requests, and end the thread once all are done or the time is over.

        A second call can bring the end forward, never put it off.
        """
        with self._lock:
            if self._phase is _Phase.NEW:
                self._phase = _Phase.STOPPED
            if self._phase not in (_Phase.RUNNING, _Phase.DRAINING):
                return
            self._phase = _Phase.DRAINING
            self._inbox.put(_Shutdown(self._clock() + drain_timeout_s))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False if it still runs (a step that never returns)."""
        if self._thread.ident is not None:
            self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _reason(self, phase: _Phase) -> str:
        return self._death_reason or f"it {phase.value}"

    def _run(self) -> None:
        _logger.info("step thread started")
        try:
            while not self._is_over():
                self._turn()
        except BaseException as error:  # the thread's last line of defence: tell every stream
            _logger.exception("step thread died")
            self._death_reason = type(error).__name__
            self._end(_Phase.DEAD, EngineDeadError(self._death_reason))
        else:
            self._end(_Phase.STOPPED, DrainingError())
            _logger.info("step thread stopped")

    def _is_over(self) -> bool:
        """Whether it is time to stop: told to, and done or out of time."""
        if not self._is_draining:
            return False
        return not self._engine.has_work or self._clock() >= self._drain_deadline_s

    def _turn(self) -> None:
        """Take what was posted and run a step if there is work."""
        admissions: list[_Delivery] = []
        for command in self._receive():
            self._apply(command, admissions)
        # Before the step, which may take long: headers can go out meanwhile.
        self._deliver(admissions)
        if self._engine.has_work and not self._is_over():
            events = self._engine.step()
            self._progress_at_s = self._clock()
            self._deliver([(self._streams[request_id], event) for request_id, event in events])
        self._stats = self._engine.stats()

    def _receive(self) -> list[_Command]:
        """Return what was posted; sleeps first while there is nothing to run."""
        commands: list[_Command] = []
        try:
            if self._engine.is_runnable:
                commands.append(self._inbox.get_nowait())
            else:
                commands.append(self._sleep())
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _sleep(self) -> _Command:
        """Wait for a command, or for a deadline (which raises queue.Empty)."""
        self._is_working = self._engine.has_work
        try:
            return self._inbox.get(timeout=self._time_to_deadline_s())
        finally:
            if not self._is_working:
                self._progress_at_s = self._clock()
                self._is_working = True

    def _time_to_deadline_s(self) -> float | None:
        deadline_s = min(self._engine.next_deadline_s, self._drain_deadline_s)
        if math.isinf(deadline_s):
            return None
        return min(max(deadline_s - self._clock(), 0.0), threading.TIMEOUT_MAX)

    def _apply(self, command: _Command, admissions: list[_Delivery]) -> None:
        match command:
            case _Add(_, stream, _):
                admissions.append((stream, self._admit(command)))
            case _Steer(run):
                if self._engine.adapters is not None:
                    run(self._engine.adapters)
            case _Abort(stream):
                self._abort(stream)
            case _Shutdown(deadline_s):
                self._is_draining = True
                self._drain_deadline_s = min(self._drain_deadline_s, deadline_s)

    def _admit(self, command: _Add) -> GenerationEvent | ModelServiceError:
        try:
            admission = self._engine.admit(command.prepared, command.adapter)
        except ModelServiceError as error:
            return error
        self._streams[command.stream.request_id] = command.stream
        return admission

    def _abort(self, stream: EventStream) -> None:
        if self._forget(stream):
            self._engine.abort(stream.request_id)

    def _forget(self, stream: EventStream) -> bool:
        """Take a stream out; False if it is not in: another one may have the id."""
        if self._streams.get(stream.request_id) is not stream:
            return False
        del self._streams[stream.request_id]
        return True

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        """Hand events to their streams: one cross-thread call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for delivery in deliveries:
            stream, event = delivery
            by_loop.setdefault(stream.loop, []).append(delivery)
            if isinstance(event, GenerationEnd | ModelServiceError):
                self._forget(stream)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_push_all, batch)
            except RuntimeError:  # the loop is closed: its consumers are gone
                for stream, _ in batch:
                    self._abort(stream)

    def _end(self, phase: _Phase, error: ModelServiceError) -> None:
        """Enter the last phase and give its error to whoever still waits."""
        with self._lock:
            self._phase = phase
        waiting = dict.fromkeys(self._streams.values())
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            if isinstance(command, _Add):
                waiting[command.stream] = None
        if phase is _Phase.STOPPED:
            for stream in list(self._streams.values()):
                self._engine.abort(stream.request_id)
            self._stats = self._engine.stats()
        self._deliver([(stream, error) for stream in waiting])
        self._streams.clear()


def _push_all(deliveries: list[_Delivery]) -> None:
    """Push events into their streams; runs on the event loop that owns these."""
    for stream, event in deliveries:
        stream.push(event)
