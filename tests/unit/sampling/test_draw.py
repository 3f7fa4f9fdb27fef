import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import ranking
from sampling.batch import SamplingBatch, SamplingRow
from sampling.blocks import block_maxima, cumulative_mass, to_blocked
from sampling.draw import draw_filtered, draw_plain, draw_without_looking
from sampling.params import SamplingParams
from tests.unit.sampling import reference

# Where rounding may tip a boundary either way, both sides are right.
EPSILON = 1e-6

filtered_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 500]),
    top_p=st.sampled_from([0.0, 1e-4, 0.3, 0.77, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([0.2, 0.7, 1.0, 1.0]),
)
uniforms = st.floats(0.0, 1.0, exclude_max=True)


def batch_of(params, uniform):
    rows = [SamplingRow(each, 0, (), []) for each in params]
    return dataclasses.replace(
        SamplingBatch.from_rows(rows, torch.device("cpu")),
        uniform=torch.tensor(uniform, dtype=torch.float64),
    )


def random_logits(seed, num_rows, vocabulary_size, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_rows, vocabulary_size), generator=generator).mul_(spread)


def draw(logits, params, uniform):
    blocked = to_blocked(logits)
    return draw_filtered(blocked, block_maxima(blocked), batch_of(params, uniform)).tolist()


def is_right(token, logits, params, uniform):
    """Whether the reference draws this token too, with every boundary moved a little."""
    for sign in (0.0, -1.0, 1.0):
        shift = sign * EPSILON
        kept = reference.kept_ids(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(max(params.top_p + shift, 0.0), 1.0) if params.top_p < 1.0 else 1.0,
            min_p=min(params.min_p * (1.0 + shift), 1.0),
            typical_p=params.typical_p + shift if params.typical_p < 1.0 else 1.0,
        )
        if token in kept:
            low, high = reference.share_of(logits, kept, params.temperature, token)
            if low - EPSILON <= uniform < high + EPSILON:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(
    params=filtered_params,
    uniform=uniforms,
    seed=st.integers(0, 10**6),
    vocabulary_size=st.integers(1, 1500) | st.integers(1000, 4000),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
)
def test_a_filtered_draw_equals_the_plain_reference(params, uniform, seed, vocabulary_size, spread):
    logits = random_logits(seed, 1, vocabulary_size, spread)

    token = draw(logits, [params], [uniform])[0]

    assert is_right(token, logits[0].tolist(), params, uniform)


@settings(max_examples=60, deadline=None)
@given(params=filtered_params, uniform=uniforms, seed=st.integers(0, 10**6))
def test_ties_of_coarse_logits_are_ranked_by_token_id(params, uniform, seed):
    logits = random_logits(seed, 1, 300).round()

    token = draw(logits, [params], [uniform])[0]

    assert is_right(token, logits[0].tolist(), params, uniform)


@settings(max_examples=60, deadline=None)
@given(
    uniform=uniforms,
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 1.0, 5.0]),
    vocabulary_size=st.integers(1, 1500) | st.integers(1000, 4000),
)
def test_a_plain_draw_equals_the_inverse_cdf_in_order_of_token_ids(
    uniform, seed, temperature, vocabulary_size
):
    logits = random_logits(seed, 1, vocabulary_size)
    params = SamplingParams(temperature=temperature)

    blocked = to_blocked(logits)
    batch = batch_of([params], [uniform])
    token = int(draw_plain(blocked, blocked.amax(1, keepdim=True), batch)[0])

    order = list(range(vocabulary_size))
    low, high = reference.share_of(logits[0].tolist(), order, temperature, token)
    assert low - EPSILON <= uniform < high + EPSILON


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(filtered_params, min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_the_token_does_not_depend_on_how_many_were_ranked(params, seed, spread):
    logits = random_logits(seed, len(params), 3000, spread).bfloat16().float()
    uniform = torch.rand(len(params), generator=torch.Generator().manual_seed(seed)).tolist()

    few_ranked = draw(logits, params, uniform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "MAX_NUM_CANDIDATES", 0)
        all_ranked = draw(logits, params, uniform)

    assert few_ranked == all_ranked


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(filtered_params, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    vocabulary_size=st.sampled_from([1, 70, 1500, 9000]),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    is_coarse=st.booleans(),
)
def test_the_way_of_a_gpu_gives_the_same_tokens(params, seed, vocabulary_size, spread, is_coarse):
    logits = random_logits(seed, len(params), vocabulary_size, spread)
    logits = logits.bfloat16().float() if is_coarse else logits
    uniform = torch.rand(len(params), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = batch_of(params, uniform)
    blocked = to_blocked(logits)
    maxima = block_maxima(blocked)
    row_maxima = maxima.amax(dim=1, keepdim=True)
    totals = cumulative_mass(blocked, row_maxima, batch.temperature)[:, -1]

    without_looking = draw_without_looking(blocked, maxima, row_maxima, batch, totals)

    assert without_looking.tolist() == draw_filtered(blocked, maxima, batch).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9999999),
        SamplingParams(min_p=1e-6),
        SamplingParams(top_k=5000),
        SamplingParams(top_k=5000, top_p=0.9),
        SamplingParams(typical_p=0.9),
    ],
    ids=str,
)
def test_a_flat_row_of_a_large_vocabulary_is_drawn_beyond_the_first_candidates(params):
    logits = random_logits(3, 1, 20_000, 0.1)

    token = draw(logits, [params], [0.6])[0]

    assert is_right(token, logits[0].tolist(), params, 0.6)
    assert token not in reference.ranked_ids(logits[0].tolist())[:256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 1e-4}, {"min_p": 1.0}, {"top_k": 5}])
