import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.errors import NonFiniteLogitsError
from sampling.params import SamplingParams, derive_seed
from sampling.sampler import Sampler

VOCABULARY_SIZE = 500
GREEDY = SamplingParams(temperature=0.0)


def make_sampler(vocabulary_size=VOCABULARY_SIZE):
    return Sampler(vocabulary_size, frozenset({0}))


def random_logits(num_rows, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_rows, VOCABULARY_SIZE), generator=generator).mul_(2).to(dtype)


def test_no_rows_give_no_results():
    assert make_sampler().sample(torch.zeros(0, VOCABULARY_SIZE), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_best_tokens(dtype):
    logits = torch.zeros((2, VOCABULARY_SIZE), dtype=dtype)
    logits[0, [490, 77, 78]] = 3.0
    sampler = make_sampler()

    results = sampler.sample(logits, [sampler.make_row(GREEDY, 0, [1]) for _ in range(2)])

    assert [each.token_id for each in results] == [77, 0]


def test_a_drawn_token_is_appended_to_the_row():
    sampler = make_sampler()
    row = sampler.make_row(SamplingParams(), 5, [1], [9, 9])

    result = sampler.sample(random_logits(1), [row])[0]

    assert row.output_token_ids == [9, 9, result.token_id]


def test_the_caller_s_tokens_are_copied():
    sampler = make_sampler()
    output = [9]
    row = sampler.make_row(GREEDY, 0, [1], output)

    sampler.sample(random_logits(1), [row])

    assert output == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary_size", [448, 500])
def test_the_logits_are_left_as_they_were(dtype, vocabulary_size):
    sampler = make_sampler(vocabulary_size)
    logits = random_logits(3, dtype=dtype)[:, :vocabulary_size].contiguous()
    before = logits.clone()
    params = SamplingParams(
        repetition_penalty=1.5, logit_bias=((1, 5.0),), allowed_token_ids=(1, 2), top_p=0.5
    )

    sampler.sample(logits, [sampler.make_row(params, i, [1]) for i in range(3)])

    assert torch.equal(logits, before)


def test_log_probabilities_are_raw_though_processors_share_the_batch():
    # 448 is a multiple of the block size: the logits are used without a copy until then.
    sampler = make_sampler(448)
    logits = random_logits(1)[:, :448].contiguous()
    plain = SamplingParams(temperature=0.0, num_top_logprobs=2)
    biased = SamplingParams(temperature=0.0, num_top_logprobs=2, logit_bias=((3, 100.0),))

    results = sampler.sample(
        logits.expand(2, -1), [sampler.make_row(each, 0, [1]) for each in (plain, biased)]
    )

    assert results[0].top == results[1].top
    assert results[1].token_id == 3
    assert results[1].logprob == pytest.approx(float(logits[0].log_softmax(dim=0)[3]), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    num_before=st.integers(0, 6),
    params=st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(top_p=0.9, frequency_penalty=1.0, repetition_penalty=1.2),
            SamplingParams(top_k=20, min_tokens=4, bad_words_token_ids=((3, 4),)),
        ]
    ),
)
def test_a_row_made_again_goes_on_as_if_undisturbed(seed, num_before, params):
    sampler = make_sampler()
    steps = [random_logits(1, step) for step in range(8)]
    undisturbed = sampler.make_row(params, seed, [5, 6])
    for logits in steps:
        sampler.sample(logits, [undisturbed])

    resumed = make_sampler().make_row(
        params, seed, [5, 6], undisturbed.output_token_ids[:num_before]
    )
    for logits in steps[num_before:]:
        sampler.sample(logits, [resumed])

    assert resumed.output_token_ids == undisturbed.output_token_ids


def test_equal_seeds_repeat_and_different_seeds_differ():
    sampler = make_sampler()
    logits = random_logits(1).mul_(0.1)

    def tokens(seed):
        row = sampler.make_row(SamplingParams(), seed, [1])
        for _ in range(20):
            sampler.sample(logits, [row])
        return row.output_token_ids

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(derive_seed(1, choice))) for choice in range(5)}) == 5


@pytest.mark.parametrize(
    "bad_values", [[math.nan], [math.inf], [math.nan, math.inf], [-math.inf] * VOCABULARY_SIZE]
)
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(), SamplingParams(top_p=0.9, num_top_logprobs=3, min_tokens=2)],
    ids=["greedy", "plain", "filtered"],
)
def test_a_row_of_bad_logits_fails_alone(bad_values, params):
    sampler = make_sampler()
    logits = random_logits(3)
    rows = [sampler.make_row(params, i, [1]) for i in range(3)]
    healthy = sampler.sample(logits, [sampler.make_row(params, i, [1]) for i in range(3)])
    logits[1, : len(bad_values)] = torch.tensor(bad_values)

    results = sampler.sample(logits, rows)

    assert results[0] == healthy[0]
    assert results[2] == healthy[2]
    assert isinstance(results[1].error, NonFiniteLogitsError)
    assert results[1].token_id == -1
    assert rows[1].output_token_ids == []


def test_single_masked_tokens_of_a_model_are_no_fault():
    logits = random_logits(1)
    logits[0, ::2] = -math.inf
    sampler = make_sampler()
    row = sampler.make_row(SamplingParams(), 3, [1])

    for _ in range(50):
        assert sampler.sample(logits, [row])[0].error is None

    assert all(token_id % 2 == 1 for token_id in row.output_token_ids)


def test_all_filters_and_a_tiny_temperature_at_once_give_the_greedy_token():
    sampler = make_sampler()
    logits = random_logits(4, dtype=torch.bfloat16)
    logits[torch.arange(4), torch.tensor([3, 99, 100, 499])] = 30.0
    params = SamplingParams(temperature=1e-9, top_p=1e-4, top_k=40, min_p=1.0, typical_p=0.5)

    results = sampler.sample(logits, [sampler.make_row(params, i, [1]) for i in range(4)])

    assert [each.token_id for each in results] == [3, 99, 100, 499]
