"""From a configuration to an engine that answers."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from models.config import (
    MATMUL,
    VARLEN,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from models.engine import build
from models.engine.build import (
    available_memory_bytes,
    build_engine,
    describe_numerics,
    plan_num_scored_positions,
    plan_num_threads,
    resolve_model_path,
)
from models.errors import ConfigError
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    PromptLogprobs,
    TextPrompt,
    TokenDelta,
)
from models.runner.row_stability import RowPolicy
from sampling.params import SamplingParams
from tests.harness import make_parts
from tests.tiny_models import FAMILIES, greedy_reference, make_model

LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCABULARY_SIZE = 199
BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4  # layers, heads, widths, float32


@pytest.fixture(autouse=True)
def threads():
    """Building an engine sets the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_tokenizer():
    """Byte-level BPE without merges, as wide as the tiny models allow: ASCII and a bit."""
    alphabet = [*LETTERS.replace(" ", "Ġ"), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = ["<unk>", "</s>", *dict.fromkeys(alphabet)][:VOCABULARY_SIZE]
    backend = Tokenizer(
        tokenizer_models.BPE({token: index for index, token in enumerate(tokens)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    transformers_logging.disable_progress_bar()
    make_model(FAMILIES[0]).save_pretrained(path)
    transformers_logging.enable_progress_bar()
    make_tokenizer().save_pretrained(path)
    return path


def config_for(path, *, num_blocks=64, block_size=4, **model):
    return EngineConfig(
        model=ModelConfig(
            path=str(path), model_id="tiny", **{"dtype": "float32", "num_threads": 1, **model}
        ),
        kv_cache=KVCacheConfig(
            budget_bytes=BYTES_PER_TOKEN * block_size * (num_blocks + 1),
            block_size_tokens=block_size,
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
    )


def request(text, **fields):
    return GenerationRequest(
        request_id="r",
        prompt=TextPrompt(text=text),
        sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        is_max_tokens_explicit=True,
        seed=1,
        **fields,
    )


async def answer(engine, asked):
    """Start the engine, take one answer, and stop it; return the events."""
    engine.start()
    try:
        return [event async for events in engine.generate(asked) for event in events]
    finally:
        await engine.shutdown(drain_timeout_s=5.0)


@pytest.mark.anyio
async def test_a_built_engine_answers_text_with_text(folder, tmp_path):
    engine = build_engine(config_for(folder), cache_folder=tmp_path, progress=lambda _: None)

    events = await answer(engine, request("the sea"))

    tokenizer = make_tokenizer()
    prompt = tokenizer("the sea")["input_ids"]
    expected = greedy_reference(make_model(FAMILIES[0]), prompt, 12)
    admission, *deltas, end = events
    assert isinstance(admission, Admission)
    assert admission.num_prompt_tokens == len(prompt) == 7
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    text = "".join(delta.text for delta in deltas)
    assert text == tokenizer.decode(expected, skip_special_tokens=True)
    assert deltas[-1].finish_reason == FinishReason.LENGTH
    assert isinstance(end, GenerationEnd)


@pytest.mark.anyio
async def test_the_admission_names_the_arithmetic(folder, tmp_path):
    engine = build_engine(config_for(folder), cache_folder=tmp_path, progress=lambda _: None)

    events = await answer(engine, request("a"))

    assert events[0].numerics.endswith("/float32")


@pytest.mark.anyio
async def test_a_processor_that_the_configuration_names_is_run(folder, tmp_path):
    path = "tests.unit.sampling.example_processors:OnlyEvenTokens"
    config = dataclasses.replace(config_for(folder), logits_processors=(path,))
    engine = build_engine(config, cache_folder=tmp_path, progress=lambda _: None)

    events = await answer(engine, dataclasses.replace(request("the sea"), seed=2))

    token_ids = [token for event in events[1:-1] for token in event.token_ids]
    without = greedy_reference(
        make_model(FAMILIES[0]), make_tokenizer()("the sea")["input_ids"], 12
    )
    assert len(token_ids) == 12
    assert all(token_id % 2 == 0 for token_id in token_ids)
    assert any(token_id % 2 for token_id in without)


def test_progress_tells_of_loading_of_the_check_and_of_the_cache(folder, tmp_path):
    lines = []

    build_engine(config_for(folder), cache_folder=tmp_path, progress=lines.append)

    assert len(lines) == 3
    assert lines[0] == f"loading weights of {folder} as float32 on cpu"
    assert "against the model's own" in lines[1]
    assert lines[2] == (
        "KV cache: 64 blocks of 4 tokens, 256 tokens in all, 0 MiB; attention by matmul"
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_building_sets_the_threads_of_the_process(folder, tmp_path, num_threads):
    config = config_for(folder, num_threads=num_threads)

    build_engine(config, cache_folder=tmp_path, progress=lambda _: None)

    assert torch.get_num_threads() == num_threads


def refuse(config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        build_engine(config, cache_folder=tmp_path, progress=lambda _: None)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_folder_is_looked_at_before_its_weights_are_read(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")

    error = refuse(config_for(tmp_path), tmp_path)

    assert "a pickle that can run code" in error.reason


def test_a_file_that_is_no_gguf_is_refused(folder, tmp_path):
    error = refuse(config_for(folder / "config.json"), tmp_path)

    assert error.reason.endswith("config.json' is a file, not the folder of a model")


def test_a_device_that_is_not_there_is_refused_before_its_memory_is_asked_for(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    error = refuse(config_for(folder, device="cuda:9"), tmp_path)

    assert str(error) == "device: 'cuda:9': the last GPU here is cuda:0"


def test_the_memory_of_the_device_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 + device.index, 5000))
    monkeypatch.setattr(build, "available_host_memory_bytes", lambda: 7)

    assert available_memory_bytes("cuda:1") == 1001
    assert available_memory_bytes("cpu") == 7


def test_a_cache_for_which_there_is_no_room_is_refused(folder, tmp_path, monkeypatch):
    def no_room(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(build, "KVCachePool", no_room)

    error = refuse(config_for(folder), tmp_path)

    assert error.field == "kv_budget_bytes"
    assert "no room for a KV cache of 0.0 GiB" in error.reason


def test_a_budget_that_holds_no_block_is_refused(folder, tmp_path):
    error = refuse(config_for(folder, num_blocks=0), tmp_path)

    assert error.field == "kv_budget_bytes"
    assert f"needs at least {8 * BYTES_PER_TOKEN} bytes" in error.reason


def test_a_model_that_fails_the_self_check_is_refused_by_its_id(tmp_path):
    model = make_model(FAMILIES[0])
    model.get_output_embeddings().weight.data[:] = float("nan")
    transformers_logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "nan")
    transformers_logging.enable_progress_bar()
    make_tokenizer().save_pretrained(tmp_path / "nan")

    error = refuse(config_for(tmp_path / "nan"), tmp_path)

    assert "'tiny' is not served" in error.reason


# Which model a configuration names


def resolve(path, tmp_path, **fields):
    return resolve_model_path(ModelConfig(path=str(path), **fields), tmp_path, lambda _: None)


def test_no_path_names_the_bundled_model(tmp_path, monkeypatch):
    calls = []

    def ensure_bundled_model(cache_folder, progress):
        calls.append(cache_folder)
        return cache_folder / "bundled"

    monkeypatch.setattr(build, "ensure_bundled_model", ensure_bundled_model)

    assert resolve("", tmp_path) == str(tmp_path / "bundled")
    assert calls == [tmp_path]


def test_a_gguf_file_is_converted_to_the_served_dtype(tmp_path, monkeypatch):
    file = tmp_path / "some.gguf"
    file.touch()
    calls = []

    def convert_gguf(path, cache_folder, progress, *, dtype):
        calls.append((path, cache_folder, dtype))
        return cache_folder / "converted"

    monkeypatch.setattr(build, "convert_gguf", convert_gguf)

    assert resolve(file, tmp_path / "cache", dtype="float16") == str(
        tmp_path / "cache" / "converted"
    )
    assert calls == [(file, tmp_path / "cache", torch.float16)]


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert resolve(tmp_path, tmp_path / "cache") == str(tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_folder_in_the_home_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))

    assert resolve("~/model", tmp_path) == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["some-org/some-model", "some-model"])
def test_a_hub_id_is_left_to_transformers(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    assert resolve(name, tmp_path) == name


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "no-such.gguf", "a/b/c"])
def test_a_path_where_nothing_is_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="there is no such folder or file") as caught:
        resolve(path, tmp_path)

    assert caught.value.field == "model"


# Threads and the name of the arithmetic


def test_the_configured_number_of_threads_counts():
    assert plan_num_threads(ModelConfig(num_threads=3)) == 3


def test_without_one_every_core_that_may_be_used_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})

    assert plan_num_threads(ModelConfig()) == 3


def test_the_budget_of_prompt_log_probabilities_is_counted_in_rows_of_float32():
    assert plan_num_scored_positions(64 << 20, 49_152) == 341
    assert plan_num_scored_positions(4 * 199, 199) == 1
    assert plan_num_scored_positions(1, 150_000) == 1


@pytest.mark.parametrize(("max_num_scored_positions", "num_stretches"), [(1000, 1), (2, 3)])
def test_the_budget_limits_what_one_step_tells_of_a_prompt(max_num_scored_positions, num_stretches):
    model = make_model(FAMILIES[0])
    engine = make_parts(model, max_num_scored_positions=max_num_scored_positions).engine
    engine.add(dataclasses.replace(request(""), num_prompt_logprobs=0), (1, 2, 3, 4, 5, 6, 7))

    events = []
    while engine.has_work:
        events += [event for _, event in engine.step()]

    assert sum(isinstance(event, PromptLogprobs) for event in events) == num_stretches


LOADED = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), dtype=torch.bfloat16)
POLICY = RowPolicy(8, max_forward_rows=0, smallest_tile_rows=32)


