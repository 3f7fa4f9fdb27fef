"""Tables, heads, whole modules and single tokens of adapters, through the engine, equal PEFT."""

import copy

import pytest
import torch
from peft import PeftModel

from models.config import AdapterConfig
from tests.harness import make_parts, make_request, random_prompts, run
from tests.integration.test_adapters import SHARED, greedy_by_forward
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.adapters.peft_adapters import SavedAdapter, facts_of, quiet
from tests.unit.models.runner.test_adapter_tables import BASES, table_configs

pytestmark = pytest.mark.integration

NUM_TOKENS = 6
NAMES = ("embedding", "head", "saved-both", "saved-norms", "ia3", "tokens", "tokens-of-both")


def save_all(folder, base, family, names=NAMES):
    """Let PEFT save adapters; return the readers of their folders by name."""
    configs = table_configs(family)
    return {
        name: SavedAdapter(folder / name, base, configs[name], adapter_id=name) for name in names
    }


def reference(base, adapter):
    """Return PEFT's model, or the base model for None."""
    if adapter is None:
        return base
    with quiet():
        return PeftModel.from_pretrained(copy.deepcopy(base), adapter.folder).eval()


def make_jobs(names):
    """Return jobs, two after each other with one prompt, and the adapter's name of each."""
    own = random_prompts(len(names), vocabulary_size=VOCABULARY_SIZE, seed=7, longest=9)
    jobs = [
        (
            make_request(f"r{index}", temperature=0.0, max_tokens=NUM_TOKENS, num_top_logprobs=2),
            SHARED + own[index // 2],
        )
        for index in range(len(names))
    ]
    return jobs, {f"r{index}": name for index, name in enumerate(names) if name is not None}


def make_engine(base, **options):
    fields = {name: options.pop(name) for name in ("max_num_slots",) if name in options}
    return make_parts(
        copy.deepcopy(base),
        adapters=AdapterConfig(path="given by hand", **fields),
        **{"num_blocks": 400, "max_num_batched_tokens": 37} | options,
    )


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "gpt2", "qwen3-moe"])
def test_a_mixed_batch_with_prefix_caching_equals_pefts_forward(tmp_path, family):
    base = BASES[family]
    adapters = save_all(tmp_path, base, family)
    facts = facts_of(base)
    jobs, owners = make_jobs([None, *adapters, None])
    expected = {
        request.request_id: greedy_by_forward(
            reference(base, adapters.get(owners.get(request.request_id))), prompt, NUM_TOKENS
        )
        for request, prompt in jobs
    }
    assert len({tuple(tokens) for tokens in expected.values()}) > 6  # adapters show

    outputs = run(
        make_engine(base),
        jobs,
        arrivals={request.request_id: index for index, (request, _) in enumerate(jobs)},
        adapters={key: adapters[name].read(facts) for key, name in owners.items()},
    )

    assert {key[0]: output.token_ids for key, output in outputs.items()} == expected


def test_in_bfloat16_neighbours_slots_and_churn_change_no_bit(tmp_path):
    family = next(each for each in FAMILIES if each.name == "llama")
    # Products of at least 64 x 64: below, torch takes another kernel for few rows.
    options = {
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
    }
    wide = make_model(family, **options)
    base = make_model(family, dtype=torch.bfloat16, **options)
    facts = facts_of(wide)
    weights = {
        name: adapter.read(facts) for name, adapter in save_all(tmp_path, wide, "llama").items()
    }
    jobs, owners = make_jobs([None, *weights, None, *weights])
    by_request = {request_id: weights[name] for request_id, name in owners.items()}
    solo = make_engine(base, is_prefix_caching_enabled=False)
    alone = {}
    for job in jobs:
        alone |= run(solo, [job], adapters=by_request)

    crowd = run(make_engine(base, max_num_seqs=32), jobs, adapters=by_request)
    churn = run(
        make_engine(base, max_num_slots=2, max_num_batched_tokens=16),
        list(reversed(jobs)),
        adapters=by_request,
    )

    for outputs in (crowd, churn):
        for key, output in outputs.items():
            assert output.token_ids == alone[key].token_ids, key
            assert output.logprobs == alone[key].logprobs, key


def test_log_probabilities_of_a_prompt_come_from_the_adapters_own_head(tmp_path):
    base = BASES["llama"]
    names = ("head", "saved-head", "tokens-of-head", "ia3")
    adapters = save_all(tmp_path, base, "llama", names)
    facts = facts_of(base)
    jobs = [
        (make_request(name, temperature=0.0, max_tokens=1, num_prompt_logprobs=0), SHARED)
        for name in (*names, "base")
    ]

    outputs = run(
        make_engine(base, max_num_scored_positions=5),
        jobs,
        adapters={name: adapters[name].read(facts) for name in names},
    )

    for name in (*names, "base"):
        model = reference(base, adapters.get(name))
        with torch.inference_mode():
            logits = model(torch.tensor([SHARED]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[range(len(SHARED) - 1), SHARED[1:]]
        told = [each.logprob for each in outputs[name, 0].prompt_logprobs]
        assert torch.allclose(torch.tensor(told), expected, atol=2e-4), name
