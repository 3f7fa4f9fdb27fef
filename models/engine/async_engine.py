"""AsyncEngine: the asyncio front of an engine. Schedules nothing and touches no model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from models.adapters.lease import Lease
from models.adapters.weights import AdapterWeights
from models.engine.adapter_desk import AdapterDesk
from models.engine.engine import Engine
from models.engine.intake import PreparedRequest
from models.engine.stats import EngineStats
from models.engine.step_loop import StepLoop
from models.engine.stream import EventStream, GatherPolicy
from models.errors import DeadlineExceededError, QueueFullError
from models.requests import ChatPrompt, GenerationEvent, GenerationRequest
from models.text_front import TextFront

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEngineConfig:
    """Limits of the front.

    Attributes:
        gather: when events are handed to a consumer.
        max_num_entering: most requests between their call and their admission (being tokenised,
            or posted and not yet seen by the step thread); one more is refused.
        num_tokenizer_threads: threads that render templates and tokenise.
        stall_timeout_s: seconds without a finished step, while there is work, after which the
            engine is unhealthy. The first step may compile: leave it time.
    """

    gather: GatherPolicy = dataclasses.field(default_factory=GatherPolicy)
    max_num_entering: int = 512
    num_tokenizer_threads: int = 2
    stall_timeout_s: float = 120.0


class AsyncEngine:
    """Streams events of one engine to any number of consumers.

    One step thread runs the engine (``StepLoop``); a small pool of threads renders and
    tokenises; the rest happens on the caller's event loop. Streams of several event loops may
    be open at the same time.

    Owner: every method may be called from any event loop; ``stats`` and ``check_health`` from
    any thread.

    Lifetime: build, ``start`` once, ``shutdown``. An engine that died is not started again.
    """

    def __init__(
        self,
        engine: Engine,
        text: TextFront,
        config: AsyncEngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterDesk | None = None,
    ) -> None:
        """Wire the front; no thread runs before ``start``.

        Args:
            engine: used by the step thread alone from now on.
            text: turns prompts into tokens.
            config: limits of the front; their defaults if None.
            clock: seconds; the same one that the engine has.
            adapters: where requests get theirs; None if there are none.
        """
        self._engine = engine
        self._text = text
        self._config = config or AsyncEngineConfig()
        self._clock = clock
        self._steps = StepLoop(engine, clock)
        self._adapters = adapters or AdapterDesk(None, None, clock)
        self._adapters.attach(
            self._steps.post_steering, lambda: self._steps.stats.resident_adapters
        )
        self._places = threading.BoundedSemaphore(self._config.max_num_entering)
        self._tokenizers = ThreadPoolExecutor(
            self._config.num_tokenizer_threads, thread_name_prefix="medley-tokenize"
        )
        # What an adapter brings may take long, and holds nobody but adapters of its kind.
        self._own_tokenizers = ThreadPoolExecutor(
            self._config.num_tokenizer_threads, thread_name_prefix="medley-tokenize-own"
        )

    @property
    def num_streams(self) -> int:
        """Streams of admitted requests that have neither ended nor been left."""
        return self._steps.num_streams

    def start(self) -> None:
        """Start the step thread. Idempotent."""
        self._steps.start()

    def stats(self) -> EngineStats:
        """Return the state after the last step; costs nothing."""
        return self._steps.stats

    def check_health(self) -> None:
        """Check that the step loop runs and gets on. Without work it is healthy.

        Raises:
            EngineDeadError: it died, was not started, was shut down, or has had work for
                ``stall_timeout_s`` without finishing a step.
        """
        self._steps.check_health(self._config.stall_timeout_s)

    @property
    def text(self) -> TextFront:
        """The tokenizer's front, for whoever spells tokens."""
        return self._text

    @property
    def adapters(self) -> AdapterDesk:
        """The adapters of this engine."""
        return self._adapters

    async def generate(
        self,
        request: GenerationRequest,
        *,
        tell_text: Callable[[TextFront], None] = lambda _: None,
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        """Yield the events of a request in gathered lists (see ``GatherPolicy``).

        The first list holds the admission alone, the last one ends with a GenerationEnd.
        Leaving early (``aclose``, cancellation) aborts the request: its blocks are free before
        the next step.

        Args:
            request: what is asked.
            tell_text: told, before the first list, what spells the request's tokens.

        Raises:
            RequestError: the request cannot be served as it is, or its time is over; its adapter
                is unknown or does not fit.
            AdapterLoadFailedError: its adapter could not be loaded.
            AdapterSlotTimeoutError: its adapter found no room in time.
            InvalidSamplingParamsError: neither can its parameters.
            QueueFullError: too many requests enter or wait.
            DrainingError: the engine shuts down.
            SequenceFailedError: a choice could not go on.
            EngineDeadError: the step loop died, or never ran.
        """
        self._steps.check_open()
        self._engine.check_fields(request)
        arrival_s = self._clock()
        stream = EventStream(
            request.request_id,
            asyncio.get_running_loop(),
            self._config.gather,
            lambda: self.num_streams,
        )
        is_posted = False
        lease: Lease[AdapterWeights] | None = None
        try:
            with self._entering():
                async with _time_limit(request):
                    if request.adapter_id is not None:
                        lease = await self._adapters.lease(request.adapter_id)
                        request = dataclasses.replace(request, adapter=lease.ref)
                    weights = None if lease is None else lease.weights
                    prepared = await self._prepare(request, arrival_s, weights)
                tell_text(self._text_of(weights))
                self._steps.post_add(prepared, stream, weights)
                is_posted = True
                admission = await stream.next_batch()
            yield admission
            while not stream.is_exhausted:
                events = await stream.next_batch()
                if lease is not None:
                    self._adapters.count_tokens(lease.ref.id, events)
                yield events
        finally:
            if is_posted and not stream.is_ended:
                self._steps.post_abort(stream)
            stream.close()
            if lease is not None:
                lease.release()

    async def shutdown(self, *, drain_timeout_s: float) -> None:
        """Refuse new requests, let open ones finish for a while, end the step thread.

        Streams that are open after ``drain_timeout_s`` get a DrainingError. Idempotent; a second
        call can bring the end forward. Also works on an engine that died or was never started.
        Returns at the latest when a running step has had ``stall_timeout_s`` to finish.

        Args:
            drain_timeout_s: seconds that open streams are given; 0 ends them after this step.
        """
        self._steps.begin_shutdown(drain_timeout_s)
        patience_s = drain_timeout_s + self._config.stall_timeout_s
        if not await asyncio.to_thread(self._steps.join, patience_s):
            _logger.error("the step thread did not end within %.0f s", patience_s)
        self._tokenizers.shutdown(wait=False)
        self._own_tokenizers.shutdown(wait=False)
        await asyncio.to_thread(self._adapters.close)

    @contextlib.contextmanager
    def _entering(self) -> Iterator[None]:
        """Hold one of the places for requests that are not admitted yet."""
        if not self._places.acquire(blocking=False):
            raise QueueFullError(self._config.max_num_entering, self._config.max_num_entering)
        try:
            yield
        finally:
            self._places.release()

    async def _prepare(
        self, request: GenerationRequest, arrival_s: float, adapter: AdapterWeights | None
    ) -> PreparedRequest:
        """Tokenise and check off the event loop."""
        loop = asyncio.get_running_loop()
        has_own_text = adapter is not None and adapter.text is not None
        has_own_text |= isinstance(request.prompt, ChatPrompt) and bool(request.prompt.template)
        return await loop.run_in_executor(
            self._own_tokenizers if has_own_text else self._tokenizers,
            self._tokenize_and_prepare,
            request,
            arrival_s,
            adapter,
        )

    def _text_of(self, adapter: AdapterWeights | None) -> TextFront:
        return self._text if adapter is None or adapter.text is None else adapter.text

    def _tokenize_and_prepare(
        self, request: GenerationRequest, arrival_s: float, adapter: AdapterWeights | None
    ) -> PreparedRequest:
        prompt_token_ids = self._text_of(adapter).encode(request.prompt)
        return self._engine.prepare(request, prompt_token_ids, arrival_s, adapter)


@contextlib.asynccontextmanager
async def _time_limit(request: GenerationRequest) -> AsyncIterator[None]:
    """Hold a request's own time limit while it waits for its adapter and is tokenised."""
    try:
        async with asyncio.timeout(request.timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceededError(request.timeout_s or 0.0) from None
