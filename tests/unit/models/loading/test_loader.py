"""Loading: what is refused and with which words, what is known of a loaded model."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import BertConfig, BloomConfig, FalconConfig, ViTConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from models.config import ModelConfig
from models.errors import ConfigError
from models.kv_cache.store import LayerShape
from models.loading import loader
from models.loading.loader import load_model, plan_max_model_len
from tests.tiny_models import COMMON, FAMILIES, Family, make_model

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny model in float32."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    save(make_model(FAMILIES[0]), folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the tiny model that a test may damage."""
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    return folder


def save(model, folder):
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    transformers_logging.enable_progress_bar()


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_weights(folder, edit):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def load(folder, **config):
    return load_model(ModelConfig(model_id="tiny", **config), str(folder), lambda _: None)


def assert_refused(folder, words, *, field="model", **config):
    """Loading fails with one readable sentence about ``field``."""
    with pytest.raises(ConfigError, match=words) as caught:
        load(folder, **config)
    assert caught.value.field == field
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 500
    assert "Error(" not in caught.value.reason


# What is known of a loaded model


def test_a_loaded_model_is_described(saved):
    loaded = load(saved, dtype="float32")

    assert loaded.layers == (LayerShape(num_kv_heads=2, key_width=16, value_width=16),) * 3
    assert loaded.vocabulary_size == 199
    assert loaded.max_model_len_tokens == 256
    assert loaded.model.device == torch.device("cpu")
    assert not loaded.model.training


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_weights_come_in_the_configured_dtype_whatever_they_are_stored_in(saved, name, dtype):
    loaded = load(saved, dtype=name)

    assert loaded.dtype == dtype
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}


def test_the_weights_are_those_of_the_file(saved):
    stored = safetensors.torch.load_file(saved / "model.safetensors")[TENSOR]

    loaded = load(saved, dtype="float32")

    assert torch.equal(loaded.model.get_parameter(TENSOR), stored)


def test_progress_says_what_is_loaded_where_and_as_what(saved):
    lines = []

    load_model(ModelConfig(dtype="float32"), str(saved), lines.append)

    assert lines == [f"loading weights of {saved} as float32 on cpu"]


