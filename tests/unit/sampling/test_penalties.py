import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.params import SamplingParams
from sampling.penalties import PenaltyProcessor, TokenCounts
from sampling.processors import ActiveRow
from sampling.sampler import SamplingRow
from tests.unit.sampling import reference

VOCABULARY_SIZE = 12
token_lists = st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=20)
penalty_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.5]),
)


def applied(logits, rows):
    processor = PenaltyProcessor()
    states = [(index, row, processor.make_state(row)) for index, row in enumerate(rows)]
    active = [ActiveRow(*each) for each in states if each[2] is not None]
    result = logits.clone()
    if active:
        processor.apply_(result, active)
    return result


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(penalty_params, token_lists, token_lists), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_penalties_equal_the_plain_reference_in_any_mix_of_rows(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(rows), VOCABULARY_SIZE), generator=generator) * 3

    result = applied(logits, [SamplingRow(p, 0, prompt, output) for p, prompt, output in rows])

    expected = [
        reference.penalized_logits(before, *row)
        for before, row in zip(logits.tolist(), rows, strict=True)
    ]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_frequency_and_presence_leave_the_prompt_alone():
    row = SamplingRow(SamplingParams(frequency_penalty=1.0, presence_penalty=1.0), 0, [1, 1], [2])

    result = applied(torch.ones(1, 4), [row])

    assert result.tolist() == [[1.0, 1.0, -1.0, 1.0]]


def test_a_state_that_catches_up_equals_one_that_is_made_again():
    params = SamplingParams(repetition_penalty=1.5)
    output = [3, 5, 3, *range(100, 400)]
    row = SamplingRow(params, 0, [1, 2, 3], [])
    grown = TokenCounts(row)
    for length in range(len(output) + 1):
        grown.catch_up(output[:length])

    fresh = TokenCounts(row)
    fresh.catch_up(output)

    seen = fresh.ids_and_counts.tolist()
    assert grown.ids_and_counts.tolist() == seen
    assert dict(zip(seen[::2], seen[1::2], strict=True))[3] == 2.0


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
def test_an_extreme_penalty_leaves_numbers_and_masks(penalty):
    logits = torch.tensor([[5.0, 0.0, -5.0, -math.inf, 1.0]])
    row = SamplingRow(SamplingParams(repetition_penalty=penalty), 0, [0, 1, 2, 3], [])

    result = applied(logits, [row])[0]

    assert result[:3].isfinite().all()
    assert result[3] == -math.inf
    assert result[4] == 1.0


def test_a_row_without_penalties_has_no_state():
    row = SamplingRow(SamplingParams(), 0, [1], [2])

    assert PenaltyProcessor().make_state(row) is None
