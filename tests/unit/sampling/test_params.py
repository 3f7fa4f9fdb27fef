import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling.errors import (
    InvalidSamplingParamsError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    SamplingError,
)
from sampling.params import SamplingParams, derive_seed


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-2]),
        ("min_p", [-0.1, 1.1]),
        ("typical_p", [0.0, 1.1]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1]),
        ("max_tokens", [-1]),
        ("min_tokens", [-1, 513]),
        ("logit_bias", [((1, math.nan),), ((1, 1e9),)]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(InvalidSamplingParamsError) as caught:
            SamplingParams(**{field: value})

        assert caught.value.param == field


@pytest.mark.parametrize("num_top_logprobs", [-1, 21, 10**9])
def test_too_many_top_logprobs_are_refused(num_top_logprobs):
    with pytest.raises(InvalidSamplingParamsError, match="top_logprobs"):
        SamplingParams(num_top_logprobs=num_top_logprobs)


def test_the_limits_of_every_range_are_allowed():
    SamplingParams(temperature=0.0, top_p=0.0, top_k=-1, min_p=1.0, typical_p=1.0)
    SamplingParams(frequency_penalty=-2.0, presence_penalty=2.0, logit_bias=((0, -100.0),))


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 1000))
def test_a_derived_seed_is_a_seed_again(seed, choice):
    derived = derive_seed(seed, choice)

    assert -(2**63) <= derived < 2**63
    assert derive_seed(seed, 0) == seed


def test_choices_of_one_request_have_different_seeds():
    assert len({derive_seed(0, choice) for choice in range(1000)}) == 1000


@pytest.mark.parametrize(
    "error",
    [
        InvalidSamplingParamsError("top_p", "2 is too much"),
        NonFiniteLogitsError(),
        NoTokenLeftError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert isinstance(copy, SamplingError)
    assert str(copy) == str(error)
    assert str(copy)
