"""Tests of the buffer between step thread and consumer."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engine.stream import EventStream, GatherPolicy, merge_events
from models.errors import DrainingError
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    TokenDelta,
    TokenLogprob,
    Usage,
)

pytestmark = pytest.mark.anyio

ADMISSION = Admission(1, None, "exact", 3, 0)
END = GenerationEnd(Usage(3, 2, 0))
NEVER_S = 1e6


def delta(token_id, choice=0, finish_reason=None):
    return TokenDelta(choice, (token_id,), chr(token_id), (), finish_reason)


class ManualLoop:
    """The part of an event loop that a stream uses, with a time of its own."""

    def __init__(self):
        self._now_s = 0.0
        self._timers = []

    def time(self):
        return self._now_s

    def create_future(self):
        return asyncio.get_running_loop().create_future()

    def call_at(self, when_s, callback):
        handle = asyncio.TimerHandle(when_s, callback, (), asyncio.get_running_loop())
        self._timers.append(handle)
        return handle

    @property
    def num_timers(self):
        return sum(not handle.cancelled() for handle in self._timers)

    def advance(self, duration_s):
        self._now_s += duration_s
        due = [handle for handle in self._timers if handle.when() <= self._now_s]
        self._timers = [handle for handle in self._timers if handle not in due]
        for handle in due:
            if not handle.cancelled():
                handle._run()


def open_stream(min_wait_s=NEVER_S, max_tokens=8, loop=None):
    policy = GatherPolicy(min_wait_s=min_wait_s, max_tokens=max_tokens)
    return EventStream("r", loop or asyncio.get_running_loop(), policy)


async def started_stream(**fields):
    """A stream whose first token has been taken."""
    stream = open_stream(**fields)
    stream.push(delta(1))
    assert await stream.next_batch() == [delta(1)]
    return stream


async def is_due(stream):
    """Whether a list can be taken without anything else happening."""
    task = asyncio.ensure_future(stream.next_batch())
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return True
    task.cancel()
    return False


async def test_the_admission_is_handed_over_alone_and_at_once():
    stream = open_stream()
    stream.push(ADMISSION)
    stream.push(delta(1))

    assert await stream.next_batch() == [ADMISSION]
    assert await stream.next_batch() == [delta(1)]


async def test_the_first_token_is_due_at_once():
    stream = open_stream()
    stream.push(delta(1))

    assert await is_due(stream)


async def test_later_tokens_are_not_due_before_the_eighth():
    stream = await started_stream()
    for token_id in range(2, 9):
        stream.push(delta(token_id))
    assert not await is_due(stream)

    stream.push(delta(9))
    (merged,) = await stream.next_batch()

    assert merged.token_ids == tuple(range(2, 10))


async def test_tokens_of_all_choices_count_for_the_limit():
    stream = await started_stream(max_tokens=4)
    for choice in range(4):
        stream.push(delta(5, choice))

    assert [event.choice for event in await stream.next_batch()] == [0, 1, 2, 3]


async def test_a_finish_is_due_at_once():
    stream = await started_stream()
    stream.push(delta(2))
    stream.push(delta(3, finish_reason=FinishReason.STOP))

    (merged,) = await stream.next_batch()

    assert merged.token_ids == (2, 3)
    assert merged.finish_reason is FinishReason.STOP


async def test_the_end_comes_with_what_was_gathered():
    stream = await started_stream()
    stream.push(delta(2, finish_reason=FinishReason.STOP))
    stream.push(END)

    assert (await stream.next_batch())[-1] == END
    assert stream.is_exhausted


async def test_the_wait_grows_with_the_number_of_open_streams():
    loop = ManualLoop()
    policy = GatherPolicy(min_wait_s=0.02, max_lists_per_s=100.0)
    stream = EventStream("r", loop, policy, lambda: 16)
    stream.push(delta(1))
    await stream.next_batch()
    stream.push(delta(2))

    loop.advance(0.15)
    assert not await is_due(stream)
    loop.advance(0.02)
    assert await is_due(stream)


async def test_without_a_wait_no_number_of_streams_makes_one():
    assert GatherPolicy(min_wait_s=0.0).wait_s(1000) == 0.0


async def test_a_token_is_due_when_the_wait_is_over():
    loop = ManualLoop()
    stream = await started_stream(loop=loop, min_wait_s=0.02)
    stream.push(delta(2))

    loop.advance(0.01)
    assert not await is_due(stream)
    loop.advance(0.01)
    assert await is_due(stream)


async def test_the_wait_counts_from_the_last_list_so_slow_steps_are_not_delayed():
    loop = ManualLoop()
    stream = await started_stream(loop=loop, min_wait_s=0.02)
    for token_id in range(2, 5):
        loop.advance(0.02)
        stream.push(delta(token_id))
        assert await is_due(stream)

    stream.push(delta(5))
    assert not await is_due(stream)


async def test_a_list_that_was_taken_early_leaves_no_timer_behind():
    loop = ManualLoop()
    stream = await started_stream(loop=loop, min_wait_s=0.02, max_tokens=2)
    stream.push(delta(2))
    stream.push(delta(3))
    await stream.next_batch()

    loop.advance(0.02)

    assert not await is_due(stream)


async def test_a_closed_stream_leaves_no_timer_behind():
    loop = ManualLoop()
    stream = await started_stream(loop=loop, min_wait_s=0.02)
    stream.push(delta(2))

    stream.close()

    assert loop.num_timers == 0


async def test_the_real_loop_makes_a_list_due():
    stream = await started_stream(min_wait_s=0.01)
    stream.push(delta(2))

    assert await asyncio.wait_for(stream.next_batch(), 10) == [delta(2)]


async def test_an_error_is_raised_behind_all_events():
    stream = await started_stream()
    stream.push(delta(2))
    stream.push(DrainingError())

    assert await stream.next_batch() == [delta(2)]
    with pytest.raises(DrainingError):
        await stream.next_batch()
    assert stream.is_exhausted


async def test_nothing_is_taken_in_behind_the_end():
    stream = open_stream()
    stream.push(END)
    stream.push(delta(2))
    stream.push(DrainingError())

    assert await stream.next_batch() == [END]
    assert stream.is_exhausted


async def test_a_cancelled_wait_loses_no_event():
    stream = await started_stream()
    assert not await is_due(stream)

    stream.push(delta(2))
    stream.push(END)

    assert await stream.next_batch() == [delta(2), END]


def test_merging_joins_ids_texts_and_logprobs_of_each_choice():
    first = TokenDelta(0, (1, 2), "ab", (TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)))
    other = TokenDelta(1, (9,), "z", (TokenLogprob(9, -9.0),), FinishReason.LENGTH)
    last = TokenDelta(0, (3,), "c", (TokenLogprob(3, -3.0),), FinishReason.STOP, "x")

    merged = merge_events([ADMISSION, first, other, last, END])

    assert merged == [
        ADMISSION,
        TokenDelta(0, (1, 2, 3), "abc", (*first.logprobs, *last.logprobs), FinishReason.STOP, "x"),
        other,
        END,
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(65, 90)), max_size=30))
def test_merging_keeps_every_token_of_every_choice_in_order(tokens):
    merged = merge_events([delta(token_id, choice) for choice, token_id in tokens])

    for choice in range(3):
        expected = [token_id for owner, token_id in tokens if owner == choice]
        got = [event for event in merged if event.choice == choice]
        assert len(got) == bool(expected)
        assert [t for event in got for t in event.token_ids] == expected
