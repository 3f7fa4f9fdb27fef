import dataclasses

import pytest

from models.requests import AdapterRef
from models.scheduling.step_plan import JoiningSequence, ScheduledSequence, StepPlan
from sampling.params import SamplingParams
from tests.fakes import (
    FakeClock,
    FakeStepRunner,
    PlanError,
    end_after,
    fail_after,
    last_plus_one,
)

PARAMS = SamplingParams()


def joining(seq_id, prompt, adapter=None, output=()):
    return JoiningSequence(seq_id, PARAMS, 0, tuple(prompt), tuple(output), adapter)


def row(seq_id, tokens, start, block_ids, is_sampled=True):
    return ScheduledSequence(seq_id, tuple(tokens), start, tuple(block_ids), is_sampled)


@pytest.fixture
def runner():
    """Four blocks of two tokens."""
    return FakeStepRunner(4, 2, max_num_seqs=2, max_num_batched_tokens=4)


FIRST = StepPlan(0, (row(1, [5, 6, 7], 0, [0, 1]),), (joining(1, [5, 6, 7]),))


def test_a_right_plan_draws_last_plus_one(runner):
    assert runner.execute(FIRST).sampled[0].token_id == 8
    second = StepPlan(1, (row(1, [8], 3, [0, 1]),))
    assert runner.execute(second).sampled[0].token_id == 9


@pytest.mark.parametrize(
    ("scheduled", "problem"),
    [
        (row(1, [8], 2, [0, 1]), "wrong position"),
        (row(1, [9], 3, [0, 1]), "not its own"),
        (row(1, [8], 3, [0]), "lacks blocks"),
        (row(1, [8], 3, [0, 2]), "changed under it"),
        (row(1, [8], 3, [0, 1], is_sampled=False), "must be sampled"),
        (row(2, [8], 3, [0, 1]), "not known"),
    ],
)
def test_a_wrong_row_is_reported(runner, scheduled, problem):
    runner.execute(FIRST)

    with pytest.raises(PlanError, match=problem):
        runner.execute(StepPlan(1, (scheduled,)))


SCORING = JoiningSequence(1, PARAMS, 0, (5, 6, 7), (), num_prompt_logprobs=0)


def scoring_row(scored):
    return dataclasses.replace(row(1, [5, 6, 7], 0, [0, 1]), scored_positions=scored)


@pytest.mark.parametrize(
    ("scored", "problem"),
    [
        (range(0), "wrong positions"),
        (range(1), "wrong positions"),
        (range(1, 2), "wrong positions"),
        (range(3), "too many scored"),
    ],
)
def test_positions_that_are_scored_wrongly_are_reported(scored, problem):
    runner = FakeStepRunner(4, 2, max_num_scored_positions=2)

    with pytest.raises(PlanError, match=problem):
        runner.execute(StepPlan(0, (scoring_row(scored),), (SCORING,)))


def test_positions_that_are_scored_again_after_a_preemption_are_reported():
    runner = FakeStepRunner(4, 2)
    runner.execute(StepPlan(0, (scoring_row(range(2)),), (SCORING,)))

    with pytest.raises(PlanError, match="wrong positions"):
        runner.execute(StepPlan(1, (scoring_row(range(2)),), (SCORING,), (1,)))


def test_positions_that_were_never_scored_are_reported():
    runner = FakeStepRunner(4, 2)
    runner.execute(StepPlan(0, (row(2, [5, 6, 9], 0, [2, 3]),), (joining(2, [5, 6, 9]),)))
    hit = ScheduledSequence(1, (7,), 2, (2, 1), is_sampled=True)

    with pytest.raises(PlanError, match="not scored"):
        runner.execute(StepPlan(1, (hit,), (SCORING,)))


