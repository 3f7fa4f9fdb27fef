"""What is wrong with a model path is said in one sentence, before anything heavy starts."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from models.errors import ConfigError
from models.loading.preflight import (
    available_host_memory_bytes,
    check_model_files,
    locate_model,
)

GIB = 1 << 30
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def folder(tmp_path):
    """A model of 1,000 float32 parameters and one 8-element integer tensor."""
    make_config(tmp_path, LLAMA)
    tensors = {"a": torch.zeros(10, 100), "b": torch.zeros(8, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def make_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def check(folder, *, dtype="float32", kv_budget_bytes=0, available_memory_bytes=GIB):
    return check_model_files(
        folder,
        dtype=dtype,
        device="cpu",
        kv_budget_bytes=kv_budget_bytes,
        available_memory_bytes=available_memory_bytes,
    )


def refusal(folder, **options):
    """Return the message; it must be one readable line that names the field."""
    with pytest.raises(ConfigError) as caught:
        check(folder, **options)
    message = str(caught.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    return message


def test_a_good_folder_is_measured_in_the_served_dtype(folder):
    facts = check(folder, dtype="bfloat16")

    assert facts.model_type == "llama"
    assert facts.architectures == ("LlamaForCausalLM",)
    assert facts.num_parameters == 1008
    assert facts.weights_bytes == 1000 * 2 + 8 * 8


def test_all_shards_of_an_index_are_measured(folder):
    save_file({"c": torch.zeros(500)}, folder / "second.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    index = {"weight_map": {"a": "first.safetensors", "c": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert check(folder).weights_bytes == 1500 * 4 + 8 * 8


def test_the_bundled_model_passes(bundled_model_path):
    facts = check(bundled_model_path, dtype="bfloat16")

    assert facts.num_parameters == 134_515_008
    assert facts.weights_bytes == 2 * 134_515_008


def test_a_folder_that_does_not_exist(tmp_path):
    assert "there is no folder" in refusal(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder(folder):
    assert "is a file" in refusal(folder / "config.json")


def test_a_folder_without_config(tmp_path):
    assert "it has no config.json" in refusal(tmp_path)


def test_an_adapter_instead_of_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")

    assert "is a PEFT adapter" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", '["a"]', "\x00"])
def test_a_config_that_is_not_one(text, folder):
    (folder / "config.json").write_text(text)

    assert "config" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        "LlamaForSequenceClassification",
        "BertForMaskedLM",
        "WhisperForAudio",
        "LlamaModel",
    ],
)
def test_a_model_that_is_no_causal_language_model_is_named(name, folder):
    make_config(folder, {"architectures": [name], "model_type": "x"})

    assert f"not a causal language model but {name}" in refusal(folder)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen3MoeForCausalLM"])
def test_both_names_of_causal_language_models_pass(name, folder):
    make_config(folder, {"architectures": [name]})

    assert check(folder).architectures == (name,)


def test_an_encoder_decoder_model_is_refused_even_with_a_head_for_language(folder):
    make_config(folder, {"architectures": ["T5WithLMHeadModel"], "is_encoder_decoder": True})

    assert "encoder-decoder model (T5WithLMHeadModel)" in refusal(folder)


def test_a_config_without_architectures_passes_if_it_names_its_type(folder):
    make_config(folder, {"model_type": "llama"})

    assert check(folder).architectures == ()


def test_a_config_that_names_neither_is_refused(folder):
    make_config(folder, {"hidden_size": 8})

    assert "neither architectures nor a model_type" in refusal(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()

    assert "has no weights" in refusal(folder)


def test_pickled_weights_are_refused_by_name(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    message = refusal(folder)

    assert "pytorch_model.bin" in message
    assert "pickle" in message


def test_a_gguf_file_in_the_folder_is_pointed_at(folder):
    (folder / "model.safetensors").rename(folder / "model-Q8_0.gguf")

    assert f"'{folder}/model-Q8_0.gguf'" in refusal(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "lacks 2 of its 2 weight files (one.safetensors and more)" in refusal(folder)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {}}', "{"])
def test_an_index_that_lists_nothing_is_refused(index, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)

    assert "index" in refusal(folder)


def test_a_file_that_is_cut_short_is_refused_with_both_sizes(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])

    assert f"is incomplete: {len(whole) - 100} of {len(whole)} bytes" in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"],
)
def test_a_file_that_is_no_safetensors_is_refused(content, folder):
    (folder / "model.safetensors").write_bytes(content)

    assert "is not a safetensors file" in refusal(folder)


@pytest.mark.parametrize("header", [b"{nope}", b"[1, 2]", b'{"a": {"dtype": "F32"}}'])
def test_a_damaged_header_is_refused(header, folder):
    content = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(content)

    assert "damaged header" in refusal(folder)


def test_weights_and_kv_that_do_not_fit_are_refused_with_all_numbers(folder):
    tensors = {"a": torch.zeros(1, dtype=torch.bfloat16).expand(1 << 20).contiguous()}
    save_file(tensors, folder / "model.safetensors")

    message = refusal(
        folder, kv_budget_bytes=GIB, available_memory_bytes=GIB + 1000, dtype="float32"
    )

    assert "needs 1.00 GiB on cpu" in message
    assert "0.00 GiB of weights as float32" in message
    assert "1.00 GiB of kv_budget_bytes" in message
    assert "only 1.00 GiB are available" in message


def test_what_fits_exactly_fits(folder):
    needed = 1000 * 4 + 8 * 8 + GIB

    check(folder, kv_budget_bytes=GIB, available_memory_bytes=needed)

    assert "needs" in refusal(folder, kv_budget_bytes=GIB, available_memory_bytes=needed - 1)


def test_an_existing_path_is_local(folder):
    assert locate_model(str(folder)) == folder


def test_an_existing_folder_wins_over_a_hub_id(folder, monkeypatch):
    (folder / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(folder)

    assert locate_model("org/name") is not None
    assert locate_model("org/other") is None


def test_the_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))

    assert locate_model(f"~/{folder.name}") == folder


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "org_1/my.model-v2"])
def test_a_plausible_hub_id_is_none_of_ours(model):
    assert locate_model(model) is None


@pytest.mark.parametrize(
    "model",
    [
        "",
        "/no/such/folder",
        "./nothing",
        "../nothing",
        "~/nothing",
        "C:\\models\\x",
        "a/b/c",
        "org/",
        "/name",
        "has space",
        "org/naïve",
        "nothing.gguf",
        "org//name",
        "x" * 97,
        "name\n",
    ],
)
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(model):
    with pytest.raises(ConfigError, match="no such folder") as caught:
        locate_model(model)

    assert caught.value.field == "model"


def test_a_containers_limit_is_heeded(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 250000\nactive_file 9\n")

    assert available_host_memory_bytes(tmp_path) == 350_000


def test_without_a_containers_limit_the_machine_counts(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 250000\n")

    assert available_host_memory_bytes(tmp_path) > 1_000_000
    assert available_host_memory_bytes(tmp_path / "absent") > 1_000_000


def test_preflight_needs_neither_torch_nor_transformers():
    code = (
        "import sys, models.loading.preflight; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
