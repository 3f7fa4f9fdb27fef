"""Tests of the step thread: death, shutdown, health, sleep."""

import asyncio
import logging
import math
import threading
import time

import pytest

from models.engine.async_engine import AsyncEngine
from models.engine.step_loop import StepLoop
from models.engine.stream import EventStream, GatherPolicy
from models.errors import DrainingError, EngineDeadError
from models.requests import GenerationEnd
from tests.fakes import FakeClock
from tests.unit.models.engine.fakes import (
    ByteText,
    EchoRunner,
    GatedRunner,
    collect,
    collect_until_error,
    eventually,
    make_engine,
    make_request,
    open_stream,
    step_until,
    text_of,
)

pytestmark = pytest.mark.anyio

LONG_TEXT = "a text of so many words that it takes a while"


def collect_all(front, num_streams, **fields):
    return [
        asyncio.ensure_future(collect_until_error(front, make_request(f"r{i}", **fields)))
        for i in range(num_streams)
    ]


async def test_a_step_that_raises_ends_every_stream_and_is_logged_once(start, caplog):
    runner = GatedRunner(fail_at=(3, ValueError("no such kernel")))
    front = start(runner, max_num_seqs=2)
    tasks = collect_all(front, 4)
    await eventually(runner.has_begun.is_set)
    with caplog.at_level(logging.ERROR):
        runner.permit(10)
        results = await asyncio.gather(*tasks)

    assert [type(error) for _, error in results] == [EngineDeadError] * 4
    assert {error.reason for _, error in results} == {"ValueError"}
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert front.num_streams == 0


async def test_a_dead_engine_fails_its_health_check_and_refuses_at_once(start):
    front = start(EchoRunner(fail_at=(1, MemoryError())))
    await collect_until_error(front, make_request())

    with pytest.raises(EngineDeadError, match="MemoryError"):
        front.check_health()
    with pytest.raises(EngineDeadError, match="MemoryError"):
        await collect(front, make_request())


async def test_a_dead_engine_can_be_shut_down(start):
    front = start(EchoRunner(fail_at=(1, ValueError())))
    await collect_until_error(front, make_request())

    await front.shutdown(drain_timeout_s=10.0)

    with pytest.raises(EngineDeadError):
        await collect(front, make_request())


async def test_draining_finishes_what_runs_and_what_waits_and_refuses_the_rest(start):
    runner = GatedRunner()
    front = start(runner, max_num_seqs=1)
    tasks = [
        asyncio.ensure_future(collect(front, make_request(f"r{i}", LONG_TEXT))) for i in range(2)
    ]
    await step_until(runner, lambda: front.num_streams == 2)

    shutdown = asyncio.ensure_future(front.shutdown(drain_timeout_s=1000.0))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await collect(front, make_request("late"))
    front.check_health()
    runner.permit(1000)
    results = await asyncio.gather(*tasks)
    await shutdown

    assert [text_of(events) for events in results] == [LONG_TEXT] * 2
    assert all(isinstance(events[-1], GenerationEnd) for events in results)


async def test_streams_that_outlast_the_drain_get_an_error_behind_their_tokens(start):
    clock = FakeClock()
    runner = GatedRunner()
    front = start(runner, clock=clock, max_num_seqs=1)
    tasks = collect_all(front, 2, prompt=LONG_TEXT)
    await step_until(runner, lambda: front.num_streams == 2)
    await step_until(runner, lambda: front.stats().num_generated_tokens >= 2)

    shutdown = asyncio.ensure_future(front.shutdown(drain_timeout_s=5.0))
    await asyncio.sleep(0)
    clock.advance(5.0)
    runner.permit(3)
    results = await asyncio.gather(*tasks)
    await shutdown

    assert [type(error) for _, error in results] == [DrainingError] * 2
    assert sorted(bool(text_of(events)) for events, _ in results) == [False, True]
    assert front.stats().kv_used == 0.0
    assert front.num_streams == 0


async def test_a_second_shutdown_brings_the_end_forward(start):
    runner = GatedRunner()
    front = start(runner)
    (task,) = collect_all(front, 1, prompt=LONG_TEXT)
    await eventually(runner.has_begun.is_set)

    first = asyncio.ensure_future(front.shutdown(drain_timeout_s=1000.0))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(front.shutdown(drain_timeout_s=0.0))
    await asyncio.sleep(0)
    runner.permit(1)
    await asyncio.gather(first, second)

    assert isinstance((await task)[1], DrainingError)


async def test_the_thread_has_ended_after_shutdown(start):
    def num_step_threads():
        return sum(thread.name == "medley-step" for thread in threading.enumerate())

    before = num_step_threads()
    front = start()
    assert num_step_threads() == before + 1

    for drain_timeout_s in (math.inf, 0.0):
        await front.shutdown(drain_timeout_s=drain_timeout_s)

    assert num_step_threads() == before
    with pytest.raises(EngineDeadError, match="was shut down"):
        front.check_health()
    with pytest.raises(DrainingError):
        await collect(front, make_request())


