"""Tests of the asyncio front: streams, refusals, leaving consumers."""

import asyncio
import contextlib
import math
import threading

import pytest

from models.engine.stream import GatherPolicy
from models.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SequenceFailedError,
)
from models.requests import Admission, GenerationEnd, TokenDelta
from sampling.errors import InvalidSamplingParamsError
from tests.fakes import FakeClock
from tests.unit.models.engine.fakes import (
    ByteText,
    EchoRunner,
    GatedRunner,
    GatedText,
    SeedRunner,
    collect,
    collect_until_error,
    eventually,
    finish_of,
    make_request,
    open_stream,
    step_until,
    text_of,
    tokens_of,
)

pytestmark = pytest.mark.anyio

EVERY_TOKEN = GatherPolicy(min_wait_s=0.0, max_tokens=1)
ONLY_AT_THE_END = GatherPolicy(min_wait_s=1e6, max_tokens=10**6)
LONG_TEXT = "a text of so many words that it takes a while"
MIXED_TEXT = "aé€😀abcDEF, and more"


async def test_a_stream_begins_with_the_admission_alone_and_ends_with_the_usage(start):
    batches = [batch async for batch in start().generate(make_request(prompt="hello"))]

    assert [type(event) for event in batches[0]] == [Admission]
    assert isinstance(batches[-1][-1], GenerationEnd)
    assert text_of([event for batch in batches for event in batch]) == "hello"


async def test_the_first_token_is_a_list_of_its_own_even_if_all_else_is_gathered(start):
    runner = GatedRunner()
    stream, _ = await open_stream(
        start(runner, config={"gather": ONLY_AT_THE_END}), make_request(prompt="hello")
    )

    runner.permit(1)
    first = await anext(stream)
    runner.permit(100)
    second = await anext(stream)

    assert [event.token_ids for event in first] == [(ord("h"),)]
    assert [type(event) for event in second] == [TokenDelta, GenerationEnd]
    assert second[0].text == "ello"


async def test_tokens_are_gathered_up_to_the_limit(start):
    runner = GatedRunner()
    policy = GatherPolicy(min_wait_s=1e6, max_tokens=3)
    front = start(runner, config={"gather": policy})
    stream, _ = await open_stream(front, make_request(prompt="abcdefghij"))

    runner.permit(1)
    await anext(stream)
    sizes = []
    for _ in range(3):
        runner.permit(3)
        sizes.append([len(event.token_ids) for event in await anext(stream)])
    await stream.aclose()

    assert sizes == [[3], [3], [3]]


@pytest.mark.parametrize("stop", [(), ("cDE",), ("F, a", "€X")])
async def test_gathering_changes_no_text_wherever_the_stream_is_cut(start, stop):
    streaming = start(config={"gather": EVERY_TOKEN})
    gathering = start(config={"gather": ONLY_AT_THE_END})
    for max_tokens in range(1, len(MIXED_TEXT.encode()) + 2):
        request = make_request(prompt=MIXED_TEXT, stop=stop, sampling={"max_tokens": max_tokens})
        streamed = await collect(streaming, request)
        gathered = await collect(gathering, request)

        assert text_of(streamed) == text_of(gathered)
        assert tokens_of(streamed) == tokens_of(gathered)
        assert finish_of(streamed) is finish_of(gathered)
        cut = MIXED_TEXT.encode()[:max_tokens].decode(errors="replace")
        assert text_of(streamed) == cut.split("cDE")[0] if stop == ("cDE",) else True


async def test_three_choices_finish_once_each_and_are_counted_together(start):
    events = await collect(start(SeedRunner()), make_request(num_choices=3, seed=1))

    assert {finish_of(events, choice).value for choice in range(3)} == {"stop"}
    num_tokens = sum(len(tokens_of(events, choice)) for choice in range(3))
    assert events[-1].usage.num_completion_tokens == num_tokens


async def test_a_stream_is_resumed_behind_what_was_emitted(start):
    front = start(SeedRunner())
    fields = {"prompt": MIXED_TEXT, "num_choices": 2, "seed": 1, "stop": ("nope",)}
    whole = await collect(front, make_request(**fields))
    emitted = (tokens_of(whole, 0)[:9], tokens_of(whole, 1)[:2])

    rest = await collect(front, make_request(**fields, emitted_token_ids=emitted))

    for choice in range(2):
        assert emitted[choice] + tokens_of(rest, choice) == tokens_of(whole, choice)
        assert text_of(whole, choice).endswith(text_of(rest, choice))
    assert rest[-1].usage.num_completion_tokens == whole[-1].usage.num_completion_tokens


