"""Backends that are tried at load: which one serves when one fails, and what is told."""

import dataclasses
import logging

import pytest
import torch

from models.attention.choice import AttentionChoice
from models.attention.matmul import MatmulAttention
from models.attention.varlen import TORCH_VARLEN, VarlenAttention
from models.config import MATMUL, REFERENCE, VARLEN, KVCacheConfig, ModelConfig
from models.engine.attention_build import build_attention
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, plan_kv_cache
from models.loading.loader import LoadedModel, discover_layers
from models.runner.packed_forward import PackedForward
from models.runner.row_stability import RowPolicy, fix_rows
from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.attention.emulated_varlen import emulated_varlen

BLOCK_SIZE = 256


def family(name):
    return next(family for family in FAMILIES if family.name == name)


def build(model, kernel, *, is_asked_for=False, policy=None, num_blocks=2):
    """Build attention as an engine on a GPU would, with ``kernel`` for the GPU's."""
    layers = tuple(discover_layers(model))
    config = KVCacheConfig(budget_bytes=1 << 30, block_size_tokens=BLOCK_SIZE)
    plan = dataclasses.replace(plan_kv_cache(config, layers, model.dtype), num_blocks=num_blocks)
    pool = KVCachePool(plan, layers, model.dtype, model.device)
    policy = policy or RowPolicy(8, max_forward_rows=0, smallest_tile_rows=0)
    return build_attention(
        LoadedModel(model, layers, VOCABULARY_SIZE, 256, model.dtype),
        pool,
        AttentionChoice(VARLEN, is_asked_for, BLOCK_SIZE),
        lambda backend: PackedForward(model, pool, backend, policy),
        is_fixed=policy.is_fixed,
        model_id="tiny",
        varlen_function=kernel,
    )


def tiny(name="llama"):
    # the kernel takes heads of multiples of 8 elements, in half precision
    return make_model(family(name), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_kernel_that_keeps_its_contract_serves(name, caplog):
    parts = build(tiny(name), emulated_varlen)

    assert parts.name == VARLEN
    assert isinstance(parts.forward._backend, VarlenAttention)
    assert not caplog.records


def test_with_fixed_rows_too(caplog):
    model = tiny()

    parts = build(model, emulated_varlen, policy=fix_rows(model, 64))

    assert parts.name == VARLEN
    assert parts.forward._backend.is_row_independent
    assert not caplog.records


def failing(*tensors, **keywords):
    raise RuntimeError("FlashAttention only supports\n  Ampere GPUs or newer.")


def one_key_short(*tensors, seqused_k, **keywords):
    return emulated_varlen(*tensors, seqused_k=(seqused_k - 1).clamp(min=1), **keywords)


def never_written(query, *tensors, **keywords):
    return torch.full_like(query, torch.nan)


BAD = {
    "raises": (failing, "Ampere GPUs or newer"),
    "differs": (one_key_short, "differ"),
    "nan": (never_written, "not finite"),
    # On the CPU it has no kernel at all.
    "torch's own": (TORCH_VARLEN, "CPU"),
}


@pytest.mark.parametrize("kind", BAD)
def test_where_the_kernel_fails_matmul_serves_and_a_warning_says_why(kind, caplog):
    kernel, words = BAD[kind]
    with caplog.at_level(logging.WARNING):
        parts = build(tiny(), kernel)

    assert parts.name == MATMUL
    assert isinstance(parts.forward._backend, MatmulAttention)
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("kind", BAD)
def test_a_kernel_that_was_asked_for_by_name_and_fails_is_an_error(kind, caplog):
    kernel, words = BAD[kind]
    with pytest.raises(ConfigError, match=f"'varlen' cannot run: .*{words}") as caught:
        build(tiny(), kernel, is_asked_for=True)

    assert caught.value.field == "attention_backend"
    assert not caplog.records


def test_a_fault_of_the_model_itself_is_told_of_the_model():
    model = tiny()
    model.get_output_embeddings().weight.data[3, 0] = torch.nan

    with pytest.raises(ConfigError) as caught:
        build(model, emulated_varlen)

    assert caught.value.field == "model"


def test_an_engine_with_the_reference_gives_the_tokens_of_one_with_matmul():
    prompts = random_prompts(4, vocabulary_size=VOCABULARY_SIZE, seed=1, longest=20)
    jobs = [
        (make_request(f"r{index}", temperature=0.0, max_tokens=6), prompt)
        for index, prompt in enumerate(prompts)
    ]
    found = {}
    for name in (MATMUL, REFERENCE):
        parts = make_parts(make_model(family("gemma2")), attention_backend=name)
        assert parts.attention_backend == name
        assert parts.engine._limits.numerics.endswith(f"/{name}/float32")
        outputs = run(parts, jobs, arrivals={"r2": 3})
        found[name] = {key: output.token_ids for key, output in outputs.items()}

    assert found[MATMUL] == found[REFERENCE]


@pytest.mark.parametrize("name", ["", "flash", "Varlen"])
def test_an_unknown_backend_is_refused(name):
    with pytest.raises(ConfigError, match="auto, matmul, varlen, reference") as caught:
        ModelConfig(attention_backend=name)

    assert caught.value.field == "attention_backend"


def test_an_engine_on_the_cpu_refuses_varlen():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_parts(tiny(), attention_backend=VARLEN)
