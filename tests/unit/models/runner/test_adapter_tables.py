"""Embeddings, heads, whole modules and single tokens of adapters, mixed in one pass, equal PEFT."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, TrainableTokensConfig

from models.adapters.ledger import Slot
from models.runner.module_discovery import discover_modules
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import IDS, MODELS, SavedAdapter
from tests.unit.models.runner.test_adapter_layers import Bench, assert_close

TOKENS = IDS[0].unique().tolist()
SOME, OTHERS = TOKENS[4:1:-1], [TOKENS[5], *range(3)]
FAMILIES_BY_NAME = {family.name: family for family in FAMILIES}
TIED = ("llama", "gpt2", "gemma3")
BASES = {
    **{name: MODELS[name] for name in ("llama", "qwen3", "gpt2", "gemma3", "qwen3-moe")},
    **{
        f"{name}-tied": make_model(FAMILIES_BY_NAME[name], tie_word_embeddings=True)
        for name in TIED
    },
}


def table_configs(base):
    """Return adapters that change tables, heads, norms or whole layers of a family."""
    is_gpt2 = "gpt2" in base
    embedding = "wte" if is_gpt2 else "embed_tokens"
    linear, norm = ("c_attn", "ln_f") if is_gpt2 else ("q_proj", "norm")

    def lora(**options):
        fields = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": [linear]}
        return LoraConfig(**fields | options)

    configs = {
        "embedding": lora(target_modules=[embedding, "wpe"] if is_gpt2 else [embedding]),
        "head": lora(target_modules=["lm_head", linear], rank_pattern={"lm_head": 7}),
        "both-dora": lora(target_modules=["lm_head", embedding], use_dora=True, r=20),
        "saved-head": lora(modules_to_save=["lm_head"]),
        "saved-embedding": lora(modules_to_save=[embedding]),
        "saved-both": lora(modules_to_save=["lm_head", embedding], use_rslora=True),
        "saved-norms": lora(modules_to_save=[norm, "1.mlp.c_fc" if is_gpt2 else "1.mlp.up_proj"]),
        "ia3": IA3Config(
            target_modules=[linear, "lm_head"],
            feedforward_modules=["lm_head"],
            modules_to_save=["0.attn.c_proj" if is_gpt2 else "o_proj"],
            task_type="CAUSAL_LM",
        ),
        "tokens": lora(trainable_token_indices=SOME),
        "tokens-of-both": lora(trainable_token_indices={embedding: SOME, "lm_head": OTHERS}),
        "tokens-of-both-alike": lora(trainable_token_indices={embedding: SOME, "lm_head": SOME}),
        "tokens-of-head": lora(trainable_token_indices={"lm_head": OTHERS}),
        "tokens-alone": TrainableTokensConfig(token_indices=OTHERS, task_type="CAUSAL_LM"),
    }
    if "moe" in base or "gemma" in base:
        # Where "norm" also means norms of heads: gemma3 has the heads before the tokens there.
        configs["saved-norms"] = lora(modules_to_save=["model.norm", "input_layernorm"])
    return configs


@pytest.mark.parametrize("base", BASES)
def test_all_of_them_and_the_base_in_one_pass_equal_peft(tmp_path, base):
    model = BASES[base]
    bench = Bench(None, model=model, num_slots=16)
    adapters = {
        name: SavedAdapter(tmp_path / name, model, config)
        for name, config in table_configs(base).items()
    }
    slots = {}
    for number, (name, adapter) in enumerate(adapters.items()):
        slots[name] = Slot(32 if name == "both-dora" else 8, number)
        bench.put(adapter, slots[name])
    with torch.inference_mode():
        plain = model(IDS, use_cache=False).logits[0]
    order = [None, *slots, "tokens", None, *reversed(slots)]

    logits = bench.run([slots.get(name) for name in order])

    for row, name in zip(logits, order, strict=True):
        if name is None:
            assert torch.equal(row, bench.run([None] * len(order))[0])
            assert_close(row, plain)
        else:
            expected = adapters[name].logits[0]
            assert (expected - plain).abs().max() > 1e-2 * plain.abs().max(), name
            assert_close(row, expected)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """All adapters of the tied llama."""
    folder = tmp_path_factory.mktemp("zoo")
    model = BASES["llama-tied"]
    return {
        name: SavedAdapter(folder / name, model, config)
        for name, config in table_configs("llama").items()
        if name != "both-dora"
    }


def make_bench():
    return Bench(None, model=BASES["llama-tied"], num_slots=16)


def test_a_row_is_the_same_bit_for_bit_in_any_company(zoo):
    bench = make_bench()
    slots = {name: Slot(8, number) for number, name in enumerate(zoo)}
    for name, adapter in zoo.items():
        bench.put(adapter, slots[name])
    crowd = [None, *slots, *slots]
    together = bench.run([slots.get(name) for name in crowd])

    for number, name in enumerate(crowd):
        alone = bench.run([slots.get(name)] + [None] * (len(crowd) - 1))[0]
        assert torch.equal(together[number], alone), name


def test_nothing_of_a_former_tenant_is_left(zoo):
    bench = make_bench()
    slot = Slot(8, 3)
    for adapter in (*zoo.values(), *reversed(zoo.values())):
        bench.put(adapter, slot)
        fresh = make_bench()
        fresh.put(adapter, slot)
        assert torch.equal(bench.run([slot, None]), fresh.run([slot, None]))


def test_own_tables_cost_their_bytes_and_are_freed_with_their_slot(zoo):
    bench = make_bench()
    plain = bench.store.cost(zoo["embedding"].read(bench.facts))
    saved = zoo["saved-embedding"].read(bench.facts)
    tokens = zoo["tokens-alone"].read(bench.facts)
    slot = Slot(8, 0)

    assert bench.store.cost(saved).num_bytes - bench.store.cost(
        zoo["saved-norms"].read(bench.facts)
    ).num_bytes == 4 * (199 * 64 - 64 * 7 - 96 * 64)
    assert saved.num_bytes > 4 * 199 * 64
    assert bench.store.cost(tokens).num_bytes == 2 * len(OTHERS) * (8 + 4 * 64)
    assert tokens.num_bytes == 2 * len(OTHERS) * (8 + 4 * 64)
    assert plain.num_bytes == 4 * 8 * (199 + 64)

    number = [shape.name for shape in bench.store.modules].index("model.embed_tokens")
    bench.store.write_(slot, saved)
    assert list(bench.store.own_tables.weights(8, number)) == [0]
    bench.store.write_(slot, tokens)
    assert not bench.store.own_tables.weights(8, number)
    assert list(bench.store.own_tables.token_rows(8, number)) == [0]
    bench.put(zoo["head"], slot)
    assert not bench.store.own_tables.token_rows(8, number)


def test_norms_whose_rows_are_not_in_the_tokens_order_cannot_be_changed():
    names = {shape.name for shape in discover_modules(MODELS["gemma3"])}

    assert "model.layers.0.self_attn.q_norm" not in names
    assert "model.layers.0.self_attn.q_norm" in {
        shape.name for shape in discover_modules(MODELS["qwen3"])
    }


def test_the_base_models_own_weights_are_never_touched(zoo):
    bench = make_bench()
    before = copy.deepcopy(bench.model.state_dict())
    for number, adapter in enumerate(zoo.values()):
        bench.put(adapter, Slot(8, number))

    bench.run([Slot(8, number) for number in range(len(zoo))])

    for name, tensor in bench.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
