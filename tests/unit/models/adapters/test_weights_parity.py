"""What is read from a file of PEFT's gives, applied by its formula, what PEFT's forward gives."""

import pytest
import torch
from peft import IA3Config, LoraConfig

from tests.unit.models.adapters.peft_adapters import (
    IDS,
    MODELS,
    SavedAdapter,
    apply_slowly,
    facts_of,
)

QV = ["q_proj", "v_proj"]
CONV = ["c_attn", "c_proj", "c_fc"]
GATED = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 24, "task_type": "CAUSAL_LM"} | options)


def ia3(**options):
    return IA3Config(**{"task_type": "CAUSAL_LM"} | options)


CASES = {
    "llama-list": ("llama", lambda: lora(target_modules=QV)),
    "qwen3-all-linear": ("qwen3", lambda: lora(target_modules="all-linear")),
    "gpt2-all-linear": ("gpt2", lambda: lora(target_modules="all-linear", fan_in_fan_out=True)),
    "gpt2-fan-in-not-told": ("gpt2", lambda: lora(target_modules=CONV, use_dora=True)),
    "regex": ("llama", lambda: lora(target_modules=r".*\.[02]\.(self_attn|mlp)\..*(k|up)_proj")),
    "excluded": ("llama", lambda: lora(target_modules=GATED, exclude_modules=["1.mlp.up_proj"])),
    "excluded-by-regex": (
        "llama",
        lambda: lora(target_modules="all-linear", exclude_modules=r".*layers\.1\..*"),
    ),
    "rslora": ("llama", lambda: lora(target_modules=GATED, use_rslora=True)),
    "mixed-ranks": (
        "qwen3",
        lambda: lora(
            target_modules=GATED,
            rank_pattern={"q_proj": 9, r"layers\.[12]\.mlp\..*": 2, "0.mlp.up_proj": 17},
            alpha_pattern={"o_proj": 100, r".*\.2\.mlp\.down_proj": 1.5},
        ),
    ),
    "mixed-ranks-rslora": (
        "llama",
        lambda: lora(target_modules=QV, rank_pattern={"v_proj": 16}, use_rslora=True),
    ),
    "one-layer": ("llama", lambda: lora(target_modules=QV, layers_to_transform=1)),
    "two-layers": (
        "gpt2",
        lambda: lora(target_modules=CONV, layers_to_transform=[0, 2], layers_pattern="h"),
    ),
    "lora-bias": ("llama", lambda: lora(target_modules=QV, lora_bias=True)),
    "lora-bias-on-bias": ("gpt2", lambda: lora(target_modules=CONV, lora_bias=True)),
    "bias-all": ("gpt2", lambda: lora(target_modules=["c_attn"], bias="all")),
    "bias-targets": ("gpt2", lambda: lora(target_modules=CONV, bias="lora_only")),
    "bias-of-three-kinds": (
        "gpt2",
        lambda: lora(target_modules=["c_fc"], bias="lora_only", lora_bias=True),
    ),
    "head": ("llama", lambda: lora(target_modules=["lm_head", "q_proj"])),
    "embedding": ("llama", lambda: lora(target_modules=["embed_tokens", "lm_head"])),
    "embedding-dora": ("llama", lambda: lora(target_modules=["embed_tokens"], use_dora=True)),
    "embedding-gpt2": ("gpt2", lambda: lora(target_modules=["wte", "wpe", "c_attn"])),
    "embedding-scaled": ("gemma3", lambda: lora(target_modules=["embed_tokens"])),
    "embedding-scaled-dora": (
        "gemma3",
        lambda: lora(target_modules=["embed_tokens", "q_proj"], use_dora=True),
    ),
    "dora": ("llama", lambda: lora(target_modules=GATED, use_dora=True)),
    "dora-rslora": ("qwen3", lambda: lora(target_modules=QV, use_dora=True, use_rslora=True)),
    "dora-on-bias": (
        "gpt2",
        lambda: lora(target_modules=CONV, use_dora=True, fan_in_fan_out=True, bias="lora_only"),
    ),
    "dora-head": ("llama", lambda: lora(target_modules=["lm_head"], use_dora=True)),
    "init-gaussian": ("llama", lambda: lora(target_modules=QV, init_lora_weights="gaussian")),
    "init-mica": ("llama", lambda: lora(target_modules=QV, init_lora_weights="mica")),
    "init-orthogonal": ("llama", lambda: lora(target_modules=QV, init_lora_weights="orthogonal")),
    "ia3": (
        "llama",
        lambda: ia3(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "ia3-default-targets": ("llama", ia3),
    "ia3-regex": (
        "qwen3",
        lambda: ia3(target_modules=r".*(v_proj|up_proj)", feedforward_modules=r".*\.1\..*"),
    ),
    "ia3-on-bias": (
        "gpt2",
        lambda: ia3(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    ),
    "ia3-no-feedforward": (
        "gpt2",
        lambda: ia3(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
    ),
    "ia3-excluded": (
        "llama",
        lambda: ia3(
            target_modules="all-linear", feedforward_modules=[], exclude_modules=["o_proj"]
        ),
    ),
    "moe-attention": ("qwen3-moe", lambda: lora(target_modules=QV)),
}


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pefts_own_forward(tmp_path, case):
    family, make_config = CASES[case]
    base = MODELS[family]
    adapter = SavedAdapter(tmp_path, base, make_config())

    weights = adapter.read(facts_of(base))

    with torch.no_grad():
        undisturbed = base(IDS, use_cache=False).logits
    assert (adapter.logits - undisturbed).abs().max() > 1e-2 * undisturbed.abs().max()
    assert_close(apply_slowly(base, weights), adapter.logits)
    assert weights.warnings == ()


def test_all_linear_in_the_file_means_what_peft_made_of_it(tmp_path):
    base = MODELS["qwen3"]
    adapter = SavedAdapter(tmp_path, base, lora(target_modules="all-linear"))
    listed = adapter.read(facts_of(base))

    adapter.edit_config(target_modules="ALL-linear")
    short = adapter.read(facts_of(base))

    assert list(short.modules) == list(listed.modules)
    assert "lm_head" not in short.modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_scaled_in_float32(tmp_path, dtype):
    base = MODELS["llama"]
    config = lora(target_modules=QV, lora_alpha=7, use_rslora=True)
    adapter = SavedAdapter(tmp_path, base, config, dtype=dtype)

    weights = adapter.read(facts_of(base))

    delta = weights.modules["model.layers.0.self_attn.q_proj"]
    assert delta.lora_a.dtype == dtype
    assert delta.lora_b.dtype == torch.float32
    assert_close(apply_slowly(base, weights), adapter.logits)


def test_sizes_and_ranks_are_those_of_the_tensors(tmp_path):
    base = MODELS["llama"]
    config = lora(target_modules=QV, rank_pattern={"0.self_attn.v_proj": 12})
    adapter = SavedAdapter(tmp_path, base, config)

    weights = adapter.read(facts_of(base))

    assert weights.ref.id == "tests/one"
    assert weights.ref.version == adapter.files.version
    assert weights.rank == 12
    assert len(weights.modules) == 6
    num_elements = 3 * 4 * (64 + 64) + 2 * 4 * (64 + 32) + 12 * (64 + 32)
    assert weights.num_bytes == 4 * num_elements


def test_biases_of_norms_that_were_trained_besides_are_read(tmp_path):
    base = MODELS["gpt2"]
    adapter = SavedAdapter(tmp_path, base, lora(target_modules=["c_attn"], bias="all"))

    weights = adapter.read(facts_of(base))

    norm = weights.modules["transformer.h.1.ln_2"]
    assert norm.bias is not None
    assert norm.rank == 0


def test_a_table_that_peft_saved_although_nobody_changed_it_is_no_obstacle(tmp_path):
    base = MODELS["llama"]
    adapter = SavedAdapter(tmp_path, base, lora(target_modules=QV))
    plain = adapter.read(facts_of(base))
    table = base.get_input_embeddings().weight.detach()
    adapter.add_tensor("base_model.model.model.embed_tokens.weight", table.bfloat16())

    assert list(adapter.read(facts_of(base)).modules) == list(plain.modules)
