"""What is odd but harmless is served, and the operator is told."""

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import save

from tests.unit.models.adapters.peft_adapters import (
    MODELS,
    SavedAdapter,
    facts_of,
    parse,
    tensors_of,
)

LLAMA = MODELS["llama"]


@pytest.fixture
def adapter(tmp_path):
    return SavedAdapter(tmp_path, LLAMA, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))


def test_an_untrained_adapter_is_served_with_a_warning():
    tensors = {
        name: torch.zeros_like(tensor) if "lora_B" in name else tensor
        for name, tensor in tensors_of().items()
    }

    assert parse(save(tensors)).warnings == ("it changes nothing: the base model answers the same",)
    assert parse(save(tensors_of())).warnings == ()


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], r=4),
        LoraConfig(target_modules=["q_proj"], r=4, use_dora=True),
        LoraConfig(target_modules=["c_attn"], r=4, bias="all", lora_bias=True),
        IA3Config(target_modules=["c_attn"], feedforward_modules=[]),
        IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["lora", "dora", "biases", "ia3", "ia3-input"],
)
def test_what_peft_saves_before_any_training_changes_nothing(tmp_path, monkeypatch, config):
    monkeypatch.setattr(
        "tests.unit.models.adapters.peft_adapters.randomise_", lambda model, dtype: None
    )
    base = MODELS["gpt2" if "c_attn" in config.target_modules else "llama"]

    weights = SavedAdapter(tmp_path, base, config).read(facts_of(base))

    assert weights.warnings == ("it changes nothing: the base model answers the same",)


@pytest.mark.parametrize(
    ("trained_on", "is_told"),
    [
        ("org/Tiny-1B", False),
        ("other-org/tiny-1b", False),
        ("/home/me/models/tiny-1B/", False),
        ("C:\\models\\Tiny-1B", False),
        (None, False),
        ("", False),
        ("org/Tiny-1B-instruct", True),
        ("tiny", True),
    ],
)
def test_another_base_model_of_equal_shapes_is_served_with_a_warning(adapter, trained_on, is_told):
    adapter.edit_config(base_model_name_or_path=trained_on)

    warnings = adapter.read(facts_of(LLAMA, base_names=("org/Tiny-1B", "served-name"))).warnings

    assert len(warnings) == is_told
    assert all(f"trained on '{trained_on}'" in warning for warning in warnings)


def test_listed_targets_that_mean_nothing_are_told(adapter):
    adapter.edit_config(target_modules=["q_proj", "v_proj", "q_prj"])

    assert adapter.read(facts_of(LLAMA)).warnings == (
        "target_modules lists what this model does not have: 'q_prj'",
    )
