import math

import pytest
import torch

from sampling.errors import InvalidSamplingParamsError, NoTokenLeftError
from sampling.params import SamplingParams
from sampling.sampler import Sampler

VOCABULARY_SIZE = 8
EOS = 7
# Greedy order of tokens: 7, 6, 5, ...
RISING = torch.arange(float(VOCABULARY_SIZE))[None]


def greedy_token(output=(), **params):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({EOS}))
    row = sampler.make_row(SamplingParams(temperature=0.0, **params), 0, [1], output)
    return sampler.sample(RISING, [row])[0].token_id


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (((2, 5.5),), 2),
        (((7, -100.0),), 6),
        (((2, 3.0), (2, 3.0)), 2),
        (((2, 5.0),), 2),  # a tie with token 7
        ((), 7),
    ],
)
def test_bias_is_added_to_the_logit(bias, expected):
    assert greedy_token(logit_bias=bias) == expected


def test_only_allowed_tokens_are_chosen():
    assert greedy_token(allowed_token_ids=(3, 1, 3)) == 3


def test_a_bias_cannot_bring_back_a_token_that_is_not_allowed():
    assert greedy_token(allowed_token_ids=(3, 1), logit_bias=((5, 100.0),)) == 3


@pytest.mark.parametrize(
    ("output", "word", "expected"),
    [
        ((), (7,), 6),
        ((), (2, 7), 7),
        ((2,), (2, 7), 6),
        ((2, 3), (2, 7), 7),
        ((1, 2), (1, 2, 7), 6),
        ((2,), (1, 2, 7), 7),
        ((), (1, 7), 7),  # the prompt is [1]; only the output counts
        ((), (), 7),
    ],
)
def test_a_bad_word_is_stopped_at_its_last_token(output, word, expected):
    assert greedy_token(output, bad_words_token_ids=(word,)) == expected


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ((), {"min_tokens": 2}, 6),
        ((1,), {"min_tokens": 2}, 6),
        ((1, 1), {"min_tokens": 2}, 7),
        ((), {"min_tokens": 2, "stop_token_ids": (6, 5)}, 4),
        ((), {"min_tokens": 2, "stop_token_ids": (6,), "ignore_eos": True}, 7),
        ((), {"min_tokens": 2, "ignore_eos": True}, 7),
        ((), {"stop_token_ids": (7,)}, 7),
    ],
)
def test_what_ends_a_sequence_is_held_back_until_min_tokens_are_out(output, params, expected):
    assert greedy_token(output, **params) == expected


def test_eos_is_held_back_while_a_row_runs_on():
    sampler = Sampler(VOCABULARY_SIZE, frozenset({EOS}))
    row = sampler.make_row(SamplingParams(temperature=0.0, min_tokens=2), 0, [1])

    tokens = [sampler.sample(RISING, [row])[0].token_id for _ in range(3)]

    assert tokens == [6, 6, 7]


def test_an_eos_id_outside_of_the_logits_is_ignored():
    sampler = Sampler(VOCABULARY_SIZE, frozenset({EOS, 99}))
    row = sampler.make_row(SamplingParams(temperature=0.0, min_tokens=1), 0, [1])

    assert sampler.sample(RISING, [row])[0].token_id == 6


def test_masks_that_leave_nothing_fail_the_row_alone():
    sampler = Sampler(VOCABULARY_SIZE, frozenset({EOS}))
    stuck = SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)
    rows = [sampler.make_row(SamplingParams(temperature=0.0), 0, [1]) for _ in range(3)]
    rows[1] = sampler.make_row(stuck, 0, [1])

    results = sampler.sample(RISING.expand(3, -1), rows)

    assert [each.token_id for each in results] == [7, -1, 7]
    assert isinstance(results[1].error, NoTokenLeftError)
    assert rows[1].output_token_ids == []


def test_a_model_s_own_mask_stays_whatever_the_bias():
    logits = RISING.clone()
    logits[0, 5] = -math.inf
    sampler = Sampler(VOCABULARY_SIZE, frozenset())
    row = sampler.make_row(SamplingParams(temperature=0.0, logit_bias=((5, 100.0),)), 0, [1])

    assert sampler.sample(logits, [row])[0].token_id == 7


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((8, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"allowed_token_ids": (10**9,)},
        {"stop_token_ids": (-5,)},
        {"bad_words_token_ids": ((1, 8),)},
    ],
)
def test_a_token_id_outside_of_the_vocabulary_is_refused_when_the_row_joins(params):
    sampler = Sampler(VOCABULARY_SIZE, frozenset())

    with pytest.raises(InvalidSamplingParamsError, match="is not in"):
        sampler.make_row(SamplingParams(**params), 0, [1])