async def test_an_engine_that_was_never_started_can_be_shut_down():
    front = AsyncEngine(make_engine(), ByteText())
    with pytest.raises(EngineDeadError, match="was not started"):
        front.check_health()
    with pytest.raises(EngineDeadError, match="was not started"):
        await collect(front, make_request())

    await front.shutdown(drain_timeout_s=1000.0)

    with pytest.raises(DrainingError):
        await collect(front, make_request())


def is_healthy(front):
    try:
        front.check_health()
    except EngineDeadError:
        return False
    return True


async def test_an_engine_without_work_is_healthy_however_long(start):
    clock = FakeClock()
    front = start(clock=clock)
    await collect(front, make_request())
    clock.advance(1e6)

    # The thread may not have fallen asleep yet; with work it would stay unhealthy.
    await eventually(lambda: is_healthy(front))


async def test_an_engine_that_has_work_but_finishes_no_step_is_unhealthy(start):
    clock = FakeClock()
    runner = GatedRunner()
    front = start(runner, clock=clock, config={"stall_timeout_s": 60.0})
    clock.advance(1e6)
    _stream, _ = await open_stream(front, make_request())
    await eventually(runner.has_begun.is_set)

    clock.advance(60.0)
    front.check_health()
    clock.advance(1.0)
    with pytest.raises(EngineDeadError, match="61 s"):
        front.check_health()

    runner.permit(1)
    await eventually(lambda: front.stats().num_steps == 1)
    front.check_health()


async def test_stats_of_an_engine_can_be_read_from_any_thread(start):
    front = start()
    before = await asyncio.to_thread(front.stats)
    await collect(front, make_request())
    await eventually(lambda: front.stats().num_running == 0)

    assert before.num_steps == 0
    assert (await asyncio.to_thread(front.stats)).num_generated_tokens == 6


class StubEngine:
    """An engine whose work is decided by the test; says how often it was looked at."""

    def __init__(self, has_work=False, next_deadline_s=math.inf):
        self.has_work = has_work
        self.next_deadline_s = next_deadline_s
        self.num_looks = 0
        self.step_times_s = []

    @property
    def is_runnable(self):
        self.num_looks += 1
        return False

    def step(self):
        self.step_times_s.append(time.monotonic())
        if self.next_deadline_s <= self.step_times_s[-1]:
            self.next_deadline_s = math.inf
        return []

    def stats(self):
        return None


@pytest.fixture
def start_loop():
    started = []

    def start_loop(engine):
        loop = StepLoop(engine, time.monotonic)
        loop.start()
        started.append((loop, engine))
        return loop

    yield start_loop

    for loop, engine in started:
        engine.has_work = False
        loop.begin_shutdown(0.0)
        assert loop.join(10.0)


async def test_the_thread_sleeps_while_there_is_nothing_to_run(start_loop):
    engine = StubEngine()
    start_loop(engine)

    await asyncio.sleep(0.1)

    assert engine.num_looks == 1
    assert engine.step_times_s == []


async def test_the_thread_wakes_for_a_deadline_of_work_that_cannot_run(start_loop):
    deadline_s = time.monotonic() + 0.05
    engine = StubEngine(has_work=True, next_deadline_s=deadline_s)
    start_loop(engine)

    await eventually(lambda: engine.step_times_s)
    await asyncio.sleep(0.05)

    assert len(engine.step_times_s) == 1
    assert engine.step_times_s[0] >= deadline_s


async def test_a_deadline_beyond_all_time_does_not_trouble_the_thread(start_loop):
    engine = StubEngine(has_work=True, next_deadline_s=1e300)
    loop = start_loop(engine)

    await eventually(lambda: engine.num_looks == 1)
    await asyncio.sleep(0.02)

    loop.check_health(60.0)


async def test_work_that_can_never_run_is_a_stall(start_loop):
    loop = start_loop(StubEngine(has_work=True))
    await asyncio.sleep(0.05)

    loop.check_health(60.0)
    with pytest.raises(EngineDeadError):
        loop.check_health(0.01)


class FailingEngine(StubEngine):
    """An engine whose step fails once the test lets it."""

    def __init__(self):
        super().__init__(has_work=True)
        self.is_stepping = threading.Event()
        self.may_fail = threading.Event()

    @property
    def is_runnable(self):
        return True

    def step(self):
        self.is_stepping.set()
        assert self.may_fail.wait(20)
        raise ValueError("no such kernel")


def make_stream():
    return EventStream("r", asyncio.get_running_loop(), GatherPolicy())


async def test_a_request_that_was_posted_during_the_last_step_is_told_of_the_death(start_loop):
    engine = FailingEngine()
    loop = start_loop(engine)
    await eventually(engine.is_stepping.is_set)
    stream = make_stream()

    loop.post_add(None, stream)
    engine.may_fail.set()

    with pytest.raises(EngineDeadError):
        await stream.next_batch()


async def test_nothing_can_be_posted_to_a_loop_that_died_or_drains(start_loop):
    engine = FailingEngine()
    loop = start_loop(engine)
    await eventually(engine.is_stepping.is_set)

    loop.begin_shutdown(1000.0)
    with pytest.raises(DrainingError):
        loop.post_add(None, make_stream())

    engine.may_fail.set()
    assert loop.join(10.0)
    with pytest.raises(EngineDeadError):
        loop.post_add(None, make_stream())
