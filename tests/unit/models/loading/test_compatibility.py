"""Which models are refused, by which words; and longrope, fixed for good."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BloomForCausalLM,
    FalconForCausalLM,
    LlamaForCausalLM,
    MambaForCausalLM,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.errors import ConfigError
from models.loading.compatibility import check_class, check_config, fix_longrope
from tests.tiny_models import COMMON, FAMILIES

ORIGINAL = 32
HALF_WIDTH = 8


def config_of(model_type, **fields):
    return CONFIG_MAPPING[model_type](**fields)


def assert_refused(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_config(config)
    assert caught.value.field == "model"
    assert f"'{config.model_type}'" in caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_served_is_not_refused(family):
    check_config(config_of(family.model_type, **{**COMMON, **family.extra}))


def test_a_model_without_causal_attention_is_refused():
    assert_refused(config_of("llama", is_causal=False), "both directions")


def test_bidirectional_attention_is_refused():
    assert_refused(config_of("gemma3_text", use_bidirectional_attention=True), "both directions")


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_encoder_decoder_model_is_refused(model_type):
    assert_refused(config_of(model_type), "encoder-decoder")


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "clip"])
def test_a_model_made_of_several_is_refused(model_type):
    assert_refused(config_of(model_type), "several models")


@pytest.mark.parametrize(
    ("model_type", "layer_type"),
    [("qwen3_next", "linear_attention"), ("llama4_text", "chunked_attention"), ("lfm2", "conv")],
)
def test_a_model_with_other_layers_than_attention_is_refused_naming_them(model_type, layer_type):
    layer_types = ["full_attention", layer_type]
    config = config_of(model_type, num_hidden_layers=2, layer_types=layer_types)

    assert_refused(config, f"layers of type {layer_type}")


def test_all_unknown_layer_types_are_named():
    config = config_of("llama")
    config.layer_types = ["full_attention", "mamba", "conv", "sliding_attention"]

    assert_refused(config, "layers of type conv, mamba,")


def test_keys_shared_between_layers_are_refused():
    assert_refused(config_of("llama", num_kv_shared_layers=2), "shares keys and values")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},  # as older files spell it
    ],
    ids=["new", "old"],
)
def test_dynamic_rope_is_refused(fields):
    assert_refused(config_of("llama", **fields), "dynamic rope")


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "dynamic rope"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "longrope in some of its layers"),
    ],
)
def test_rope_parameters_of_one_layer_type_are_looked_at(rope, words):
    config = config_of("gemma3_text")
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": rope,
    }

    assert_refused(config, words)


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_fixed_rope_scaling_is_served(rope_type):
    config = config_of("llama")
    config.rope_parameters = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 1e4}

    check_config(config)


def test_a_configuration_without_rope_is_served():
    config = config_of("gpt2")
    assert getattr(config, "rope_parameters", None) is None

    check_config(config)


@pytest.mark.parametrize("model_class", [FalconForCausalLM, BloomForCausalLM])
def test_a_class_with_an_attention_of_its_own_is_refused_by_name(model_class):
    with pytest.raises(ConfigError, match=f"{model_class.__name__} computes attention") as caught:
        check_class(model_class)

    assert caught.value.field == "model"


def test_a_class_with_a_state_is_refused_by_name():
    with pytest.raises(ConfigError, match="MambaForCausalLM keeps a state"):
        check_class(MambaForCausalLM)


def test_a_state_counts_even_if_attention_can_be_plugged_in():
    hybrid = type("Hybrid", (), {"_is_stateful": True, "_supports_attention_backend": True})

    with pytest.raises(ConfigError, match="Hybrid keeps a state"):
        check_class(hybrid)


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, MixtralForCausalLM, Phi3ForCausalLM])
def test_a_class_that_can_be_plugged_into_is_served(model_class):
    check_class(model_class)


def longrope_model(**fields):
    config = Phi3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=None,
        **fields,
    )
    return Phi3ForCausalLM(config).eval()


NEW_SPELLING = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * HALF_WIDTH,
        "long_factor": [2.0 + index for index in range(HALF_WIDTH)],
    },
    # inside of rope_parameters it would be overwritten with the default
    "original_max_position_embeddings": ORIGINAL,
}
OLD_SPELLING = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * HALF_WIDTH,
        "long_factor": [2.0 + index for index in range(HALF_WIDTH)],
    },
    "original_max_position_embeddings": ORIGINAL,
}


def run(model, length):
    """Run one row of ``length`` tokens; return its logits."""
    tokens = torch.arange(length)[None] % 50
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits[0]


def inverse_frequencies(factors):
    exponents = torch.arange(0, 2 * HALF_WIDTH, 2).float() / (2 * HALF_WIDTH)
    return 1.0 / (torch.tensor(factors) * 10000.0**exponents)


def test_longrope_left_to_itself_depends_on_the_longest_row():
    # else the tests below would show nothing
    model = longrope_model(**NEW_SPELLING)
    inv_freq = model.model.rotary_emb.inv_freq

    run(model, ORIGINAL)
    short = inv_freq.clone()
    run(model, ORIGINAL + 1)

    assert not torch.equal(inv_freq, short)


@pytest.mark.parametrize("fields", [NEW_SPELLING, OLD_SPELLING], ids=["new", "old"])
@pytest.mark.parametrize(
    ("window", "factors"),
    [
        (ORIGINAL, [1.0] * HALF_WIDTH),
        (ORIGINAL + 1, [2.0 + index for index in range(HALF_WIDTH)]),
        (256, [2.0 + index for index in range(HALF_WIDTH)]),
    ],
)
def test_the_window_decides_about_the_factors_of_longrope_for_good(fields, window, factors):
    model = longrope_model(**fields)

    fix_longrope(model, window)

    inv_freq = model.model.rotary_emb.inv_freq
    expected = inverse_frequencies(factors)
    for length in (5, 200, 5):
        run(model, length)
        assert model.model.rotary_emb.inv_freq is inv_freq
        assert torch.allclose(inv_freq, expected)


@pytest.mark.parametrize(("window", "length"), [(ORIGINAL, ORIGINAL), (256, ORIGINAL + 1)])
def test_fixed_longrope_computes_what_transformers_computes_on_its_side(window, length):
    torch.manual_seed(1)
    expected = run(longrope_model(**NEW_SPELLING), length)
    torch.manual_seed(1)
    fixed = longrope_model(**NEW_SPELLING)

    fix_longrope(fixed, window)

    assert torch.equal(run(fixed, length), expected)


def test_a_model_without_longrope_is_left_alone():
    inv_freq = torch.ones(4)
    module = torch.nn.Module()
    module.rope_type, module.config, module.inv_freq = "default", SimpleNamespace(), inv_freq

    fix_longrope(torch.nn.Sequential(module), 8)

    assert module.rope_type == "default"
    assert torch.equal(inv_freq, torch.ones(4))
