"""Requests that ask for log probabilities of their prompt, for the prompt, or for no tokens."""

import pytest

from models.engine.stream import GatherPolicy, merge_events
from models.errors import ContextLengthExceededError, InvalidRequestError, SequenceFailedError
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    PromptLogprobs,
    TokenDelta,
    TokenLogprob,
)
from tests.unit.models.engine.fakes import (
    EchoRunner,
    GatedRunner,
    SeedRunner,
    add,
    collect,
    events_of,
    finish_of,
    make_engine,
    make_request,
    run,
    run_to_end,
    text_of,
    tokens_of,
    usage_of,
)

PROMPT = "a prompt of some length"
NO_TOKENS = {"max_tokens": 0}


def told_of(events):
    """Return what was told of the prompt; checks that it is adjacent and comes before all else."""
    stretches = [event for event in events if isinstance(event, PromptLogprobs)]
    assert events[: len(stretches)] == stretches
    told = []
    for stretch in stretches:
        assert stretch.start == 1 + len(told)
        assert stretch.logprobs
        told.extend(stretch.logprobs)
    return told


def expected_of(prompt, num_top):
    """Return what EchoRunner says of a prompt."""
    return [
        TokenLogprob(token_id, -float(position), ((token_id, -0.5),) * num_top, rank=1)
        for position, token_id in enumerate(prompt.encode())
        if position > 0
    ]


def kinds_of(events):
    return [type(event) for event in events]


@pytest.mark.parametrize("limits", [{}, {"max_num_scored_positions": 3}])
@pytest.mark.parametrize("num_top", [0, 2])
def test_the_prompt_is_told_before_any_token_and_the_rest_is_as_without(num_top, limits):
    events = run(make_request(prompt=PROMPT, num_prompt_logprobs=num_top), **limits)

    assert told_of(events) == expected_of(PROMPT, num_top)
    rest = [event for event in events if not isinstance(event, PromptLogprobs)]
    assert rest == run(make_request(prompt=PROMPT))
    assert len(events) - len(rest) == (8 if limits else 1)


def test_nothing_is_told_of_a_prompt_of_one_token():
    events = run(make_request(prompt="a", num_prompt_logprobs=1))

    assert kinds_of(events) == [TokenDelta, TokenDelta, GenerationEnd]


@pytest.mark.parametrize("prompt", ["ab", PROMPT])
def test_several_choices_are_told_the_prompt_once_and_before_their_tokens(prompt):
    request = make_request(prompt=prompt, num_choices=3, seed=1, num_prompt_logprobs=1)

    events = run(request, runner=SeedRunner(), max_num_scored_positions=2)

    assert told_of(events) == expected_of(prompt, 1)
    without = run(make_request(prompt=prompt, num_choices=3, seed=1), runner=SeedRunner())
    for choice in range(3):
        assert tokens_of(events, choice) == tokens_of(without, choice)


def test_the_prefix_cache_is_not_read_and_the_admission_says_so():
    engine = make_engine()
    add(engine, make_request("a", PROMPT))
    run_to_end(engine)

    admission = add(engine, make_request("b", PROMPT, num_prompt_logprobs=0))
    events = events_of(run_to_end(engine), "b")

    assert admission.num_cached_tokens == 0
    assert usage_of(events).num_cached_tokens == 0
    assert told_of(events) == expected_of(PROMPT, 0)


def test_the_admission_holds_the_prompt_if_it_is_to_be_reported():
    engine = make_engine()

    reported = add(engine, make_request("a", "hi", is_prompt_reported=True))
    silent = add(engine, make_request("b", "hi"))

    assert reported == Admission(7, None, "exact", 2, 0, (ord("h"), ord("i")))
    assert silent.prompt_token_ids == ()


@pytest.mark.parametrize("num_choices", [1, 3])
def test_no_tokens_may_be_asked_for_where_the_prompt_is_scored(num_choices):
    runner = EchoRunner()
    request = make_request(
        prompt=PROMPT, sampling=NO_TOKENS, num_prompt_logprobs=1, num_choices=num_choices
    )

    events = run(request, runner=runner, max_num_scored_positions=5)

    assert told_of(events) == expected_of(PROMPT, 1)
    assert tuple(event for event in events if isinstance(event, TokenDelta)) == tuple(
        TokenDelta(choice, (), "", (), FinishReason.LENGTH) for choice in range(num_choices)
    )
    assert usage_of(events).num_completion_tokens == 0
    assert usage_of(events).num_prompt_tokens == len(PROMPT)
    # the prompt ran once, whatever the number of choices
    assert sum(plan.num_tokens for plan in runner.plans) == len(PROMPT)


def test_no_tokens_may_be_asked_for_where_the_prompt_is_reported():
    events = run(make_request(prompt="a", sampling=NO_TOKENS, is_prompt_reported=True))

    assert kinds_of(events) == [TokenDelta, GenerationEnd]
    assert finish_of(events) is FinishReason.LENGTH


