import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.params import SamplingParams
from sampling.sampler import Sampler
from tests.unit.sampling import reference


@settings(max_examples=60, deadline=None)
@given(
    vocabulary_size=st.integers(1, 400),
    num_top=st.integers(0, 20),
    seed=st.integers(0, 9999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_log_probabilities_are_those_of_the_raw_distribution(vocabulary_size, num_top, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn((1, vocabulary_size), generator=generator) * 4).to(dtype)
    sampler = Sampler(vocabulary_size, frozenset())
    params = SamplingParams(
        num_top_logprobs=num_top,
        temperature=0.5,
        top_p=0.8,
        repetition_penalty=2.0,
        logit_bias=((0, -7.0),),
    )

    result = sampler.sample(logits, [sampler.make_row(params, seed, [0])])[0]

    raw = logits[0].tolist()
    expected = reference.log_softmax(raw)
    best = reference.ranked_ids(raw)[:num_top]
    assert result.logprob == pytest.approx(expected[result.token_id], abs=1e-5)
    assert [token_id for token_id, _ in result.top] == best
    assert [value for _, value in result.top] == pytest.approx(
        [expected[i] for i in best], abs=1e-5
    )


def test_a_row_that_asks_for_none_gets_none_beside_rows_that_do():
    sampler = Sampler(100, frozenset())
    logits = torch.randn(3, 100)
    rows = [
        sampler.make_row(SamplingParams(temperature=0.0, num_top_logprobs=k), 0, [1])
        for k in (None, 0, 3)
    ]

    none, chosen_only, three = sampler.sample(logits, rows)

    assert (none.logprob, none.top) == (None, ())
    assert chosen_only.logprob is not None
    assert chosen_only.top == ()
    assert len(three.top) == 3
    assert three.top[0] == (three.token_id, three.logprob)


def test_a_chosen_token_is_reported_though_it_is_not_among_the_best():
    sampler = Sampler(4, frozenset())
    params = SamplingParams(temperature=0.0, allowed_token_ids=(0,), num_top_logprobs=1)

    result = sampler.sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [sampler.make_row(params, 0, [])])

    assert result[0].token_id == 0
    assert result[0].top[0][0] == 3
    assert result[0].logprob == pytest.approx(
        reference.log_softmax([0.0, 1.0, 2.0, 3.0])[0], abs=1e-6
    )


def test_fewer_tokens_with_a_probability_than_asked_for_are_all_reported():
    logits = torch.full((1, 200), -math.inf)
    logits[0, [5, 150]] = 1.0
    sampler = Sampler(200, frozenset())
    row = sampler.make_row(SamplingParams(temperature=0.0, num_top_logprobs=5), 0, [])

    result = sampler.sample(logits, [row])[0]

    assert result.top == (
        (5, pytest.approx(math.log(0.5))),
        (150, pytest.approx(math.log(0.5))),
    )


def test_many_ties_at_the_top_are_reported_by_token_id():
    sampler = Sampler(50_000, frozenset())
    row = sampler.make_row(SamplingParams(temperature=0.0, num_top_logprobs=4), 0, [])

    result = sampler.sample(torch.ones(1, 50_000), [row])[0]

    assert [token_id for token_id, _ in result.top] == [0, 1, 2, 3]
    assert result.logprob == pytest.approx(-math.log(50_000), abs=1e-5)
