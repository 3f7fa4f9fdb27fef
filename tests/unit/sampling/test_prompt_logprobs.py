"""Log probabilities and ranks of known tokens against a slow reference and against the sampler."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import prompt_logprobs as module
from sampling.errors import NonFiniteLogitsError
from sampling.params import SamplingParams
from sampling.prompt_logprobs import KnownToken, prompt_logprobs
from sampling.sampler import Sampler
from tests.unit.sampling import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_rows(num_rows, vocabulary_size, dtype, seed):
    """Return logits with many ties, and the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((num_rows, vocabulary_size), generator=generator).mul_(4)
    if seed % 2:
        logits = logits.round()
    tokens = torch.randint(vocabulary_size, (num_rows,), generator=generator).tolist()
    return logits.to(dtype), tokens


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    vocabulary_size=st.sampled_from([1, 2, 63, 64, 65, 199, 1500]),
    dtype=st.sampled_from(DTYPES),
    num_top=st.integers(0, 20),
    seed=st.integers(0, 9999),
)
def test_every_number_is_that_of_a_slow_reference(num_rows, vocabulary_size, dtype, num_top, seed):
    logits, tokens = random_rows(num_rows, vocabulary_size, dtype, seed)

    results = prompt_logprobs(logits, tokens, [num_top] * num_rows)

    for raw, token_id, result in zip(logits.tolist(), tokens, results, strict=True):
        expected, order = reference.log_softmax(raw), reference.ranked_ids(raw)
        assert result.token_id == token_id
        assert result.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert result.rank == 1 + order.index(token_id)
        assert [other for other, _ in result.top] == order[:num_top]
        assert [value for _, value in result.top] == pytest.approx(
            [expected[other] for other in order[:num_top]], abs=1e-5
        )


@settings(max_examples=30, deadline=None)
@given(
    vocabulary_size=st.sampled_from([3, 199, 4099]),
    dtype=st.sampled_from(DTYPES),
    num_top=st.sampled_from([0, 3, 20]),
    seed=st.integers(0, 9999),
)
def test_a_drawn_token_reports_the_same_bits(vocabulary_size, dtype, num_top, seed):
    logits, _ = random_rows(4, vocabulary_size, dtype, seed)
    sampler = Sampler(vocabulary_size, frozenset())
    params = SamplingParams(num_top_logprobs=num_top, temperature=1.3)
    drawn = sampler.sample(logits, [sampler.make_row(params, seed + i, [0]) for i in range(4)])

    known = prompt_logprobs(logits, [row.token_id for row in drawn], [num_top] * 4)

    assert [(row.logprob, row.top) for row in drawn] == [(row.logprob, row.top) for row in known]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary_size", [199, 20_001])
def test_a_row_alone_equals_the_row_among_others_of_any_number(dtype, vocabulary_size):
    num_rows = 2 * module.SLICE_ROWS + 3
    logits, tokens = random_rows(num_rows, vocabulary_size, dtype, 4)
    num_top = [index % 7 for index in range(num_rows)]
    logits[5, 7] = math.nan

    together = prompt_logprobs(logits, tokens, num_top)

    for index in range(num_rows):
        one = slice(index, index + 1)
        (alone,) = prompt_logprobs(logits[one], tokens[one], num_top[one])
        if index == 5:
            assert isinstance(alone, NonFiniteLogitsError)
            assert isinstance(together[5], NonFiniteLogitsError)
        else:
            assert alone == together[index]


@pytest.mark.parametrize("slice_rows", [1, 7, 1000])
def test_the_size_of_the_slices_changes_nothing(slice_rows):
    logits, tokens = random_rows(40, 500, torch.float32, 8)
    expected = prompt_logprobs(logits, tokens, [3] * 40)

    with mock.patch.object(module, "SLICE_ROWS", slice_rows):
        assert prompt_logprobs(logits, tokens, [3] * 40) == expected


def test_no_more_than_a_slice_of_rows_is_converted_at_a_time(monkeypatch):
    heights = []
    to_blocked = module.to_blocked
    monkeypatch.setattr(
        module, "to_blocked", lambda rows: (heights.append(len(rows)), to_blocked(rows))[1]
    )

    prompt_logprobs(torch.zeros(100, 70, dtype=torch.bfloat16), [0] * 100, [0] * 100)

    assert max(heights) == module.SLICE_ROWS
    assert sum(heights) == 100


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_is_an_error_of_its_own(bad):
    logits, tokens = random_rows(3, 100, torch.float32, 2)
    expected = prompt_logprobs(logits, tokens, [2, 2, 2])
    logits[1, :] = bad

    first, failed, last = prompt_logprobs(logits, tokens, [2, 2, 2])

    assert isinstance(failed, NonFiniteLogitsError)
    assert [first, last] == [expected[0], expected[2]]


def test_a_slice_of_bad_rows_only_is_all_errors():
    results = prompt_logprobs(torch.full((2, 70), math.nan), [0, 1], [1, 1])

    assert [type(result) for result in results] == [NonFiniteLogitsError] * 2


def test_an_impossible_token_has_minus_infinity_and_stands_behind_the_possible_ones():
    logits = torch.full((2, 130), -math.inf)
    logits[:, [5, 129]] = 1.0

    first, second = prompt_logprobs(logits, [0, 128], [5, 5])

    half = pytest.approx(math.log(0.5))
    top = ((5, half), (129, half))
    assert first == KnownToken(0, -math.inf, 3, top)
    # behind both possible ones and the impossible ones of lower ids
    assert second == KnownToken(128, -math.inf, 2 + 127 + 1, top)


def test_the_logits_are_left_as_they_were():
    logits, tokens = random_rows(3, 128, torch.float32, 5)
    before = logits.clone()

    prompt_logprobs(logits, tokens, [2, 0, 1])

    assert torch.equal(logits, before)


def test_no_rows_are_no_results():
    assert prompt_logprobs(torch.zeros(0, 64), [], []) == []