async def test_all_deltas_of_a_step_reach_the_loop_in_one_call(start, monkeypatch):
    loop = asyncio.get_running_loop()
    runner = GatedRunner()
    front = start(runner)
    calls = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def count(callback, *args, **keywords):
        if callback.__module__ == "models.engine.step_loop":
            calls.append([type(event) for _, event in args[0]])
        return call_soon_threadsafe(callback, *args, **keywords)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    tasks = [
        asyncio.ensure_future(collect(front, make_request(f"r{i}", "hello"))) for i in range(5)
    ]
    await eventually(lambda: runner.has_begun.is_set())
    runner.permit(100)
    await asyncio.gather(*tasks)

    with_deltas = [types for types in calls if TokenDelta in types]
    assert len(with_deltas) == runner.num_steps
    assert max(types.count(TokenDelta) for types in with_deltas) > 1
    assert all(set(types) == {Admission} for types in calls if TokenDelta not in types)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request(prompt="x" * 600), PromptTooLongError),
        (make_request(num_choices=1000), InvalidRequestError),
        (make_request(timeout_s=math.nan), InvalidRequestError),
        (make_request(sampling={"stop_token_ids": (10**6,)}), InvalidSamplingParamsError),
    ],
)
async def test_an_invalid_request_is_refused_and_the_next_one_served(start, request_, error):
    front = start()

    with pytest.raises(error):
        await collect(front, request_)

    assert text_of(await collect(front, make_request())) == "hello"


async def test_a_request_that_breaks_the_tokenizer_harms_nobody_else(start):
    class BrokenText(ByteText):
        def encode(self, prompt):
            if prompt.text == "bad":
                raise RuntimeError("tokenizer bug")
            return super().encode(prompt)

    front = start(text=BrokenText(), config={"max_num_entering": 1})

    with pytest.raises(RuntimeError, match="tokenizer bug"):
        await collect(front, make_request(prompt="bad"))

    assert text_of(await collect(front, make_request())) == "hello"
    front.check_health()


async def test_a_failed_row_is_raised_behind_its_tokens(start):
    front = start(EchoRunner(broken_tokens=(ord("!"),)), config={"gather": ONLY_AT_THE_END})

    events, error = await collect_until_error(front, make_request(prompt="ab!"))

    assert isinstance(error, SequenceFailedError)
    assert text_of(events) == "ab"


async def test_a_full_waiting_queue_is_told_through_the_stream(start):
    runner = GatedRunner()
    front = start(runner, max_num_seqs=1, max_num_waiting=2)
    running = asyncio.ensure_future(collect(front, make_request("running", LONG_TEXT)))
    await eventually(lambda: runner.has_begun.is_set())
    tasks = [asyncio.ensure_future(collect(front, make_request(f"r{i}", "hi"))) for i in range(4)]
    await step_until(runner, lambda: sum(task.done() for task in tasks) == 2)
    runner.permit(1000)
    await running

    results = await asyncio.gather(*tasks, return_exceptions=True)

    refused = [result for result in results if isinstance(result, Exception)]
    assert [type(error) for error in refused] == [QueueFullError] * 2
    assert all(text_of(r) == "hi" for r in results if not isinstance(r, Exception))


