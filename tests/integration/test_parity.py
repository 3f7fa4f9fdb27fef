"""Greedy float32 parity with transformers' ``generate``, in mixed batches, for every family."""

import pytest
import torch

from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, Family, greedy_reference, make_model

pytestmark = pytest.mark.integration

NUM_TOKENS = 24
LONGEST = 40


def _jobs(prompts):
    return [
        (make_request(f"r{index}", temperature=0.0, max_tokens=NUM_TOKENS), prompt)
        for index, prompt in enumerate(prompts)
    ]


def _tokens(outputs):
    return [outputs[f"r{index}", 0].token_ids for index in range(len(outputs))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_tokens_in_a_mixed_batch_equal_those_of_generate(family):
    model = make_model(family)
    prompts = random_prompts(7, vocabulary_size=VOCABULARY_SIZE, seed=1, longest=LONGEST)
    expected = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20  # it could fail

    parts = make_parts(model, num_blocks=200, max_num_batched_tokens=19)
    outputs = run(parts, _jobs(prompts), arrivals={f"r{index}": 3 * index for index in range(7)})

    assert _tokens(outputs) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_tokens_survive_constant_preemption(family):
    model = make_model(family)
    prompts = random_prompts(5, vocabulary_size=VOCABULARY_SIZE, seed=2, longest=LONGEST)
    expected = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    num_blocks = -(-(max(map(len, prompts)) + NUM_TOKENS) // 4) + 1

    parts = make_parts(model, num_blocks=num_blocks, max_num_batched_tokens=17)
    outputs = run(parts, _jobs(prompts))

    assert _tokens(outputs) == expected
    assert parts.engine.stats().num_preemptions > 0


def test_a_window_shorter_than_the_text_changes_the_answer():
    # else the sliding-window families above would show nothing
    narrow = next(family for family in FAMILIES if family.name == "mistral")
    wide = Family("mistral", "mistral", {**narrow.extra, "sliding_window": None})
    prompt = list(range(30))

    assert greedy_reference(make_model(narrow), prompt, 8) != greedy_reference(
        make_model(wide), prompt, 8
    )


def _longrope_family(original: int) -> Family:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.5 * index for index in range(8)],
    }
    # Inside of rope_parameters the configuration class would overwrite it.
    extra = {"rope_parameters": rope, "original_max_position_embeddings": original}
    return Family("phi3", "phi3", extra)


@pytest.mark.parametrize("original", [32, 256])
def test_longrope_is_fixed_by_the_window_whatever_the_batch(original):
    # generate() uses the long factors once a row is longer than the original length; prompts
    # longer than that (or none at all, when the window is the original length) agree throughout.
    model = make_model(_longrope_family(original))
    prompts = [list(range(40)), list(range(60, 110))]
    expected = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    alone = make_parts(make_model(_longrope_family(original)), num_blocks=100)
    short = [(make_request("s", temperature=0.0, max_tokens=NUM_TOKENS), [5, 6, 7])]
    expected_short = run(alone, short)["s", 0].token_ids

    parts = make_parts(model, num_blocks=100)
    outputs = run(parts, [*_jobs(prompts), *short])

    assert [outputs[f"r{index}", 0].token_ids for index in range(2)] == expected
    assert outputs["s", 0].token_ids == expected_short


@pytest.mark.parametrize(
    "disturbance",
    [
        {"num_blocks": 200},
        {"num_blocks": 200, "max_num_batched_tokens": 17},
        {"num_blocks": 22, "max_num_batched_tokens": 17},
    ],
    ids=["batch", "chunks", "preemption"],
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_float32_logprobs_do_not_depend_on_the_batch(name, disturbance):
    model = make_model(next(family for family in FAMILIES if family.name == name))
    prompts = random_prompts(6, vocabulary_size=VOCABULARY_SIZE, seed=3, longest=LONGEST)
    jobs = [
        (
            make_request(f"r{index}", temperature=0.0, max_tokens=NUM_TOKENS, num_top_logprobs=3),
            prompt,
        )
        for index, prompt in enumerate(prompts)
    ]
    parts = make_parts(model, num_blocks=200, is_prefix_caching_enabled=False)
    alone = {}
    for job in jobs:
        alone.update(run(parts, [job]))

    disturbed = make_parts(model, **disturbance)
    together = run(disturbed, jobs, arrivals={f"r{index}": index for index in range(6)})

    for key, output in together.items():
        ours = torch.tensor([entry.logprob for entry in output.logprobs])
        theirs = torch.tensor([entry.logprob for entry in alone[key].logprobs])
        assert output.token_ids == alone[key].token_ids
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