def test_a_tied_head_is_not_missed(tmp_path):
    save(make_model(FAMILIES[0], tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in safetensors.torch.load_file(
        tmp_path / "tied" / "model.safetensors"
    )

    assert load(tmp_path / "tied").vocabulary_size == 199


def test_a_configured_window_holds(saved):
    assert load(saved, max_model_len_tokens=100).max_model_len_tokens == 100


def test_longrope_is_fixed_at_load(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    extra = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    save(make_model(Family("phi3", "phi3", extra)), tmp_path / "phi3")

    model = load(tmp_path / "phi3").model

    assert model.model.rotary_emb.rope_type != "longrope"
    assert model.model.rotary_emb.inv_freq[0] == 0.25


@pytest.mark.parametrize("is_enabled", [True, False])
def test_loading_leaves_the_logging_of_transformers_as_it_was(saved, is_enabled):
    toggle = {True: "enable_progress_bar", False: "disable_progress_bar"}
    verbosity = transformers_logging.get_verbosity()
    getattr(transformers_logging, toggle[is_enabled])()

    load(saved)

    try:
        assert transformers_logging.is_progress_bar_enabled() == is_enabled
        assert transformers_logging.get_verbosity() == verbosity
    finally:
        transformers_logging.enable_progress_bar()


def test_loading_prints_nothing(saved, capfd):
    load(saved)

    assert capfd.readouterr() == ("", "")


# Paths and files


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere' cannot be read")


def test_an_unknown_hub_id_is_refused():
    assert_refused("no-such-org/no-such-model", "'no-such-org/no-such-model' cannot be read")


@pytest.mark.parametrize("text", ["{,", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_a_configuration_that_cannot_be_read_is_refused(copy, text):
    (copy / "config.json").write_text(text)

    assert_refused(copy, "cannot be read: ")


def test_a_configuration_with_a_wrong_type_is_refused_naming_the_field(copy):
    edit_config(copy, hidden_size="many")

    assert_refused(copy, "cannot be read: .*'hidden_size' expected int")


def test_an_unknown_rope_is_refused_naming_it(copy):
    edit_config(copy, rope_parameters={"rope_type": "no_such_rope", "rope_theta": 1e4})

    assert_refused(copy, "'no_such_rope' is not known")


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes"])
def test_a_quantised_model_whose_library_is_absent_is_refused_naming_that(copy, method):
    edit_config(copy, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})

    assert_refused(copy, "requires ")


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    ViTConfig().save_pretrained(tmp_path / "vit")

    assert_refused(tmp_path / "vit", "cannot be loaded as a causal language model: .*ViTConfig")


def test_a_missing_weight_is_refused_by_name(copy):
    edit_weights(copy, lambda tensors: tensors.pop(TENSOR))

    assert_refused(copy, f"lacks 1 of its weights, the first being {re.escape(TENSOR)}")


def test_weights_for_fewer_layers_than_configured_are_refused(copy):
    edit_config(copy, num_hidden_layers=5)

    assert_refused(copy, r"lacks 18 of its weights, the first being model\.layers\.3\.")


def test_a_weight_of_another_shape_is_refused_by_name(copy):
    edit_config(copy, intermediate_size=80)

    assert_refused(copy, r"contradicts: model\.layers\.0\.mlp\.down_proj\.weight is \[64, 96\]")


def test_pickled_weights_are_not_opened(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")

    assert_refused(copy, r"no file named model\.safetensors")


def test_a_file_that_is_cut_short_is_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    assert_refused(copy, "cannot be loaded as a causal language model: ")


def test_code_that_comes_with_a_model_is_not_run(copy):
    edit_config(
        copy,
        model_type="own",
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"},
    )
    (copy / "own.py").write_text("raise SystemExit('this ran')")

    assert_refused(copy, "cannot be read")


# Devices


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("abacus", "'abacus' is not a device"),
        ("meta", "'meta' is neither cpu nor cuda"),
        ("cuda", "'cuda': no GPU is available here"),
        ("cuda:1", "'cuda:1': no GPU is available here"),
    ],
)
def test_a_device_that_is_not_there_is_refused(saved, monkeypatch, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert_refused(saved, words, field="device", device=device)


def test_a_gpu_beyond_the_last_one_is_refused(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert_refused(saved, "'cuda:2': the last GPU here is cuda:1", field="device", device="cuda:2")


# Models that cannot be served


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
            "FalconForCausalLM",
        ),
        (BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2), "BloomForCausalLM"),
    ],
    ids=["falcon", "bloom"],
)
def test_a_class_with_an_attention_of_its_own_is_refused(tmp_path, config, name):
    save(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config), tmp_path / name)

    assert_refused(tmp_path / name, f"{name} computes attention in a way of its own")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
        ({"num_kv_shared_layers": 1}, "shares keys and values"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_causal": False}, "both directions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_cannot_be_served_is_refused_before_weights_are_read(
    copy, fields, words
):
    edit_config(copy, **fields)
    (copy / "model.safetensors").unlink()

    assert_refused(copy, words)


def test_a_head_that_draws_more_tokens_than_can_be_read_is_refused(saved, monkeypatch):
    model = make_model(FAMILIES[0])
    model.set_input_embeddings(nn.Embedding(190, 64))
    monkeypatch.setattr(loader, "_read_weights", lambda *_: model)

    assert_refused(saved, "LlamaForCausalLM can draw 199 tokens, but reads 190 only")


def test_an_encoder_in_the_shape_of_a_language_model_loads_and_is_left_to_the_self_check(tmp_path):
    # Nothing in its configuration tells. A test of the self-check shows that it is refused there.
    config = BertConfig(**COMMON)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[BertConfig](config)
    save(model, tmp_path / "bert")

    assert len(load(tmp_path / "bert").layers) == 3


# Windows


def window(own, requested):
    return plan_max_model_len(SimpleNamespace(max_position_embeddings=own), requested)


def test_the_window_is_the_models_own_or_a_smaller_one():
    assert window(512, 0) == 512
    assert window(512, 511) == 511
    assert window(512, 512) == 512


def test_a_window_beyond_the_models_own_is_refused():
    with pytest.raises(ConfigError, match="513 is more than this model's window of 512") as caught:
        window(512, 513)

    assert caught.value.field == "max_model_len_tokens"


def test_a_model_that_names_no_window_needs_one():
    assert plan_max_model_len(SimpleNamespace(), 77) == 77
    with pytest.raises(ConfigError, match="names no window of its own; set one") as caught:
        plan_max_model_len(SimpleNamespace(), 0)

    assert caught.value.field == "max_model_len_tokens"