async def test_too_many_requests_before_admission_are_refused_until_there_is_room(start):
    text = GatedText()
    front = start(text=text, config={"max_num_entering": 2})
    tasks = [asyncio.ensure_future(collect(front, make_request(f"r{i}"))) for i in range(3)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    (refused,) = done
    with pytest.raises(QueueFullError) as raised:
        refused.result()
    assert raised.value.max_num_waiting == 2

    text.gate.set()
    for task in set(tasks) - done:
        assert text_of(await task) == "hello"
    assert text_of(await collect(front, make_request("again"))) == "hello"


async def test_a_request_that_is_cancelled_while_tokenised_gives_its_place_back(start):
    text = GatedText()
    front = start(text=text, config={"max_num_entering": 1})
    task = asyncio.ensure_future(collect(front, make_request("left")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    text.gate.set()

    assert text_of(await collect(front, make_request())) == "hello"
    assert front.stats().num_prompt_tokens == 5


async def test_a_time_limit_also_holds_while_tokenising(start):
    text = GatedText()
    front = start(text=text)

    with pytest.raises(DeadlineExceededError):
        await collect(front, make_request(timeout_s=0.02))

    text.gate.set()


async def test_a_deadline_ends_running_and_waiting_streams_with_an_error(start):
    clock = FakeClock()
    runner = GatedRunner()
    front = start(runner, clock=clock, max_num_seqs=1)
    tasks = [
        asyncio.ensure_future(
            collect_until_error(front, make_request(f"r{i}", LONG_TEXT, timeout_s=5.0))
        )
        for i in range(2)
    ]
    await step_until(runner, lambda: front.num_streams == 2)
    await step_until(runner, lambda: front.stats().num_generated_tokens == 2)

    clock.advance(5.0)
    runner.permit(2)
    results = await asyncio.gather(*tasks)

    assert [type(error) for _, error in results] == [DeadlineExceededError] * 2
    assert sorted(bool(text_of(events)) for events, _ in results) == [False, True]


async def leave_by_aclose(stream):
    await stream.aclose()


async def leave_by_cancellation(stream):
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def leave_by_forgetting(stream):
    del stream


@pytest.mark.parametrize("leave", [leave_by_aclose, leave_by_cancellation, leave_by_forgetting])
async def test_a_consumer_that_leaves_frees_its_blocks_before_the_next_step(start, leave):
    runner = GatedRunner()
    front = start(runner)
    stays = asyncio.ensure_future(collect(front, make_request("stays", LONG_TEXT)))
    opening = asyncio.ensure_future(open_stream(front, make_request("leaves", LONG_TEXT)))
    await step_until(runner, lambda: opening.done() and front.stats().num_running == 2)
    holder = [opening.result()[0]]
    opening = None  # it holds the stream too
    await anext(holder[0])
    num_steps = runner.num_steps

    # One step more may be under way; the abort is applied before the one behind it.
    await leave(holder.pop())
    for _ in range(5):
        await asyncio.sleep(0)
    runner.permit(2)
    await eventually(lambda: runner.num_steps == num_steps + 2)

    assert len(runner.plans[num_steps + 1].sequences) == 1
    assert front.num_streams == 1
    runner.permit(1000)
    assert text_of(await stays) == LONG_TEXT


async def test_a_consumer_that_leaves_the_queue_gives_its_place_back(start):
    runner = GatedRunner()
    front = start(runner, max_num_seqs=1, max_num_waiting=1)
    running = asyncio.ensure_future(collect(front, make_request("running", LONG_TEXT)))
    await eventually(lambda: runner.has_begun.is_set())
    left = asyncio.ensure_future(collect(front, make_request("left")))
    await step_until(runner, lambda: front.stats().num_waiting == 1)

    left.cancel()
    await asyncio.sleep(0)
    other = asyncio.ensure_future(collect(front, make_request("other")))
    runner.permit(1000)

    assert text_of(await other) == "hello"
    assert text_of(await running) == LONG_TEXT


async def test_leaving_a_second_stream_of_the_same_id_leaves_the_first_alone(start):
    runner = GatedRunner()
    front = start(runner)
    first = asyncio.ensure_future(collect(front, make_request("same")))
    await eventually(lambda: runner.has_begun.is_set())
    second = asyncio.ensure_future(collect(front, make_request("same")))
    await asyncio.sleep(0.01)

    second.cancel()
    runner.permit(1000)

    assert text_of(await first) == "hello"


async def test_a_slow_consumer_gets_everything(start):
    front = start(config={"gather": EVERY_TOKEN})
    events = []
    async for batch in front.generate(make_request(prompt="some longer text")):
        await asyncio.sleep(0.01)
        events.extend(batch)

    assert text_of(events) == "some longer text"


async def test_streams_of_several_event_loops_run_side_by_side(start):
    front = start()
    texts = []

    def consume(request_id):
        texts.append(text_of(asyncio.run(collect(front, make_request(request_id)))))

    threads = [threading.Thread(target=consume, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    here = await collect(front, make_request("here"))
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert [text_of(here), *texts] == ["hello"] * 4


async def test_streams_of_a_loop_that_was_closed_are_aborted(start):
    runner = GatedRunner()
    front = start(runner)

    def consume_and_close():
        loop = asyncio.new_event_loop()
        stream = front.generate(make_request("lost", "a text that nobody reads"))
        loop.run_until_complete(anext(stream))
        loop.close()

    await asyncio.to_thread(consume_and_close)
    runner.permit(1000)

    await eventually(lambda: front.num_streams == 0 and front.stats().kv_used == 0.0)
    assert text_of(await collect(front, make_request())) == "hello"
