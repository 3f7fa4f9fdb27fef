"""Tests of streams that another engine began: they go on exactly behind what was emitted."""

import pytest

from models.errors import InvalidRequestError
from models.requests import FinishReason
from tests.unit.models.engine.fakes import (
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


def emitted(whole, *cuts):
    return tuple(tokens_of(whole, choice)[:cut] for choice, cut in enumerate(cuts))


@pytest.mark.parametrize("cuts", [(0, 0), (1, 3), (4, 1), (7, 2), (2, 16)])
def test_a_resumed_stream_goes_on_exactly_behind_the_emitted_tokens(cuts):
    fields = {"prompt": "abc", "num_choices": 2, "seed": 1}
    whole = run(make_request(**fields), runner=SeedRunner())

    rest = run(make_request(**fields, emitted_token_ids=emitted(whole, *cuts)), runner=SeedRunner())

    for choice, cut in enumerate(cuts):
        expected = deltas_of(whole, choice)[cut:]
        got = [delta for delta in deltas_of(rest, choice) if delta.token_ids]
        assert got == expected
        assert finish_of(rest, choice) is finish_of(whole, choice)
    assert usage_of(rest).num_completion_tokens == usage_of(whole).num_completion_tokens


def test_a_stream_of_which_every_choice_had_ended_ends_without_a_step():
    whole = run(make_request(prompt="hi", num_choices=2))
    runner = EchoRunner()

    rest = run(
        make_request(prompt="hi", num_choices=2, emitted_token_ids=emitted(whole, 3, 3)),
        runner=runner,
    )

    assert runner.num_steps == 0
    assert [delta.token_ids for delta in rest[:-1]] == [(), ()]
    assert usage_of(rest).num_completion_tokens == 6


def test_an_abort_takes_back_what_was_still_to_be_told():
    whole = run(make_request(prompt="hi"))
    engine = make_engine()
    add(engine, make_request(prompt="hi", emitted_token_ids=emitted(whole, 3)))
    engine.abort("r")

    assert not engine.has_work
    assert engine.step() == []


def test_emitted_tokens_count_for_the_limit():
    request = make_request(
        prompt="hello", sampling={"max_tokens": 4}, emitted_token_ids=(tuple(b"hel"),)
    )

    events = run(request)

    assert text_of(events) == "l"
    assert finish_of(events) is FinishReason.LENGTH


def test_the_text_goes_on_behind_a_character_that_the_prompt_left_unfinished():
    first, *rest = "é".encode()

    class Finisher(EchoRunner):
        def script(self, joining):
            return (*rest, ord("!"))

    engine = make_engine(Finisher())
    engine.add(make_request(), (ord("a"), first))

    assert text_of(events_of(run_to_end(engine))) == "é!"


def test_an_id_is_in_use_until_the_end_of_its_stream_was_told():
    whole = run(make_request(prompt="hi"))
    engine = make_engine()
    add(engine, make_request(prompt="hi", emitted_token_ids=emitted(whole, 3)))

    with pytest.raises(InvalidRequestError):
        add(engine, make_request(prompt="hi"))
