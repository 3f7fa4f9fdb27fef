"""The law: what a row gets is the same bit for bit whatever the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.params import SamplingParams
from sampling.sampler import Sampler

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 20, 300]),
    top_p=st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 1.0]),
    typical_p=st.sampled_from([0.6, 1.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (4, -100.0))]),
    allowed_token_ids=st.sampled_from([(), (), (1, 2, 3, 70)]),
    bad_words_token_ids=st.sampled_from([(), ((5,), (2, 6))]),
    min_tokens=st.sampled_from([0, 3]),
    num_top_logprobs=st.sampled_from([None, 0, 5, 20]),
)


def run(sampler, logits, requests, num_steps=2):
    """Return each row's results and tokens, sampled together."""
    rows = [sampler.make_row(params, seed, prompt) for params, seed, prompt in requests]
    steps = [sampler.sample(logits, rows) for _ in range(num_steps)]
    return [
        [(each.token_id, each.logprob, each.top, type(each.error)) for each in results]
        for results in zip(*steps, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    params=st.lists(any_params, min_size=1, max_size=7),
    vocabulary_size=st.sampled_from([71, 128, 1000, 4099]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.3, 3.0]),
)
def test_a_row_alone_equals_the_row_in_a_batch(data, params, vocabulary_size, dtype, spread):
    seed = data.draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(params)
    logits = torch.randn((num_rows, vocabulary_size), generator=generator).mul_(spread).to(dtype)
    is_bad = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    if data.draw(st.booleans()):
        logits[torch.tensor(is_bad), 7] = torch.nan
    sampler = Sampler(vocabulary_size, frozenset({2}))
    requests = [(each, seed + i, [i % 5, 3, 3]) for i, each in enumerate(params)]
    order = data.draw(st.permutations(range(num_rows)))

    together = run(sampler, logits, requests)
    reordered = run(sampler, logits[torch.tensor(order)], [requests[i] for i in order])

    for index in range(num_rows):
        alone = run(sampler, logits[index : index + 1], [requests[index]])
        assert alone == [together[index]]
        assert [reordered[order.index(index)]] == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_large_vocabulary_is_the_same_in_any_batch_on_two_threads(dtype):
    torch.set_num_threads(2)
    logits = torch.randn((8, 49_152), generator=torch.Generator().manual_seed(1)).mul_(3).to(dtype)
    choices = [
        SamplingParams(num_top_logprobs=5),
        SamplingParams(top_p=0.9, num_top_logprobs=0),
        SamplingParams(top_k=50, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, num_top_logprobs=20),
        SamplingParams(top_p=0.99, temperature=1.4),
        SamplingParams(min_p=0.01),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3),
    ]
    sampler = Sampler(49_152, frozenset({0}))
    requests = [(params, 11 + i, [1, 2, 3]) for i, params in enumerate(choices)]

    together = run(sampler, logits, requests, num_steps=2)

    for size in (1, 3):
        for start in range(0, 8 - size + 1, size):
            part = slice(start, start + size)
            assert run(sampler, logits[part], requests[part], num_steps=2) == together[part]


@settings(max_examples=25, deadline=None)
@given(
    first=st.lists(any_params, min_size=1, max_size=5),
    params=any_params,
    before=st.lists(any_params, min_size=0, max_size=3),
    after=st.lists(any_params, min_size=0, max_size=3),
    seed=st.integers(0, 9999),
)
def test_a_row_equals_that_of_a_fresh_sampler_whoever_was_there_before_and_is_beside_it(
    first, params, before, after, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((5, 4099), generator=generator)
    beside = torch.randn((len(before) + 1 + len(after), 4099), generator=generator)
    place = len(before)
    beside[place] = logits[0]
    request = (params, seed, [1, 2])
    used = Sampler(4099, frozenset({2}))
    run(used, logits[: len(first)], [(each, i, [i]) for i, each in enumerate(first)])

    found = run(
        used,
        beside,
        [
            *((each, 50 + i, [3]) for i, each in enumerate(before)),
            request,
            *((each, 90 + i, [4]) for i, each in enumerate(after)),
        ],
    )

    assert [found[place]] == run(Sampler(4099, frozenset({2})), logits[:1], [request])


def test_logits_that_are_a_view_of_something_larger_give_the_same():
    logits = torch.randn((6, 200), generator=torch.Generator().manual_seed(2))
    wider = torch.zeros(12, 300)
    wider[::2, 50:250] = logits
    sampler = Sampler(200, frozenset())
    requests = [(SamplingParams(top_p=0.9, num_top_logprobs=2), i, [1]) for i in range(6)]

    assert run(sampler, wider[::2, 50:250], requests) == run(sampler, logits, requests)