def test_a_prompt_that_is_only_reported_may_be_read_from_the_prefix_cache():
    engine = make_engine()
    add(engine, make_request("a", "0123456789"))
    run_to_end(engine)

    request = make_request("b", "0123456789", sampling=NO_TOKENS, is_prompt_reported=True)
    assert add(engine, request).num_cached_tokens == 8
    assert usage_of(events_of(run_to_end(engine), "b")).num_cached_tokens == 8


@pytest.mark.parametrize("field", [{"num_prompt_logprobs": 0}, {"is_prompt_reported": True}])
def test_a_prompt_for_no_tokens_may_fill_the_window_but_not_exceed_it(field):
    events = run(make_request(prompt="x" * 16, sampling=NO_TOKENS, **field), num_blocks=4)
    assert finish_of(events) is FinishReason.LENGTH

    with pytest.raises(ContextLengthExceededError) as raised:
        run(make_request(prompt="x" * 17, sampling=NO_TOKENS, **field), num_blocks=4)
    assert raised.value.args == (17, 0, 16, 0)


def test_no_tokens_are_refused_where_nothing_is_asked_of_the_prompt():
    with pytest.raises(InvalidRequestError) as raised:
        run(make_request(sampling=NO_TOKENS))

    assert raised.value.param == "max_tokens"


@pytest.mark.parametrize("num_prompt_logprobs", [-1, 21])
def test_a_number_of_alternatives_out_of_range_is_refused(num_prompt_logprobs):
    with pytest.raises(InvalidRequestError) as raised:
        make_engine().check_fields(make_request(num_prompt_logprobs=num_prompt_logprobs))

    assert raised.value.param == "prompt_logprobs"


def test_a_resumed_stream_cannot_ask_for_the_prompt():
    request = make_request(num_prompt_logprobs=0, emitted_token_ids=((104,),))

    with pytest.raises(InvalidRequestError) as raised:
        make_engine().check_fields(request)

    assert raised.value.param == "emitted_token_ids"


def test_a_prompt_that_cannot_be_scored_ends_its_request_and_nobody_else():
    engine = make_engine(EchoRunner(broken_tokens=(ord("!"),)), max_num_batched_tokens=64)
    add(engine, make_request("r", "ab!cd", num_prompt_logprobs=0, num_choices=2))
    add(engine, make_request("zero", "ab!cd", num_prompt_logprobs=0, sampling=NO_TOKENS))
    add(engine, make_request("other", "hello", num_prompt_logprobs=0))

    outputs = run_to_end(engine)

    for request_id in ("r", "zero"):
        (error,) = events_of(outputs, request_id)
        assert isinstance(error, SequenceFailedError)
        assert "not numbers" in str(error)
    assert text_of(events_of(outputs, "other")) == "hello"


def test_preemption_changes_nothing_of_what_is_told():
    requests = [
        make_request(f"r{i}", f"{i} is what this prompt says", num_prompt_logprobs=1)
        for i in range(6)
    ]
    tight = make_engine(num_blocks=20, max_num_scored_positions=3)
    for request in requests:
        add(tight, request)
    outputs = run_to_end(tight)

    assert tight.stats().num_preemptions > 0
    for request in requests:
        events = events_of(outputs, request.request_id)
        alone = run(request)
        assert told_of(events) == told_of(alone)
        assert tokens_of(events) == tokens_of(alone)


def test_an_abort_while_the_prompt_is_scored_frees_everything():
    engine = make_engine(max_num_scored_positions=3)
    add(engine, make_request(prompt=PROMPT, num_prompt_logprobs=0))
    assert kinds_of(events_of(engine.step())) == [PromptLogprobs]

    engine.abort("r")

    engine.check_invariants()
    assert engine.step() == []
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_gathering_keeps_what_is_told_of_the_prompt_before_the_deltas():
    stretches = [PromptLogprobs(1, (TokenLogprob(5, -1.0),)), PromptLogprobs(2, ())]
    deltas = [TokenDelta(0, (1,), "a"), TokenDelta(0, (2,), "b")]

    assert merge_events([*stretches, *deltas]) == [*stretches, TokenDelta(0, (1, 2), "ab")]


@pytest.mark.anyio
async def test_a_stretch_of_the_prompt_does_not_wait_for_tokens(start):
    runner = GatedRunner()
    gather = GatherPolicy(min_wait_s=1e6, max_tokens=10**6)
    front = start(runner, config={"gather": gather}, max_num_scored_positions=20)
    stream = front.generate(make_request(prompt=PROMPT, num_prompt_logprobs=0))
    await anext(stream)

    runner.permit(1)
    assert kinds_of(await anext(stream)) == [PromptLogprobs]
    runner.permit(1)
    assert kinds_of(await anext(stream)) == [PromptLogprobs, TokenDelta]
    await stream.aclose()


@pytest.mark.anyio
async def test_a_request_for_no_tokens_is_a_complete_stream(start):
    request = make_request(
        prompt=PROMPT, sampling=NO_TOKENS, num_prompt_logprobs=0, is_prompt_reported=True
    )

    admission, *events = await collect(start(), request)

    assert bytes(admission.prompt_token_ids).decode() == PROMPT
    assert kinds_of(events) == [PromptLogprobs, TokenDelta, GenerationEnd]
