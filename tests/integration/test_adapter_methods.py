"""Adapters of every method in one engine: each row gets what PEFT's own forward says of it."""

import copy

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
)

from tests.harness import run
from tests.integration.test_adapters import (
    greedy_by_forward,
    make_engine,
    make_jobs,
    weights_of,
)
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import MODELS, SavedAdapter, facts_of, quiet
from tests.unit.models.runner.test_adapter_layers import FEEDFORWARD, LINEARS

pytestmark = pytest.mark.integration

NUM_TOKENS = 6
# Products of at least 64 x 64: below, torch takes another kernel for few rows.
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}


def configs(family):
    """One adapter of each method on the layers of a family that PEFT has it for."""
    common = {"target_modules": LINEARS[family], "task_type": "CAUSAL_LM"}
    with_head = {"target_modules": [LINEARS[family][0], "lm_head"]}
    forward = [FEEDFORWARD[family]] if FEEDFORWARD[family] else []
    scaled = {"target_modules": [LINEARS[family][1], *forward], "feedforward_modules": forward}
    with quiet():
        chosen = {
            "lora": LoraConfig(**common, r=4, lora_alpha=16),
            "ia3": IA3Config(**common | scaled),
            "vera": VeraConfig(**common, r=40, projection_prng_key=5),
            "vera-regenerated": VeraConfig(**common | with_head, r=6, save_projection=False),
        }
    if family == "gpt2":  # of its layers (Conv1D) PEFT has the others for the head only
        common["target_modules"] = with_head["target_modules"] = ["lm_head"]
    besides = {} if family == "gpt2" else {"modules_to_save": ["lm_head"]}
    return chosen | {
        "loha": LoHaConfig(**common | besides, r=4, alpha=16),
        "lokr": LoKrConfig(**common, r=2, alpha=16, decompose_factor=4),
        "lokr-both": LoKrConfig(**common | with_head, r=2, alpha=9, decompose_both=True),
        "oft": OFTConfig(**common, oft_block_size=16),
        "oft-shared": OFTConfig(**common | with_head, r=4, oft_block_size=0, block_share=True),
        "oft-exact": OFTConfig(**common | besides, oft_block_size=8, use_cayley_neumann=False),
    }


class Zoo:
    """One adapter of each method on a tiny model, as PEFT made them and as the engine reads them.

    Attributes:
        names: of the adapters, and None for the base.
        weights: by name.
    """

    def __init__(self, base, family, folder):
        self.base = base
        self._folder = folder
        facts = facts_of(base)
        self.weights = {
            name: SavedAdapter(folder / name, base, config, adapter_id=name).read(facts)
            for name, config in configs(family).items()
        }
        self.names = (*self.weights, None)

    def reference(self, name):
        """Return PEFT's model, or the base model for None."""
        if name is None:
            return self.base
        with quiet():
            return PeftModel.from_pretrained(copy.deepcopy(self.base), self._folder / name).eval()


@pytest.fixture(scope="module", params=LINEARS)
def zoo(request, tmp_path_factory):
    return Zoo(MODELS[request.param], request.param, tmp_path_factory.mktemp(request.param))


def test_all_methods_in_one_batch_equal_pefts_forward(zoo):
    choices = [*zoo.names, *zoo.names[::-2]]
    jobs, owners = make_jobs(choices, num_tokens=NUM_TOKENS)
    references = {name: zoo.reference(name) for name in zoo.names}
    expected = {
        request.request_id: greedy_by_forward(
            references[owners.get(request.request_id)], prompt, NUM_TOKENS
        )
        for request, prompt in jobs
    }
    assert len({tuple(tokens) for tokens in expected.values()}) > len(choices) / 2

    outputs = run(
        make_engine(zoo),
        jobs,
        arrivals={f"r{index}": index for index in range(len(choices))},
        adapters=weights_of(zoo, owners),
    )

    assert {key[0]: output.token_ids for key, output in outputs.items()} == expected


def test_in_bfloat16_a_row_has_the_same_bits_alone_and_in_any_company(tmp_path):
    family = next(each for each in FAMILIES if each.name == "llama")
    zoo = Zoo(make_model(family, **WIDE), "llama", tmp_path)
    half = make_model(family, dtype=torch.bfloat16, **WIDE)
    choices = [*zoo.names, *zoo.names[-3:-1]]
    jobs, owners = make_jobs(choices, num_tokens=4)
    weights = weights_of(zoo, owners)
    plain = run(make_engine(zoo, model=half), [jobs[len(zoo.names) - 1]])
    quiet_engine = make_engine(zoo, model=half, is_prefix_caching_enabled=False)
    alone = {}
    for job in jobs:
        alone |= run(quiet_engine, [job], adapters=weights)

    crowd = run(make_engine(zoo, model=half), jobs, adapters=weights)
    tight = make_engine(zoo, model=half, max_num_slots=2, max_num_batched_tokens=16)
    churn = run(tight, list(reversed(jobs)), adapters=weights)

    assert choices[len(zoo.names) - 1] is None
    for outputs in (plain, crowd, churn):
        for key, output in outputs.items():
            assert output.token_ids == alone[key].token_ids, choices[int(key[0][1:])]
            assert output.logprobs == alone[key].logprobs, choices[int(key[0][1:])]
    # Two of other buckets, so that no slot that a rotation was in is written again.
    for name in ("oft", "vera", "loha"):
        run(tight, [jobs[choices.index(name)]], adapters=weights)
        store = tight.adapters.store
        has_rotations = any(store.rotations(8, module) for module in range(len(store.modules)))
        assert has_rotations or name != "oft"
    assert not has_rotations
