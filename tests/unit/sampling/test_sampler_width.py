"""Logits may have more columns in one step than in another; a processor sees those there are."""

import math

import torch

from sampling.params import SamplingParams
from sampling.sampler import Sampler

NUM_COLUMNS = 199


class Flatten:
    """Makes all tokens that it sees equally likely, and notes how many these are."""

    is_argmax_invariant = False

    def __init__(self):
        self.widths = []

    def make_state(self, row):
        return True

    def apply_(self, logits, active):
        self.widths.append(logits.shape[1])
        logits.zero_()


def make_logits(num_added):
    logits = torch.randn(2, NUM_COLUMNS, generator=torch.Generator().manual_seed(1)) * 5
    return torch.nn.functional.pad(logits, (0, num_added), value=-math.inf)


def test_a_processor_sees_the_steps_columns_and_nothing_of_the_padding():
    processor = Flatten()
    sampler = Sampler(NUM_COLUMNS + 100, frozenset(), [processor])
    rows = [sampler.make_row(SamplingParams(temperature=1.0), seed, ()) for seed in (1, 2)]

    drawn = [
        [each.token_id for each in sampler.sample(make_logits(num_added), rows)]
        for num_added in (0, 3) * 20
    ]

    assert processor.widths == [NUM_COLUMNS, NUM_COLUMNS + 3] * 20
    assert max(max(tokens) for tokens in drawn[::2]) < NUM_COLUMNS
    assert max(max(tokens) for tokens in drawn) < NUM_COLUMNS + 3


def test_columns_of_minus_infinity_change_no_bit():
    params = [
        SamplingParams(temperature=1.0, num_top_logprobs=3, frequency_penalty=0.5),
        SamplingParams(temperature=0.8, num_top_logprobs=3, top_p=0.9, min_p=0.01),
    ]
    told = []
    for num_added in (0, 3, 64, 90):
        sampler = Sampler(NUM_COLUMNS + 100, frozenset())
        rows = [sampler.make_row(each, seed, (5, 6)) for seed, each in enumerate(params)]
        told.append([sampler.sample(make_logits(num_added), rows) for _ in range(20)])

    assert all(each == told[0] for each in told)
