"""Every operation that transformers has too, against its own processor, row by row."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.batch import SamplingBatch, SamplingRow
from sampling.blocks import block_maxima, block_weights, exact_mass, to_blocked
from sampling.filters import count_kept, typical_weights
from sampling.params import SamplingParams
from sampling.ranking import rank_best
from sampling.sampler import Sampler

VOCABULARY_SIZE = 300
EOS = 2
seeds = st.integers(0, 99_999)
token_lists = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=20)


def random_logits(seed, num_rows=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_rows, VOCABULARY_SIZE), generator=generator) * 2


def kept_probabilities(logits, params):
    """Return [V] float64: what each token of one row is drawn with."""
    batch = SamplingBatch.from_rows([SamplingRow(params, 0, (), [])], torch.device("cpu"))
    blocked = to_blocked(logits)
    maxima = block_maxima(blocked)
    row_maxima = maxima.amax(dim=1, keepdim=True)
    ranked = rank_best(blocked, maxima, blocked.shape[1])
    totals = exact_mass(block_weights(blocked, row_maxima, batch.temperature)).sum(dim=1)
    kept = count_kept(ranked, row_maxima, batch, totals)
    weights = torch.where(torch.arange(blocked.shape[1]) < kept.num_kept, kept.weights, 0.0)
    if params.typical_p < 1.0:
        weights = typical_weights(weights, batch.typical_p)
    probabilities = torch.zeros(blocked.shape[1], dtype=torch.float64)
    probabilities[ranked.token_ids[0]] = weights[0] / weights.sum()
    return probabilities[: logits.shape[1]]


def warpers(params):
    """Return what transformers has for it, in the order of ``generate``."""
    found = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        found.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        found.append(transformers.MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        found.append(transformers.TypicalLogitsWarper(params.typical_p))
    return transformers.LogitsProcessorList(found)


@settings(max_examples=80, deadline=None)
@given(
    seed=seeds,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 17, 250]),
        top_p=st.sampled_from([0.1, 0.777, 0.95, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.013, 0.31]),
        typical_p=st.sampled_from([0.23, 0.8, 1.0, 1.0]),
    ),
)
def test_temperature_and_filters_leave_what_those_of_transformers_leave(seed, params):
    logits = random_logits(seed)

    probabilities = kept_probabilities(logits, params)

    expected = warpers(params)(torch.zeros((1, 1), dtype=torch.int64), logits.double())
    torch.testing.assert_close(
        probabilities, expected[0].softmax(dim=0), atol=1e-6, rtol=1e-5, check_dtype=False
    )


def processed(logits, params, prompt, output):
    """Return the logits [V] float32 that are left for the draw of one row."""
    sampler = Sampler(VOCABULARY_SIZE, frozenset({EOS}))
    rows = [sampler.make_row(params, 0, prompt, output)]
    result = logits.clone()
    sampler._process_(result, rows)
    return result


@settings(max_examples=30, deadline=None)
@given(seed=seeds, prompt=token_lists, output=token_lists, penalty=st.sampled_from([0.6, 1.2, 3.0]))
def test_repetition_penalty_is_that_of_transformers(seed, prompt, output, penalty):
    logits = random_logits(seed)

    result = processed(logits, SamplingParams(repetition_penalty=penalty), prompt, output)

    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(result, theirs(torch.tensor([prompt + output]), logits))


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds,
    output=st.lists(st.integers(3, 7), min_size=1, max_size=6),
    words=st.lists(st.lists(st.integers(3, 7), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_bad_words_are_those_of_transformers(seed, output, words):
    logits = random_logits(seed)
    params = SamplingParams(bad_words_token_ids=tuple(tuple(word) for word in words))

    result = processed(logits, params, [1], output)

    theirs = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=EOS)
    assert torch.equal(result, theirs(torch.tensor([output]), logits))


@pytest.mark.parametrize("num_output_tokens", [0, 2, 3, 5])
def test_min_tokens_is_the_min_new_tokens_of_transformers(num_output_tokens):
    logits = random_logits(1)
    output = [9] * num_output_tokens

    result = processed(logits, SamplingParams(min_tokens=3), [1, 1], output)

    theirs = transformers.MinNewTokensLengthLogitsProcessor(2, 3, EOS, device="cpu")
    assert torch.equal(result, theirs(torch.tensor([[1, 1, *output]]), logits.clone()))


def test_a_bias_is_that_of_transformers():
    logits = random_logits(1)
    bias = ((5, 2.5), (7, -100.0), (299, 1e-3))

    result = processed(logits, SamplingParams(logit_bias=bias), [1], [])

    theirs = transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias])
    assert torch.equal(result, theirs(torch.tensor([[1]]), logits))


def test_allowed_tokens_are_the_prefix_allowed_tokens_of_transformers():
    logits = random_logits(1)

    result = processed(logits, SamplingParams(allowed_token_ids=(3, 200, 7)), [1], [])

    theirs = transformers.PrefixConstrainedLogitsProcessor(lambda *_: [3, 200, 7], num_beams=1)
    assert torch.equal(result, theirs(torch.tensor([[1]]), logits))