def test_the_name_of_the_arithmetic_is_stable():
    assert describe_numerics(LOADED, POLICY, MATMUL) == describe_numerics(LOADED, POLICY, MATMUL)
    assert describe_numerics(LOADED, POLICY, MATMUL).startswith(f"torch-{torch.__version__[:4]}")


def test_the_name_of_the_arithmetic_tells_dtypes_apart():
    other = SimpleNamespace(model=LOADED.model, dtype=torch.float32)

    assert describe_numerics(LOADED, POLICY, MATMUL) != describe_numerics(other, POLICY, MATMUL)


def test_the_name_of_the_arithmetic_tells_numbers_of_threads_apart():
    one = describe_numerics(LOADED, POLICY, MATMUL)
    torch.set_num_threads(2)

    assert describe_numerics(LOADED, POLICY, MATMUL) != one


def test_the_name_of_the_arithmetic_tells_attention_backends_apart():
    assert describe_numerics(LOADED, POLICY, MATMUL) != describe_numerics(LOADED, POLICY, VARLEN)


def test_the_name_of_the_arithmetic_tells_tiles_apart():
    whole = dataclasses.replace(POLICY, smallest_tile_rows=0)

    assert describe_numerics(LOADED, POLICY, MATMUL) != describe_numerics(LOADED, whole, MATMUL)


def test_the_name_of_the_arithmetic_tells_processors_of_one_vector_width_apart(monkeypatch):
    names = set()
    for units in ({}, {"avx512_bf16": True}, {"avx512_bf16": True, "amx_bf16": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: units)
        names.add(describe_numerics(LOADED, POLICY, MATMUL))

    assert len(names) == 3
