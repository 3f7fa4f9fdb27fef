"""The engine on a GPU: parity with ``generate`` and memory that comes back."""

import gc

import pytest
import torch

from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, greedy_reference, make_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 16


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_tokens_on_the_gpu_equal_those_of_generate_on_the_cpu(family):
    prompts = random_prompts(5, vocabulary_size=VOCABULARY_SIZE, seed=1, longest=30)
    expected = [greedy_reference(make_model(family), prompt, NUM_TOKENS) for prompt in prompts]

    parts = make_parts(make_model(family).to("cuda"), num_blocks=150, max_num_batched_tokens=19)
    jobs = [
        (make_request(f"r{index}", temperature=0.0, max_tokens=NUM_TOKENS), prompt)
        for index, prompt in enumerate(prompts)
    ]
    outputs = run(parts, jobs, arrivals={f"r{index}": 2 * index for index in range(5)})

    assert [outputs[f"r{index}", 0].token_ids for index in range(5)] == expected


def test_memory_of_an_engine_comes_back():
    gc.collect()
    before = torch.cuda.memory_allocated()

    parts = make_parts(make_model(FAMILIES[0]).to("cuda"))
    run(parts, [(make_request("r", max_tokens=4), [1, 2, 3])])
    assert torch.cuda.memory_allocated() > before
    del parts
    gc.collect()

    assert torch.cuda.memory_allocated() == before