def test_a_tiny_temperature_gives_the_best_token(dtype, temperature, filters):
    logits = random_logits(5, 8, 1000).to(dtype)
    logits[torch.arange(8), torch.arange(8) * 100] = 20.0
    params = SamplingParams(temperature=temperature, **filters)
    batch = batch_of([params] * 8, [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 1.0 - 2.0**-53])

    blocked = to_blocked(logits)
    maxima = block_maxima(blocked)
    if filters:
        tokens = draw_filtered(blocked, maxima, batch)
    else:
        tokens = draw_plain(blocked, maxima.amax(1, keepdim=True), batch)

    assert tokens.tolist() == [index * 100 for index in range(8)]


@pytest.mark.parametrize("temperature", [1e10, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_not_masked(temperature):
    logits = torch.full((4, 100), -math.inf)
    logits[:, 10:14] = torch.tensor([5.0, -3.0, 0.0, 9.0])
    batch = batch_of([SamplingParams(temperature=temperature)] * 4, [0.1, 0.3, 0.6, 0.9])

    blocked = to_blocked(logits)
    tokens = draw_plain(blocked, blocked.amax(1, keepdim=True), batch)

    assert tokens.tolist() == [10, 11, 12, 13]


def test_top_p_zero_and_top_k_one_take_the_best_token():
    logits = random_logits(9, 2, 500, 0.1)

    tokens = draw(logits, [SamplingParams(top_p=0.0), SamplingParams(top_k=1)], [0.99, 0.99])

    assert tokens == logits.argmax(dim=1).tolist()


def test_min_p_one_draws_among_the_ties_of_the_best_only():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]])

    tokens = {draw(logits, [SamplingParams(min_p=1.0)], [u / 10])[0] for u in range(10)}

    assert tokens == {1, 3, 4}


def test_the_mass_of_top_p_is_that_of_top_k_s_remainder():
    # Of four equal tokens top_k leaves two; half of their mass is one token, of all it is two.
    logits = torch.zeros(1, 4)
    params = SamplingParams(top_k=2, top_p=0.5)

    assert {draw(logits, [params], [u / 10])[0] for u in range(10)} == {0}


def test_top_p_counts_the_mass_of_top_k_that_min_p_would_cut_off():
    # 1000 tokens of weight 1 and 4000 of e**-1 hold 2471; 0.3 of that are 742 tokens, all of
    # which min_p keeps. Of these the number 0.6 draws the 445th.
    logits = torch.full((1, 20_000), -20.0)
    logits[0, :1000] = 1.0
    logits[0, 1000:5000] = 0.0

    token = draw(logits, [SamplingParams(top_k=5000, top_p=0.3, min_p=0.5)], [0.6])[0]

    assert token == 445


def test_a_row_with_few_tokens_left_needs_no_second_ranking():
    blocked = torch.full((1, 4096), -math.inf)
    blocked[0, [3, 900]] = torch.tensor([1.0, 2.0])

    maxima = block_maxima(blocked)
    best = ranking.best_maxima(maxima, 16)

    ranked = ranking.rank_leading(blocked, maxima, best, torch.tensor([16]))

    assert ranked.is_complete.tolist() == [True]
    assert ranked.token_ids.tolist() == [[900, 3]]
