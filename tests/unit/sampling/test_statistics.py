"""Draws follow the distribution. Seeds are fixed: the outcome is the same on every run.

The limits are those that a true distribution exceeds once in a million (chi-square, upper tail,
by degrees of freedom), so with other seeds a correct sampler would fail each of these that often.
"""

import pytest
import torch

from sampling.params import SamplingParams
from sampling.sampler import Sampler
from tests.unit.sampling import reference

NUM_DRAWS = 10_000
LIMITS = {3: 30.66, 5: 35.89, 7: 40.52}
LOGITS = [1.0, 0.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]


def expected_counts(params):
    kept = reference.kept_ids(
        LOGITS, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    probabilities = reference.softmax([LOGITS[i] / params.temperature for i in kept])
    return {i: p * NUM_DRAWS for i, p in zip(kept, probabilities, strict=True)}


@pytest.mark.parametrize("vocabulary_size", [8, 1000])
@pytest.mark.parametrize(
    ("params", "degrees"),
    [
        pytest.param(SamplingParams(), 7, id="plain"),
        pytest.param(SamplingParams(temperature=2.0), 7, id="hot"),
        pytest.param(SamplingParams(top_k=6), 5, id="top_k"),
        pytest.param(SamplingParams(top_p=0.8), 3, id="top_p"),
    ],
)
def test_many_seeds_draw_tokens_in_proportion(params, degrees, vocabulary_size):
    sampler = Sampler(vocabulary_size, frozenset())
    logits = torch.full((1, vocabulary_size), -torch.inf)
    places = torch.arange(8) * (vocabulary_size // 8)
    logits[0, places] = torch.tensor(LOGITS)
    rows = [sampler.make_row(params, seed, []) for seed in range(NUM_DRAWS)]

    counts = dict.fromkeys(places.tolist(), 0)
    for start in range(0, NUM_DRAWS, 2000):
        for each in sampler.sample(logits.expand(2000, -1), rows[start : start + 2000]):
            counts[each.token_id] += 1

    expected = expected_counts(params)
    assert len(expected) == degrees + 1
    observed = {i: counts[int(places[i])] for i in expected}
    assert sum(observed.values()) == NUM_DRAWS
    statistic = sum((observed[i] - e) ** 2 / e for i, e in expected.items())
    assert statistic < LIMITS[degrees]


def test_one_seed_draws_tokens_in_proportion_along_its_positions():
    sampler = Sampler(8, frozenset())
    row = sampler.make_row(SamplingParams(), 42, [])
    num_draws = 4000
    for _ in range(num_draws):
        sampler.sample(torch.tensor([LOGITS]), [row])

    expected = [p * num_draws for p in reference.softmax(LOGITS)]
    statistic = sum((row.output_token_ids.count(i) - e) ** 2 / e for i, e in enumerate(expected))

    assert statistic < LIMITS[7]


def test_a_nucleus_of_thousands_of_tokens_is_drawn_from_in_proportion():
    vocabulary_size, num_draws = 12_000, 800
    logits = torch.randn((1, vocabulary_size), generator=torch.Generator().manual_seed(3))
    sampler = Sampler(vocabulary_size, frozenset())
    rows = [sampler.make_row(SamplingParams(top_p=0.9), seed, []) for seed in range(num_draws)]

    results = [
        each
        for start in range(0, num_draws, 200)
        for each in sampler.sample(logits.expand(200, -1), rows[start : start + 200])
    ]

    # Eight groups of ranks of about equal mass.
    kept = reference.kept_ids(logits[0].tolist(), top_p=0.9)
    assert len(kept) > 5000
    mass = torch.tensor(reference.softmax([float(logits[0, i]) for i in kept])).double()
    group_of_rank = (mass.cumsum(dim=0) * 8).long().clamp(max=7)
    group_of = dict(zip(kept, group_of_rank.tolist(), strict=True))
    observed = torch.zeros(8).double()
    for each in results:
        observed[group_of[each.token_id]] += 1
    expected = torch.zeros(8).double().index_add_(0, group_of_rank, mass) * num_draws
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < LIMITS[7]
