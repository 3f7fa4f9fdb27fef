"""Row independence at token budgets of any size, odd ones too: bit for bit in bfloat16."""

import pytest
import torch

from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

pytestmark = pytest.mark.integration

PROMPTS = random_prompts(6, vocabulary_size=VOCABULARY_SIZE, seed=4, longest=40)


def outputs_of(budget, **options):
    # Heads of 32: of narrower ones the products of attention are not row-independent everywhere.
    model = make_model(FAMILIES[0], hidden_size=128, head_dim=32, intermediate_size=192)
    parts = make_parts(
        model.to(torch.bfloat16),
        num_blocks=200,
        max_num_batched_tokens=budget,
        max_num_seqs=min(16, budget),
        is_prefix_caching_enabled=False,
        **options,
    )
    jobs = [
        (make_request(f"r{index}", temperature=0.0, max_tokens=6, num_top_logprobs=1), prompt)
        for index, prompt in enumerate(PROMPTS)
    ]
    outputs = run(parts, jobs)
    return {
        name: [(told.token_id, told.logprob) for told in output.logprobs]
        for name, output in outputs.items()
    }


@pytest.fixture(scope="module")
def expected():
    return outputs_of(64)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 6, 7, 9, 13, 63])
def test_the_token_budget_of_a_step_changes_no_bit(expected, budget):
    assert outputs_of(budget) == expected
