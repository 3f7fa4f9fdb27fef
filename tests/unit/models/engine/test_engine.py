"""Tests of the synchronous engine: admission, steps, ends."""

import pytest

from models.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    SequenceFailedError,
)
from models.requests import (
    AdapterRef,
    Admission,
    FinishReason,
    GenerationEnd,
    PrefixNamespace,
    TokenDelta,
)
from models.scheduling.scheduler import Scheduler
from sampling.params import derive_seed
from tests.fakes import FakeClock
from tests.unit.models.engine.fakes import (
    EOS,
    EchoRunner,
    SeedRunner,
    add,
    deltas_of,
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


def test_the_admission_tells_what_a_stream_needs_to_be_resumed():
    adapter = AdapterRef("pirate", "v3")

    admission = add(make_engine(), make_request(prompt="hello", seed=11, adapter=adapter))

    assert admission == Admission(11, "v3", "exact", 5, 0)


def test_a_later_request_is_told_what_the_prefix_cache_holds():
    engine = make_engine()
    add(engine, make_request("a", "0123456789"))
    run_to_end(engine)

    admission = add(engine, make_request("b", "0123456789"))

    assert admission.num_cached_tokens == 8
    assert usage_of(events_of(run_to_end(engine), "b")).num_cached_tokens == 8


def test_requests_of_different_salts_share_nothing():
    engine = make_engine()
    add(engine, make_request("a", "0123456789", cache_salt="x"))
    run_to_end(engine)

    assert add(engine, make_request("b", "0123456789")).num_cached_tokens == 0


def test_sequences_get_namespace_and_derived_seed():
    runner = EchoRunner()
    run(make_request(num_choices=2, seed=3), runner=runner)

    assert [joining.seed for joining in runner.joined] == [3, derive_seed(3, 1)]
    assert all(joining.adapter is None for joining in runner.joined)
    assert PrefixNamespace("fake") != PrefixNamespace("fake", AdapterRef("None", "None"))


def test_a_stream_is_one_delta_per_token_and_an_end():
    events = run(make_request(prompt="hello"))

    assert [type(event) for event in events] == [TokenDelta] * 6 + [GenerationEnd]
    assert text_of(events) == "hello"
    assert tokens_of(events) == (*b"hello", EOS)
    assert finish_of(events) is FinishReason.STOP


def test_the_completion_counts_the_stop_token():
    assert usage_of(run(make_request(prompt="hello"))).num_completion_tokens == 6


def test_a_clamped_run_ends_by_length():
    events = run(make_request(prompt="hello world"), max_model_len_tokens=15)

    assert text_of(events) == "hell"
    assert finish_of(events) is FinishReason.LENGTH


def test_log_probabilities_come_one_per_token_if_asked_for():
    events = run(make_request(prompt="hi", sampling={"num_top_logprobs": 0}))

    logprobs = [logprob for delta in deltas_of(events) for logprob in delta.logprobs]
    assert tuple(logprob.token_id for logprob in logprobs) == tokens_of(events)


def test_choices_of_different_length_end_one_by_one_and_their_tokens_add_up():
    request = make_request(prompt="abc", num_choices=3, seed=1)
    lengths = [3 * (1 + derive_seed(1, choice) % 5) + 1 for choice in range(3)]
    assert len(set(lengths)) == 3

    events = run(request, runner=SeedRunner())

    assert [len(tokens_of(events, choice)) for choice in range(3)] == lengths
    assert all(finish_of(events, choice) is FinishReason.STOP for choice in range(3))
    assert usage_of(events).num_completion_tokens == sum(lengths)
    assert usage_of(events).num_prompt_tokens == 3
    assert sum(isinstance(event, GenerationEnd) for event in events) == 1


def test_a_choice_equals_the_single_request_with_its_seed():
    together = run(make_request(prompt="abc", num_choices=3, seed=1), runner=SeedRunner())

    for choice in range(3):
        alone = run(make_request(prompt="abc", seed=derive_seed(1, choice)), runner=SeedRunner())
        assert tokens_of(alone) == tokens_of(together, choice)


def test_a_finished_choice_frees_its_blocks_while_its_siblings_run():
    engine = make_engine(SeedRunner())
    add(engine, make_request(prompt="abc", num_choices=3, seed=1))
    num_finished, free_at_finish = 0, []
    while engine.has_work:
        for _, event in engine.step():
            num_finished += isinstance(event, TokenDelta) and event.finish_reason is not None
        if len(free_at_finish) < num_finished:
            free_at_finish.append(engine.stats().num_free_blocks)
        engine.check_invariants()

    assert free_at_finish == sorted(free_at_finish)
    assert free_at_finish[-1] == engine.stats().num_blocks


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on():
    engine = make_engine()
    add(engine, make_request(prompt="one"))

    with pytest.raises(InvalidRequestError) as raised:
        add(engine, make_request(prompt="two"))

    assert raised.value.param == "request_id"
    assert text_of(events_of(run_to_end(engine))) == "one"


def test_a_request_id_can_be_used_again_after_its_end():
    engine = make_engine()
    for _ in range(2):
        add(engine, make_request())
        assert text_of(events_of(run_to_end(engine))) == "hello"


def test_a_full_queue_refuses_and_keeps_no_trace():
    engine = make_engine(max_num_waiting=2)
    add(engine, make_request("a"))
    add(engine, make_request("b"))

    with pytest.raises(QueueFullError) as raised:
        add(engine, make_request("c"))

    assert raised.value.args == (2, 2)
    engine.check_invariants()
    assert events_of(run_to_end(engine), "c") == []


def test_an_abort_frees_the_blocks_before_the_next_step():
    engine = make_engine()
    add(engine, make_request(prompt="a long prompt of some blocks"))
    engine.step()
    assert engine.stats().num_free_blocks < engine.stats().num_blocks

    engine.abort("r")

    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.step() == []
    engine.check_invariants()


def test_an_abort_takes_a_waiting_request_out_of_the_queue():
    engine = make_engine()
    add(engine, make_request())
    engine.abort("r")

    assert not engine.has_work
    assert engine.step() == []


def test_an_abort_may_be_repeated_and_may_name_nobody():
    engine = make_engine()
    add(engine, make_request())
    engine.abort("r")
    engine.abort("r")
    engine.abort("nobody")

    engine.check_invariants()


def test_an_abort_leaves_the_neighbours_alone():
    engine = make_engine()
    add(engine, make_request("a", "first text"))
    add(engine, make_request("b", "second text"))
    outputs = engine.step()
    engine.abort("a")

    assert text_of(events_of(outputs + run_to_end(engine), "b")) == "second text"


def test_a_running_request_ends_at_its_deadline():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    add(engine, make_request("r", timeout_s=5.0))
    add(engine, make_request("other"))
    outputs = engine.step()
    clock.advance(5.0)
    outputs += engine.step()
    engine.check_invariants()

    assert isinstance(events_of(outputs)[-1], DeadlineExceededError)
    assert events_of(outputs)[-1].timeout_s == 5.0
    assert text_of(events_of(outputs + run_to_end(engine), "other")) == "hello"


def test_a_waiting_request_ends_at_its_deadline():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    add(engine, make_request("running", "a rather long text"))
    add(engine, make_request("r", timeout_s=5.0))
    engine.step()
    clock.advance(6.0)

    assert isinstance(events_of(engine.step())[-1], DeadlineExceededError)
    assert engine.stats().num_waiting == 0


def test_a_request_whose_time_was_over_on_the_way_is_refused():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    prepared = engine.prepare(make_request(timeout_s=1.0), (65,), clock())
    clock.advance(1.0)

    with pytest.raises(DeadlineExceededError):
        engine.admit(prepared)


def test_the_next_deadline_is_the_earliest_of_all_open_requests():
    clock = FakeClock(now_s=0.0)
    engine = make_engine(clock=clock)
    for request_id, timeout_s in (("a", 30.0), ("b", 10.0), ("c", 20.0), ("d", None)):
        add(engine, make_request(request_id, timeout_s=timeout_s))

    assert engine.next_deadline_s == 10.0
    clock.advance(10.0)
    engine.step()
    assert engine.next_deadline_s == 20.0


def test_work_that_cannot_run_is_not_runnable_until_something_changes(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(Scheduler, "plan", lambda self: None)
    add(engine, make_request("a"))
    assert engine.is_runnable

    engine.step()
    assert engine.has_work
    assert not engine.is_runnable

    add(engine, make_request("b"))
    assert engine.is_runnable
    engine.step()
    engine.abort("b")
    assert engine.is_runnable


def test_a_row_that_fails_ends_its_request_with_all_choices_and_nobody_else():
    engine = make_engine(EchoRunner(broken_tokens=(ord("!"),)))
    add(engine, make_request("r", "ab!", num_choices=3))
    add(engine, make_request("other", "hello"))

    outputs = run_to_end(engine)

    errors = [event for event in events_of(outputs) if isinstance(event, Exception)]
    assert [type(error) for error in errors] == [SequenceFailedError]
    assert events_of(outputs)[-1] is errors[0]
    assert "not numbers" in str(errors[0])
    assert text_of(events_of(outputs, "other")) == "hello"


def test_preempted_requests_give_the_same_stream():
    requests = [make_request(f"r{i}", f"{i} is what this prompt says") for i in range(6)]
    tight = make_engine(num_blocks=20)
    for request in requests:
        add(tight, request)
    outputs = run_to_end(tight)

    assert tight.stats().num_preemptions > 0
    for request in requests:
        assert events_of(outputs, request.request_id)[:-1] == run(request)[:-1]


def test_the_statistics_add_up():
    engine = make_engine(num_blocks=64, block_size_tokens=4)
    add(engine, make_request("a", "hello"))
    add(engine, make_request("b", "hi"))
    assert (engine.stats().num_waiting, engine.stats().num_waiting_seqs) == (2, 2)
    engine.step()
    assert engine.stats().num_running == 2
    assert engine.stats().kv_used == (64 - engine.stats().num_free_blocks) / 64 > 0

    run_to_end(engine)
    stats = engine.stats()

    assert stats.num_prompt_tokens == 7
    assert stats.num_generated_tokens == 9
    assert stats.num_steps == 6
    assert (stats.num_waiting, stats.num_running, stats.kv_used) == (0, 0, 0.0)


def test_step_times_are_split_by_phase():
    clock = FakeClock()

    class SlowRunner(EchoRunner):
        def execute(self, plan):
            clock.advance(2.0)
            return super().execute(plan)

    engine = make_engine(SlowRunner(), clock=clock)
    add(engine, make_request(prompt="hi"))
    run_to_end(engine)

    assert engine.stats().execute_s == 2.0 * engine.stats().num_steps
    assert (engine.stats().plan_s, engine.stats().post_s) == (0.0, 0.0)


def test_logs_hold_no_token_and_no_text(caplog):
    caplog.set_level(0)
    engine = make_engine(EchoRunner(broken_tokens=(ord("!"),)))
    add(engine, make_request("r", "secret!"))
    run_to_end(engine)

    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
    assert str(ord("s")) not in caplog.records[0].getMessage()
