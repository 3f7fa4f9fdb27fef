"""Whole modules and single tokens that were trained besides: what is read, and what is refused."""

import json

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, TrainableTokensConfig

from models.adapters.reading import parse_adapter
from models.adapters.source import AdapterContents
from models.requests import AdapterRef
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.adapters.peft_adapters import (
    MODELS,
    QUERY_CONFIG,
    SavedAdapter,
    facts_of,
    refusal,
)

LLAMA = MODELS["llama"]
FACTS = facts_of(LLAMA)
TIED = make_model(FAMILIES[0], tie_word_embeddings=True)
EMBEDDING = "base_model.model.model.embed_tokens"


def lora(**options):
    fields = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**fields | options)


def saved(folder, config, base=LLAMA, **options):
    return SavedAdapter(folder, base, config, **options)


def refused(adapter, facts=FACTS):
    return refusal(lambda: adapter.read(facts))


def config_refusal(**changes):
    """Return why the configuration alone is refused."""
    config = json.dumps(json.loads(QUERY_CONFIG) | changes).encode()
    contents = AdapterContents(config=config, weights=b"")
    return refusal(lambda: parse_adapter(AdapterRef("tests/one", "v1"), contents, FACTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_weight_is_read_as_the_file_has_it(tmp_path, dtype):
    adapter = saved(tmp_path, lora(modules_to_save=["lm_head"]), dtype=dtype)

    head = adapter.read(FACTS).modules["lm_head"]

    assert head.weight.dtype == dtype
    assert head.weight.shape == (VOCABULARY_SIZE, 64)
    assert head.bias is None
    assert head.num_bytes == VOCABULARY_SIZE * 64 * dtype.itemsize


def test_names_end_anywhere_and_mean_what_is_inside_of_a_module(tmp_path):
    adapter = saved(tmp_path, lora(modules_to_save=["norm", "1.mlp"]))

    modules = adapter.read(FACTS).modules

    assert {name for name, delta in modules.items() if delta.weight is not None} == {
        "model.norm",
        *(f"model.layers.{layer}.input_layernorm" for layer in range(3)),
        *(f"model.layers.{layer}.post_attention_layernorm" for layer in range(3)),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_a_saved_module_is_no_target_of_the_method_besides(tmp_path):
    config = lora(modules_to_save=["1.self_attn.q_proj"])

    modules = saved(tmp_path, config).read(FACTS).modules

    assert [modules[f"model.layers.{layer}.self_attn.q_proj"].rank for layer in range(3)] == [
        2,
        0,
        2,
    ]
    assert modules["model.layers.1.self_attn.q_proj"].weight is not None


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], modules_to_save=["lm_head"]),
        LoHaConfig(target_modules=["k_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["ia3", "loha"],
)
def test_other_methods_have_them_too(tmp_path, config):
    assert saved(tmp_path, config).read(FACTS).modules["lm_head"].weight is not None


def test_biases_of_saved_modules_are_read_against_the_bases(tmp_path):
    base = MODELS["gpt2"]
    config = lora(target_modules=["c_attn"], modules_to_save=["ln_f", "0.mlp.c_fc"])
    adapter = saved(tmp_path, config, base)
    before = base.transformer.ln_f.bias.detach()

    modules = adapter.read(facts_of(base)).modules

    assert modules["transformer.ln_f"].weight.shape == (64,)
    assert modules["transformer.h.0.mlp.c_fc"].weight.shape == (64, 256)
    written = []
    adapter.edit_tensors(lambda name, tensor: written.append((name, tensor)) or tensor)
    bias = dict(written)["base_model.model.transformer.ln_f.bias"]
    assert torch.allclose(modules["transformer.ln_f"].bias, bias - before)


def test_a_saved_module_that_is_the_bases_own_takes_no_room(tmp_path):
    adapter = saved(tmp_path, lora(modules_to_save=["lm_head"]))
    own = LLAMA.lm_head.weight.detach()
    adapter.edit_tensors(lambda name, tensor: own.clone() if "lm_head" in name else tensor)

    assert "lm_head" not in adapter.read(FACTS).modules


def test_all_modules_saved_are_not_too_large(tmp_path):
    names = {name.rpartition(".")[2] for name in FACTS.modules} - {"q_proj"}
    adapter = saved(tmp_path, lora(modules_to_save=sorted(names)))

    assert len(adapter.read(FACTS).modules) == len(FACTS.modules)


def test_a_name_that_means_nothing_is_told(tmp_path):
    adapter = saved(tmp_path, lora(modules_to_save=["lm_head"]))
    adapter.edit_config(modules_to_save=["lm_head", "score"])

    (warning,) = adapter.read(FACTS).warnings

    assert warning == "modules_to_save lists what this model does not have: 'score'"


@pytest.mark.parametrize("name", ["lm_head", "model.norm"])
def test_a_missing_saved_module_is_named(tmp_path, name):
    adapter = saved(tmp_path, lora(modules_to_save=["lm_head", "model.norm"]))
    adapter.edit_tensors(lambda key, tensor: None if f".{name}." in key else tensor)

    assert f"the first being '{name}.weight'" in refused(adapter)


def test_a_table_of_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    adapter = saved(tmp_path, lora(modules_to_save=["embed_tokens"]))
    adapter.edit_tensors(
        lambda name, tensor: torch.zeros(203, 64) if "embed_tokens" in name else tensor
    )

    assert "module 'model.embed_tokens': weight is [203, 64]" in refused(adapter)


def test_a_saved_module_of_the_experts_is_refused(tmp_path):
    base = MODELS["qwen3-moe"]
    adapter = saved(tmp_path, lora(modules_to_save=["0.mlp"]), base)

    assert "belongs to no module of this model" in refused(adapter, facts_of(base))


def test_a_saved_module_that_holds_no_numbers_is_refused(tmp_path):
    adapter = saved(tmp_path, lora(modules_to_save=["model.norm"]))
    adapter.edit_tensors(lambda name, tensor: tensor / 0 if "norm" in name else tensor)

    assert "model.norm.weight' holds NaN or infinity" in refused(adapter)


def test_rows_of_tokens_are_read_in_the_order_of_their_ids(tmp_path):
    adapter = saved(tmp_path, lora(trainable_token_indices=[9, 3, 5]))
    rows = torch.arange(3.0)[:, None].expand(3, 64)
    adapter.edit_tensors(lambda name, tensor: rows.clone() if "delta" in name else tensor)

    table = adapter.read(FACTS).modules["model.embed_tokens"].token_rows

    assert table.ids.tolist() == [3, 5, 9]
    assert table.rows[:, 0].tolist() == [1, 2, 0]


def test_a_tied_head_gets_the_rows_of_the_embedding(tmp_path):
    facts = facts_of(TIED)

    for number, (config, tables) in enumerate(
        (
            (lora(trainable_token_indices=[3]), {"model.embed_tokens", "lm_head"}),
            (lora(trainable_token_indices={"lm_head": [3]}), {"lm_head"}),
            (
                TrainableTokensConfig(token_indices=[3], task_type="CAUSAL_LM"),
                {"model.embed_tokens", "lm_head"},
            ),
        )
    ):
        modules = saved(tmp_path / str(number), config, TIED).read(facts).modules

        assert {name for name, delta in modules.items() if delta.token_rows} == tables


def test_different_rows_of_tied_tables_are_refused(tmp_path):
    config = TrainableTokensConfig(token_indices=[3], task_type="CAUSAL_LM")
    adapter = saved(tmp_path, config, TIED)
    adapter.edit_tensors(lambda name, tensor: tensor + 1 if "lm_head" in name else tensor)

    assert "differ at 'model.embed_tokens' and 'lm_head'" in refused(adapter, facts_of(TIED))


@pytest.mark.parametrize(
    "config",
    [
        lora(trainable_token_indices=[198]),
        TrainableTokensConfig(token_indices=[198], task_type="CAUSAL_LM"),
    ],
    ids=["lora", "alone"],
)
def test_a_token_behind_the_bases_vocabulary_was_added(tmp_path, config):
    adapter = saved(tmp_path, config)
    small = facts_of(make_model(FAMILIES[0], vocab_size=198))

    assert adapter.read(FACTS).num_added_tokens == 0
    weights = adapter.read(small)

    assert weights.num_added_tokens == 1
    assert weights.modules["model.embed_tokens"].token_rows.ids.tolist() == [198]
    # The file does not tell its row at the head.
    assert weights.modules["lm_head"].token_rows is None
    assert any("never drawn" in warning for warning in weights.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modules_to_save": [5]}, "modules_to_save must be a list of texts"),
        ({"modules_to_save": {"a": 1}}, "modules_to_save must be a list of texts"),
        ({"modules_to_save": ["_proj"]}, "in two ways at once"),
        ({"trainable_token_indices": [1, 1]}, "must be a list of token ids, not [1, 1]"),
        ({"trainable_token_indices": [-1]}, "must be a list of token ids"),
        ({"trainable_token_indices": [1.0]}, "must be a list of token ids"),
        ({"trainable_token_indices": [True]}, "must be a list of token ids"),
        ({"trainable_token_indices": "1"}, "must be a list of token ids"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, "must be a list of token ids"),
        ({"trainable_token_indices": {"wte": [3]}}, "name 'wte', not in this model"),
        ({"trainable_token_indices": {"0.mlp.up_proj": [3]}}, "is no table of tokens"),
        ({"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]}, "in two ways"),
        ({"trainable_token_indices": [3], "target_modules": ["embed_tokens"]}, "in two ways"),
        # An added token has a row at the head too.
        ({"trainable_token_indices": [199], "target_modules": ["lm_head"]}, "in two ways"),
        ({"peft_type": "TRAINABLE_TOKENS", "r": None}, "token_indices are not given"),
        (
            {"peft_type": "TRAINABLE_TOKENS", "r": None, "token_indices": [3]},
            "'model.layers.0.self_attn.q_proj' is no table of tokens",
        ),
        ({"ensure_weight_tying": True}, "(ensure_weight_tying) is not supported yet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, words):
    assert words in config_refusal(**changes)


def test_a_copy_of_the_bases_table_under_trained_tokens_is_checked(tmp_path):
    adapter = saved(tmp_path, lora(trainable_token_indices=[3]))
    table = LLAMA.model.embed_tokens.weight.detach().clone()
    adapter.add_tensor(f"{EMBEDDING}.token_adapter.base_layer.weight", table)
    assert adapter.read(FACTS).modules

    adapter.add_tensor(f"{EMBEDDING}.token_adapter.base_layer.weight", table + 1)

    assert "brings a changed weight for 'model.embed_tokens'" in refused(adapter)
