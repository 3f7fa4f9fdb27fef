"""Sampling on a GPU: the CPU's tokens, one wait a step, rows that no neighbour changes."""

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sampling.params import SamplingParams
from sampling.sampler import Sampler

pytestmark = pytest.mark.gpu

VOCABULARY_SIZE = 49_152
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias=((5, 1.0),),
    bad_words_token_ids=((5,), (1, 6)),
    min_tokens=4,
    num_top_logprobs=5,
)
MIXES = {
    "greedy": [SamplingParams(temperature=0.0)],
    "plain": [SamplingParams()],
    "top_p": [SamplingParams(top_p=0.9)],
    "top_k": [SamplingParams(top_k=40)],
    "typical": [SamplingParams(typical_p=0.5)],
    "logprobs": [SamplingParams(temperature=0.0, num_top_logprobs=20)],
    "everything": [EVERYTHING],
    "all kinds": [
        EVERYTHING,
        SamplingParams(),
        SamplingParams(temperature=0.0, num_top_logprobs=0),
        SamplingParams(temperature=0.0, presence_penalty=1.0, allowed_token_ids=(3, 9)),
        SamplingParams(top_p=0.9),
        SamplingParams(typical_p=0.5, num_top_logprobs=3),
    ],
}


def random_logits(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_rows, VOCABULARY_SIZE), generator=generator) * 3


def make_rows(sampler, mix, num_rows):
    return [
        sampler.make_row(MIXES[mix][index % len(MIXES[mix])], index, [1, 2, 3])
        for index in range(num_rows)
    ]


def warm_up(sampler, logits, mix):
    """Let libraries load their kernels, which may wait for the device."""
    sampler.sample(logits, make_rows(sampler, mix, len(logits)))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_equal_those_of_the_cpu(dtype):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    logits = random_logits(32).to(dtype)
    logits[:, 30_000] = logits.amax(dim=1)  # ties

    expected = sampler.sample(logits, make_rows(sampler, "greedy", 32))
    found = sampler.sample(logits.to("cuda"), make_rows(sampler, "greedy", 32))

    assert [each.token_id for each in found] == [each.token_id for each in expected]


def test_drawn_tokens_equal_those_of_the_cpu_but_for_the_last_bit_of_a_weight():
    # The two devices' exp differ in the last bit: a draw within 1e-6 of a border may tip.
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    num_rows = 240
    logits = random_logits(num_rows)

    expected = sampler.sample(logits, make_rows(sampler, "all kinds", num_rows))
    found = sampler.sample(logits.to("cuda"), make_rows(sampler, "all kinds", num_rows))

    differing = [a for a, b in zip(found, expected, strict=True) if a.token_id != b.token_id]
    assert len(differing) <= 1
    for ours, theirs in zip(found, expected, strict=True):
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_copies_to_the_host_once(mix):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    logits = random_logits(12).to("cuda")
    warm_up(sampler, logits, mix)
    rows = make_rows(sampler, mix, 12)

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        sampler.sample(logits, rows)

    names = [event.name for event in found.events()]
    assert sum("Memcpy DtoH" in name for name in names) == 1


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_waits_for_the_device_once(mix):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    logits = random_logits(12).to("cuda")
    warm_up(sampler, logits, mix)
    rows = make_rows(sampler, mix, 12)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            sampler.sample(logits, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    waits = [each for each in found if "called a synchronizing" in str(each.message)]
    assert len(waits) == 1


@pytest.mark.parametrize("mix", MIXES)
def test_a_row_alone_equals_the_row_in_a_batch(mix):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    num_rows = 12
    logits = random_logits(num_rows).to("cuda")

    together = sampler.sample(logits, make_rows(sampler, mix, num_rows))

    alone = make_rows(sampler, mix, num_rows)
    for index in range(num_rows):
        (found,) = sampler.sample(logits[index : index + 1], [alone[index]])
        assert found == together[index]


def test_a_row_that_is_not_a_number_fails_alone():
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    logits = random_logits(12).to("cuda")
    healthy = sampler.sample(logits, make_rows(sampler, "all kinds", 12))
    for index in range(6):
        logits[index, 77] = [torch.nan, torch.inf][index % 2]

    found = sampler.sample(logits, make_rows(sampler, "all kinds", 12))

    assert all(each.error is not None for each in found[:6])
    assert found[6:] == healthy[6:]
