"""Whatever cannot be served is refused at load, in one sentence that names it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file

from models.adapters.reading import read_adapter
from models.adapters.source import CONFIG_NAME, WEIGHTS_NAME, FilesChangedError
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import (
    MAX_RANK,
    MODELS,
    SavedAdapter,
    facts_of,
    refusal,
)

LLAMA = MODELS["llama"]
FACTS = facts_of(LLAMA)
PREFIX = "base_model.model.model.layers."
Q0 = f"{PREFIX}0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path):
    return SavedAdapter(tmp_path, LLAMA, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))


def refused(adapter, facts=FACTS):
    return refusal(lambda: adapter.read(facts))


def test_a_rank_over_the_limit_names_both_and_the_module(adapter):
    reason = refused(adapter, facts_of(LLAMA, max_rank=3))

    assert reason == (
        "its rank of 4 at module 'model.layers.0.self_attn.q_proj' is over the limit of 3"
    )


def test_one_module_over_the_limit_is_enough(tmp_path):
    config = LoraConfig(target_modules=["q_proj"], r=4, rank_pattern={"2.self_attn.q_proj": 9})
    adapter = SavedAdapter(tmp_path, LLAMA, config)

    assert "9 at module 'model.layers.2.self_attn.q_proj'" in refused(
        adapter, facts_of(LLAMA, max_rank=8)
    )
    assert adapter.read(facts_of(LLAMA, max_rank=9)).rank == 9


def test_another_width_of_the_base_model_names_the_module_and_both_shapes(adapter):
    wider = make_model(FAMILIES[0], hidden_size=128)

    assert refused(adapter, facts_of(wider)) == (
        "module 'model.layers.0.self_attn.q_proj': lora_A.weight is [4, 64], but this model and "
        "the adapter's configuration need [4, 128]"
    )


def test_a_base_model_with_fewer_layers_is_told_from_one_with_more(adapter):
    shallow = make_model(FAMILIES[0], num_hidden_layers=2)
    deep = make_model(FAMILIES[0], num_hidden_layers=4)

    assert "layers.2.self_attn" in refused(adapter, facts_of(shallow))
    assert "belongs to no module of this model" in refused(adapter, facts_of(shallow))
    assert "lacks 4 of 16 tensors" in refused(adapter, facts_of(deep))


def test_another_architecture_is_refused(adapter):
    assert "match no module of this model" in refused(adapter, facts_of(MODELS["gpt2"]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_weight_that_is_no_number_is_named(adapter, bad, dtype):
    def spoil(name, tensor):
        if name == f"{Q0}.lora_B.weight":
            tensor[5, 1] = bad
        return tensor.to(dtype)

    adapter.edit_tensors(spoil)

    assert "q_proj.lora_B.weight' holds NaN or infinity" in refused(adapter)


def test_a_scale_that_overflows_is_refused(adapter):
    adapter.edit_config(lora_alpha=1e300)

    assert "is not finite" in refused(adapter)


def test_a_magnitude_over_a_row_of_zeros_is_refused(tmp_path):
    base = make_model(FAMILIES[0])
    with torch.no_grad():
        base.get_submodule("model.layers.0.self_attn.q_proj").weight[3] = 0
    config = LoraConfig(target_modules=["q_proj"], r=4, use_dora=True)
    adapter = SavedAdapter(tmp_path, base, config)
    adapter.edit_tensors(lambda name, tensor: tensor * 0 if "lora_B" in name else tensor + 1)

    assert "'model.layers.0.self_attn.q_proj' is not finite" in refused(adapter, facts_of(base))


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight"])
def test_a_missing_tensor_is_named(adapter, part):
    adapter.edit_tensors(lambda name, tensor: None if name == f"{Q0}.{part}" else tensor)

    assert f"lacks 1 of 12 tensors, the first being 'model.layers.0.self_attn.q_proj.{part}'" in (
        refused(adapter)
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [({"use_dora": True}, "lora_magnitude_vector"), ({"lora_bias": True}, "lora_B.bias")],
)
def test_a_missing_part_of_an_option_is_named(tmp_path, options, part):
    adapter = SavedAdapter(tmp_path, LLAMA, LoraConfig(target_modules=["q_proj"], **options))
    adapter.edit_tensors(lambda name, tensor: None if name == f"{Q0}.{part}" else tensor)

    assert f"q_proj.{part}'" in refused(adapter)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_missing_bias_is_named(tmp_path, bias):
    base = MODELS["gpt2"]
    adapter = SavedAdapter(tmp_path, base, LoraConfig(target_modules=["c_attn"], bias=bias))
    dropped = "base_model.model.transformer.h.1.attn.c_attn.base_layer.bias"
    adapter.edit_tensors(lambda name, tensor: None if name == dropped else tensor)

    assert "'transformer.h.1.attn.c_attn.bias'" in refused(adapter, facts_of(base))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "lora_magnitude_vector'"),
        ({"lora_bias": True}, "lora_B.bias'"),
        ({"r": 8}, "[4, 64], but this model and the adapter's configuration need [8, 64]"),
        ({"target_modules": ["q_proj"]}, "does not account for the tensor"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "o_proj.lora_A.weight'"),
        ({"layers_to_transform": [0, 1]}, "does not account for the tensor"),
        ({"exclude_modules": ["0.self_attn.q_proj"]}, "does not account for the tensor"),
        ({"peft_type": "IA3", "feedforward_modules": []}, "option"),
        ({"target_modules": "((a+)+|.*.*.*.*)+$x"}, "match no module"),
        ({"target_modules": "("}, "no regular expression"),
        ({"rank_pattern": {"(": 4}}, "no regular expression"),
    ],
)
def test_a_configuration_that_contradicts_the_file_is_refused(adapter, changes, words):
    adapter.edit_config(**changes)

    assert words in refused(adapter)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{Q0}.lora_C.weight", "does not account for the tensor"),
        (f"{Q0}.bias", "does not account for the tensor"),
        (f"{Q0}.weight", "does not account for the tensor"),
        (f"{PREFIX}0.mlp.experts.3.up_proj.lora_A.weight", "belongs to no module"),
        (f"{PREFIX}0.nonsense", "belongs to no module"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "not named as PEFT names them"),
        (f"{Q0}.lora_A.default.weight", "belongs to no module"),
        ("base_model.model.", "belongs to no module"),
    ],
)
def test_every_tensor_of_the_file_must_be_used(adapter, name, words):
    adapter.add_tensor(name, torch.zeros(4, 4))

    assert words in refused(adapter)
    assert name in refused(adapter)


def test_a_file_with_other_prefixes_is_refused(adapter):
    path = adapter.folder / WEIGHTS_NAME
    tensors = {name.replace("base_model.", ""): value for name, value in load_file(path).items()}
    save_file(tensors, path)

    assert "not named as PEFT names them" in refused(adapter)


def test_a_file_without_tensors_is_refused(adapter):
    adapter.edit_tensors(lambda name, tensor: None)

    assert refused(adapter) == "its file holds no tensors"


def test_the_same_bias_under_two_names_is_refused(tmp_path):
    base = MODELS["gpt2"]
    adapter = SavedAdapter(tmp_path, base, LoraConfig(target_modules=["c_attn"], bias="lora_only"))
    adapter.add_tensor("base_model.model.transformer.h.0.attn.c_attn.bias", torch.zeros(192))

    assert "under two names" in refused(adapter, facts_of(base))


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_table_that_was_trained_besides_is_refused(adapter, name):
    table = LLAMA.get_submodule(name).weight.detach().clone()
    adapter.add_tensor(f"base_model.model.{name}.weight", table)
    assert adapter.read(FACTS).rank == 4

    table[7, 3] += 0.5
    adapter.add_tensor(f"base_model.model.{name}.weight", table)

    assert f"brings a changed weight for '{name}'" in refused(adapter)


def test_a_resized_vocabulary_is_refused_with_both_sizes(adapter):
    adapter.add_tensor("base_model.model.lm_head.weight", torch.zeros(203, 64))

    assert "module 'lm_head': weight is [203, 64]" in refused(adapter)
    assert "[199, 64]" in refused(adapter)


def test_ia3_on_an_embedding_is_refused(adapter):
    adapter.edit_config(**dict.fromkeys(json.loads((adapter.folder / CONFIG_NAME).read_text())))
    adapter.edit_config(peft_type="IA3", target_modules=["embed_tokens"], feedforward_modules=[])

    assert "IA3 cannot change the embedding 'model.embed_tokens'" in refused(adapter)


@pytest.mark.parametrize("gain", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_refused(tmp_path, gain):
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    adapter = SavedAdapter(tmp_path, LLAMA, config)
    adapter.edit_tensors(lambda name, tensor: torch.full_like(tensor, gain))

    assert "ia3_l' holds NaN or infinity" in refused(adapter)


def test_a_vector_that_lies_the_wrong_way_is_refused(tmp_path):
    config = IA3Config(target_modules=["o_proj"], feedforward_modules=[])
    adapter = SavedAdapter(tmp_path, LLAMA, config)
    adapter.edit_config(feedforward_modules=["o_proj"])

    assert "ia3_l is [64, 1]" in refused(adapter)
    assert "need [1, 64]" in refused(adapter)


def test_files_of_absurd_size_are_not_read(adapter):
    huge = dataclasses.replace(adapter.files, num_bytes=1 << 40, folder=Path("/nowhere"))

    assert "1099511627776 bytes" in refusal(lambda: read_adapter(huge, FACTS))


def test_files_of_the_largest_rank_and_all_options_are_not_too_large(tmp_path):
    base = MODELS["gpt2"]
    targets = ["wte", "wpe", "c_attn", "c_proj", "c_fc", "lm_head"]
    config = LoraConfig(target_modules=targets, r=MAX_RANK, use_dora=True, bias="all")

    assert SavedAdapter(tmp_path, base, config).read(facts_of(base)).rank == MAX_RANK


def test_files_that_changed_meanwhile_are_not_taken_for_the_version(adapter):
    files = adapter.files
    adapter.edit_tensors(lambda name, tensor: tensor * 2)

    with pytest.raises(FilesChangedError):
        read_adapter(files, FACTS)