def test_scored_positions_are_told_of_the_tokens_behind_them():
    runner = FakeStepRunner(4, 2)

    (scored,) = runner.execute(StepPlan(0, (scoring_row(range(2)),), (SCORING,))).scored

    assert scored.start == 1
    assert [logprob.token_id for logprob in scored.logprobs] == [6, 7]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step_id": 2}, "step ids"),
        ({"sequences": ()}, "without tokens"),
        ({"sequences": (row(1, [8], 3, [0, 1]),) * 2}, "twice"),
        ({"leaving": (2,)}, "leaves but"),
        ({"joining": (joining(1, [5]),)}, "joins but"),
        ({"joining": (joining(2, [5]), joining(3, [5]))}, "too many known"),
    ],
)
def test_a_wrong_plan_is_reported(runner, changes, problem):
    runner.execute(FIRST)
    plan = StepPlan(1, (row(1, [8], 3, [0, 1]),))

    with pytest.raises(PlanError, match=problem):
        runner.execute(dataclasses.replace(plan, **changes))


def test_more_tokens_than_the_budget_are_reported(runner):
    plan = StepPlan(0, (row(1, range(5), 0, [0, 1, 2]),), (joining(1, range(5)),))

    with pytest.raises(PlanError, match="too many tokens"):
        runner.execute(plan)


def test_a_prefix_hit_on_the_right_block_is_accepted(runner):
    runner.execute(FIRST)
    plan = StepPlan(1, (row(2, [9], 2, [0, 2]),), (joining(2, [5, 6, 9]),))

    assert runner.execute(plan).sampled[0].token_id == 10


@pytest.mark.parametrize(
    "other",
    [
        joining(2, [5, 5, 9]),
        joining(2, [5, 6, 9], adapter=AdapterRef("a", "1")),
    ],
)
def test_a_prefix_hit_on_foreign_content_is_reported(runner, other):
    runner.execute(FIRST)

    with pytest.raises(PlanError, match="foreign KV"):
        runner.execute(StepPlan(1, (row(2, [9], 2, [0, 2]),), (other,)))


def test_equal_tokens_behind_another_prefix_are_foreign_content(runner):
    runner.execute(StepPlan(0, (row(1, [5, 6, 7, 8], 0, [0, 1]),), (joining(1, [5, 6, 7, 8]),)))
    runner.execute(StepPlan(1, (row(2, [1, 2], 0, [2], True),), (joining(2, [1, 2]),)))
    third = joining(3, [1, 2, 7, 8, 9])

    with pytest.raises(PlanError, match="foreign KV"):
        runner.execute(StepPlan(2, (row(3, [9], 4, [2, 1, 3]),), (third,), (1,)))


def test_writing_into_a_shared_block_is_reported(runner):
    runner.execute(FIRST)
    plan = StepPlan(1, (row(2, [9], 2, [0, 1]),), (joining(2, [5, 6, 9]),))

    with pytest.raises(PlanError, match="shared block"):
        runner.execute(plan)


def test_a_sequence_may_leave_and_join_in_one_plan(runner):
    runner.execute(FIRST)
    again = joining(1, [5, 6, 7], output=[8])
    plan = StepPlan(1, (row(1, [5, 6, 7, 8], 0, [2, 3]),), (again,), (1,))

    assert runner.execute(plan).sampled[0].token_id == 9
    assert runner.known_seq_ids == {1}


def test_log_probabilities_are_given_if_asked_for(runner):
    asking = JoiningSequence(1, SamplingParams(num_top_logprobs=2), 0, (5,), ())

    sampled = runner.execute(StepPlan(0, (row(1, [5], 0, [0]),), (asking,))).sampled[0]

    assert sampled.logprob.token_id == 6
    assert len(sampled.logprob.top) == 2


def test_token_rules_say_when_a_sequence_ends_or_fails():
    assert last_plus_one([5], []) == 6
    assert last_plus_one([5], [9]) == 10
    assert [end_after(2, 99)([5], output) for output in ([], [6], [6, 99])] == [6, 99, 100]
    assert [fail_after(1, "bad")([5], output) for output in ([], [6])] == [6, "bad"]


def test_the_clock_moves_only_when_it_is_told_to():
    clock = FakeClock(5.0)

    clock.advance(1.5)

    assert clock() == 6.5
