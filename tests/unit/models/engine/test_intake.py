"""Tests of what a request is checked against before it enters."""

import math

import pytest

from models.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    PromptTooLongError,
)
from models.requests import AdapterRef, PrefixNamespace
from sampling.errors import InvalidSamplingParamsError
from sampling.params import derive_seed
from tests.unit.models.engine.fakes import VOCABULARY_SIZE, make_engine, make_request


def prepare(request, num_prompt_tokens=5, engine=None, **engine_fields):
    engine = engine or make_engine(**engine_fields)
    return engine.prepare(request, (65,) * num_prompt_tokens, 0.0)


def refused_param(request, **engine_fields):
    with pytest.raises((InvalidRequestError, InvalidSamplingParamsError)) as raised:
        prepare(request, **engine_fields)
    return raised.value.param


def test_a_prompt_that_fills_the_window_is_too_long():
    with pytest.raises(PromptTooLongError) as raised:
        prepare(make_request(), 16, max_model_len_tokens=16)

    assert raised.value.num_prompt_tokens == 16
    assert raised.value.max_model_len_tokens == 16


def test_a_prompt_that_leaves_one_token_is_served_with_one_token():
    prepared = prepare(make_request(), 15, max_model_len_tokens=16)

    assert prepared.params.max_tokens == 1


def test_an_explicit_limit_that_just_fits_is_kept():
    request = make_request(sampling={"max_tokens": 11})

    assert prepare(request, 5, max_model_len_tokens=16).params.max_tokens == 11


def test_an_explicit_limit_that_does_not_fit_is_refused():
    request = make_request(sampling={"max_tokens": 12})

    with pytest.raises(ContextLengthExceededError) as raised:
        prepare(request, 5, max_model_len_tokens=16)

    assert raised.value.args == (5, 12, 16, 0)


def test_an_absent_limit_is_the_default_or_the_room_that_is_left():
    engine = make_engine(max_model_len_tokens=100, default_max_tokens=20)

    assert prepare(make_request(), 5, engine).params.max_tokens == 20
    assert prepare(make_request(), 90, engine).params.max_tokens == 10


def test_the_kv_pool_bounds_a_sequence_like_the_window():
    engine = make_engine(num_blocks=3, block_size_tokens=4, max_model_len_tokens=100)

    assert engine.max_sequence_len_tokens == 12
    assert prepare(make_request(), 5, engine).params.max_tokens == 7
    with pytest.raises(ContextLengthExceededError) as raised:
        prepare(make_request(sampling={"max_tokens": 8}), 5, engine)
    assert raised.value.max_model_len_tokens == 12
    with pytest.raises(PromptTooLongError):
        prepare(make_request(), 12, engine)


def test_a_limit_of_no_tokens_is_refused():
    assert refused_param(make_request(sampling={"max_tokens": 0})) == "max_tokens"


def test_min_tokens_above_the_limit_in_force_is_refused():
    request = make_request(sampling={"min_tokens": 30})

    assert refused_param(request, default_max_tokens=20) == "min_tokens"


@pytest.mark.parametrize("num_choices", [0, -1, 5])
def test_a_number_of_choices_out_of_range_is_refused(num_choices):
    request = make_request(num_choices=num_choices)

    assert refused_param(request, max_num_choices=4) == "n"


def test_the_largest_number_of_choices_is_served():
    assert len(prepare(make_request(num_choices=4), max_num_choices=4).choices) == 4


def test_each_choice_gets_its_own_seed():
    prepared = prepare(make_request(num_choices=3, seed=-5))

    assert [choice.seed for choice in prepared.choices] == [derive_seed(-5, i) for i in range(3)]


@pytest.mark.parametrize("token_id", [-1, VOCABULARY_SIZE, 2**32 - 1])
def test_prompt_tokens_outside_of_the_vocabulary_are_refused(token_id):
    with pytest.raises(InvalidRequestError) as raised:
        make_engine().prepare(make_request(), (1, token_id, 2), 0.0)

    assert raised.value.param == "prompt"


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError) as raised:
        make_engine().prepare(make_request(), (), 0.0)

    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("logit_bias", ((VOCABULARY_SIZE, 1.0),), "logit_bias"),
        ("stop_token_ids", (-1,), "stop_token_ids"),
        ("allowed_token_ids", (999_999,), "allowed_token_ids"),
        ("bad_words_token_ids", ((1, VOCABULARY_SIZE),), "bad_words"),
    ],
)
def test_parameter_tokens_outside_of_the_vocabulary_are_refused(field, value, param):
    assert refused_param(make_request(sampling={field: value})) == param


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_time_limit_that_is_not_above_zero_is_refused(timeout_s):
    assert refused_param(make_request(timeout_s=timeout_s)) == "timeout_s"


@pytest.mark.parametrize(
    "emitted",
    [
        ((65,),),
        ((65,), (65,), (65,)),
        ((65,), (-1,)),
        ((65,), (VOCABULARY_SIZE,)),
        ((65,), (65,) * 5),
    ],
)
def test_emitted_tokens_that_fit_no_stream_are_refused(emitted):
    request = make_request(sampling={"max_tokens": 4}, num_choices=2, emitted_token_ids=emitted)

    assert refused_param(request) == "emitted_token_ids"


def test_the_namespace_names_model_adapter_and_salt():
    adapter = AdapterRef("a", "1")

    prepared = prepare(make_request(adapter=adapter, cache_salt="s"))

    assert prepared.namespace == PrefixNamespace("fake", adapter, "s")


def test_the_deadline_counts_from_the_arrival():
    engine = make_engine()

    assert engine.prepare(make_request(timeout_s=2.5), (1,), 10.0).deadline_s == 12.5
    assert engine.prepare(make_request(), (1,), 10.0).deadline_s == math.inf
