import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.blocks import block_maxima, to_blocked
from sampling.ranking import rank_best
from tests.unit.sampling import reference

# Both zeros are one number, and subnormal ones are numbers.
ODD_VALUES = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 3e38, -3e38, 2.5, -math.inf]


def ranked(logits, num_best):
    blocked = to_blocked(logits)
    return rank_best(blocked, block_maxima(blocked), num_best)


@settings(max_examples=80, deadline=None)
@given(
    vocabulary_size=st.sampled_from([1, 3, 64, 700, 5000]),
    num_best=st.sampled_from([1, 2, 5, 20, 10_000]),
    seed=st.integers(0, 9999),
    is_odd=st.booleans(),
)
def test_the_best_tokens_are_those_of_a_full_sort(vocabulary_size, num_best, seed, is_odd):
    generator = torch.Generator().manual_seed(seed)
    if is_odd:
        chosen = torch.randint(len(ODD_VALUES), (2, vocabulary_size), generator=generator)
        logits = torch.tensor(ODD_VALUES)[chosen]
    else:
        logits = torch.randn((2, vocabulary_size), generator=generator).bfloat16().float()

    found = ranked(logits, num_best)

    for index, row in enumerate(logits.tolist()):
        expected = [i for i in reference.ranked_ids(row)[:num_best] if row[i] > -math.inf]
        num_ranked = int(found.num_ranked[index])
        assert found.token_ids[index, :num_ranked].tolist() == expected
        assert found.logits[index, :num_ranked].tolist() == [row[i] for i in expected]


@pytest.mark.parametrize("num_best", [1, 20])
def test_a_row_that_is_not_a_number_disturbs_no_other(num_best):
    logits = torch.randn((3, 8192), generator=torch.Generator().manual_seed(1))
    healthy = ranked(logits, num_best)
    logits[1, 70] = math.nan

    found = ranked(logits, num_best)

    for index in (0, 2):
        assert torch.equal(found.token_ids[index], healthy.token_ids[index])
