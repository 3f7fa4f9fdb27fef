"""Many requests at once, of which many leave: every stream is exact and nothing is left behind."""

import asyncio
import random

import pytest

from models.engine.async_engine import AsyncEngine, AsyncEngineConfig
from models.engine.stream import GatherPolicy
from models.errors import DrainingError, QueueFullError
from models.requests import GenerationEnd, TokenDelta
from tests.fakes import FakeClock, FakeStepRunner
from tests.unit.models.engine.fakes import (
    EOS,
    ByteText,
    collect,
    make_engine,
    make_request,
    text_of,
)

pytestmark = pytest.mark.anyio

NUM_BLOCKS, BLOCK_SIZE_TOKENS = 28, 4
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 24}
NUM_REQUESTS = 200


def echo(prompt, output):
    return prompt[len(output)] if len(output) < len(prompt) else EOS


def random_request(rng, index):
    prompt = "shared beginning"[: rng.randint(1, 16)] + "é😀x"[: rng.randint(0, 3)]
    return make_request(
        f"r{index}",
        prompt,
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        stop=rng.choice(((), ("beg",), ("d b", "nn"))),
        cache_salt=rng.choice((None, "salt")),
    )


def expected_text(request):
    text = request.prompt.text
    ends = [text.find(stop) for stop in request.stop if stop in text]
    return text[: min(ends)] if ends else text


async def consume(front, request, num_batches):
    """Read a stream to its end, or leave it after some batches; the events if it is complete."""
    events = []
    stream = front.generate(request)
    try:
        async for batch in stream:
            events.extend(batch)
            num_batches -= 1
            if num_batches == 0:
                return None
    finally:
        await stream.aclose()
    return events


@pytest.mark.parametrize("seed", range(3))
async def test_a_crowd_of_which_many_leave_gets_exact_streams_and_leaves_nothing_behind(seed):
    rng = random.Random(seed)
    runner = FakeStepRunner(NUM_BLOCKS, BLOCK_SIZE_TOKENS, choose_token=echo, **LIMITS)
    clock = FakeClock()
    engine = make_engine(
        runner,
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        max_num_waiting=60,
        clock=clock,
        **LIMITS,
    )
    policy = GatherPolicy(min_wait_s=0.001, max_tokens=4)
    front = AsyncEngine(engine, ByteText(), AsyncEngineConfig(gather=policy), clock)
    front.start()
    requests = [random_request(rng, index) for index in range(NUM_REQUESTS)]
    tasks = []
    for request in requests:
        num_batches = rng.choice((-1, -1, 1, 2, 3))
        tasks.append(asyncio.ensure_future(consume(front, request, num_batches)))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.001)))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()

    results = await asyncio.gather(*tasks, return_exceptions=True)
    after = await collect(front, make_request("after"))
    await front.shutdown(drain_timeout_s=1000.0)

    complete = [(q, r) for q, r in zip(requests, results, strict=True) if isinstance(r, list)]
    assert len(complete) > NUM_REQUESTS // 10
    for request, events in complete:
        assert isinstance(events[-1], GenerationEnd)
        for choice in range(request.num_choices):
            assert text_of(events, choice) == expected_text(request)
        num_tokens = sum(len(e.token_ids) for e in events if isinstance(e, TokenDelta))
        assert events[-1].usage.num_completion_tokens == num_tokens
    refusals = (asyncio.CancelledError, QueueFullError)
    assert all(r is None or isinstance(r, (list, *refusals)) for r in results)
    assert text_of(after) == "hello"
    assert front.num_streams == 0
    assert not engine.has_work
    engine.check_invariants()


async def test_a_shutdown_in_the_middle_of_a_crowd_ends_every_stream():
    clock = FakeClock()
    engine = make_engine(max_num_seqs=4, clock=clock)
    front = AsyncEngine(engine, ByteText(), clock=clock)
    front.start()
    tasks = [
        asyncio.ensure_future(collect(front, make_request(f"r{i}", "some text " * 5)))
        for i in range(50)
    ]
    await asyncio.sleep(0.02)

    await front.shutdown(drain_timeout_s=0.0)
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, list | DrainingError) for result in results)
    assert any(isinstance(result, DrainingError) for result in results)
    assert front.num_streams == 0
    engine.check_invariants()
