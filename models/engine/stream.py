"""EventStream: one request's events, handed from the step thread to its consumer in gathered lists.

Knows nothing of engines, steps or threads: everything here runs on the consumer's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from models.requests import Admission, GenerationEnd, GenerationEvent, TokenDelta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatherPolicy:
    """When gathered events are handed over.

    The admission, what is told of the prompt and the first token go out at once, and so does
    whatever ends a choice or the request. In between a list is due when the wait has passed since
    the last one or when it holds ``max_tokens`` tokens. The wait counts from the last list, not
    from the first token of this one: steps that are slower are never delayed.

    A list costs the same however many tokens it holds, and on the way to an HTTP client it costs
    a process hop or two. So the wait grows with the number of open streams, to keep all of them
    together at ``max_lists_per_s``.

    Attributes:
        min_wait_s: seconds between two lists while few streams are open; 0 hands over every event
            at once, however many are.
        max_tokens: tokens, of all choices together, that make a list due.
        max_lists_per_s: lists a second of all streams together, apart from those that may not
            wait.
    """

    min_wait_s: float = 0.02
    max_tokens: int = 8
    max_lists_per_s: float = 200.0

    def wait_s(self, num_streams: int) -> float:
        """Return the seconds between two lists of one of ``num_streams`` streams."""
        if self.min_wait_s == 0:
            return 0.0
        return max(self.min_wait_s, num_streams / self.max_lists_per_s)


class EventStream:
    """Buffer between the step thread and the consumer of one request.

    The buffer holds at most one delta per token that was drawn and not yet taken, and one log
    probability per prompt token, so it is bounded by the prompt and ``max_tokens`` times the
    number of choices, however slow the consumer is.

    Owner: the consumer's event loop; the step thread reaches ``push`` through
    ``loop.call_soon_threadsafe`` and reads nothing but ``request_id`` and ``loop``.

    Invariants: after a GenerationEnd or an error nothing is pushed; an error is raised once all
    events before it have been taken; a timer runs only while a list is gathered that is not due.
    """

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        policy: GatherPolicy,
        count_streams: Callable[[], int] = lambda: 1,
    ) -> None:
        """Make an empty stream.

        Args:
            request_id: whose events it gets.
            loop: the consumer's event loop.
            policy: when a list is due.
            count_streams: how many streams are open now.
        """
        self.request_id = request_id
        self.loop = loop
        self._policy = policy
        self._count_streams = count_streams
        self._events: list[GenerationEvent] = []
        self._error: Exception | None = None
        self._is_ended = False
        self._num_gathered_tokens = 0
        self._has_sent_token = False
        self._is_due = False
        self._last_taken_at_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the last event or an error has been pushed."""
        return self._is_ended

    @property
    def is_exhausted(self) -> bool:
        """Whether the stream has ended and everything was taken."""
        return self._is_ended and not self._events and self._error is None

    def push(self, event: GenerationEvent | Exception) -> None:
        """Add one event, or the error that ends the stream."""
        if self._is_ended:
            return
        if isinstance(event, Exception):
            self._error = event
            self._is_ended = True
            self._make_due()
            return
        self._events.append(event)
        if not isinstance(event, TokenDelta):
            self._is_ended = isinstance(event, GenerationEnd)
            self._make_due()
            return
        self._num_gathered_tokens += len(event.token_ids)
        if self._is_due:
            return
        if (
            event.finish_reason is not None
            or not self._has_sent_token
            or self._num_gathered_tokens >= self._policy.max_tokens
        ):
            self._make_due()
        else:
            self._make_due_in_time()

    async def next_batch(self) -> list[GenerationEvent]:
        """Wait until a list is due and take it, gathered by ``merge_events``.

        The admission comes alone. May not be called once the stream is exhausted.

        Raises:
            ModelServiceError, SamplingError: whatever ended the stream, after its last event.
        """
        while not self._is_due:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events and self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._take()

    def close(self) -> None:
        """Forget what was not taken; the consumer has left."""
        self._cancel_timer()
        self._is_ended = True
        self._error = None
        self._events = []

    def _take(self) -> list[GenerationEvent]:
        if isinstance(self._events[0], Admission):
            # The admission travels alone, also to a consumer that comes late.
            admission = self._events.pop(0)
            self._is_due = bool(self._events) or self._error is not None
            return [admission]
        taken, self._events = merge_events(self._events), []
        self._has_sent_token |= self._num_gathered_tokens > 0
        self._num_gathered_tokens = 0
        self._is_due = self._error is not None
        self._last_taken_at_s = self.loop.time()
        return taken

    def _make_due_in_time(self) -> None:
        if self._timer is not None:
            return
        due_at_s = self._last_taken_at_s + self._policy.wait_s(self._count_streams())
        if due_at_s <= self.loop.time():
            self._make_due()
        else:
            self._timer = self.loop.call_at(due_at_s, self._make_due)

    def _make_due(self) -> None:
        self._cancel_timer()
        self._is_due = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def merge_events(events: Sequence[GenerationEvent]) -> list[GenerationEvent]:
    """Return the events with the deltas of each choice joined.

    A run of deltas (between two events of another kind) becomes one delta per choice, in the
    order in which the choices first appear in it. The order within a choice is kept.
    """
    merged: list[GenerationEvent] = []
    run: dict[int, list[TokenDelta]] = {}
    for event in events:
        if isinstance(event, TokenDelta):
            run.setdefault(event.choice, []).append(event)
            continue
        merged.extend(_join(deltas) for deltas in run.values())
        run.clear()
        merged.append(event)
    merged.extend(_join(deltas) for deltas in run.values())
    return merged


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return TokenDelta(
        last.choice,
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        last.finish_reason,
        last.stop_reason,
    )
