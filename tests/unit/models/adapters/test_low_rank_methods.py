"""VeRA, LoHa and LoKr are read as low-rank pairs that do what PEFT's own layers do."""

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoHaConfig, LoKrConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.lokr.layer import factorization
from safetensors.torch import load_file

from models.adapters.lokr import split_width
from models.adapters.reading import parse_adapter
from models.adapters.source import CONFIG_NAME, WEIGHTS_NAME, AdapterContents
from models.requests import AdapterRef
from tests.unit.models.adapters.peft_adapters import (
    IDS,
    MODELS,
    SavedAdapter,
    apply_slowly,
    facts_of,
    quiet,
    randomise_,
    refusal,
)

LLAMA = MODELS["llama"]
FACTS = facts_of(LLAMA, max_rank=4096)
QV = ["q_proj", "v_proj"]
GATED = ["q_proj", "o_proj", "k_proj", "gate_proj", "down_proj"]
CONV = ["c_attn", "c_proj", "c_fc"]
Q0 = "model.layers.0.self_attn.q_proj"


def vera(**options):
    with quiet():
        return VeraConfig(**{"r": 12, "target_modules": QV, "task_type": "CAUSAL_LM"} | options)


def loha(**options):
    return LoHaConfig(
        **{"r": 3, "alpha": 5, "target_modules": QV, "task_type": "CAUSAL_LM"} | options
    )


def lokr(**options):
    return LoKrConfig(
        **{"r": 2, "alpha": 5, "target_modules": QV, "task_type": "CAUSAL_LM"} | options
    )


PATTERNS = {
    "target_modules": GATED,
    "rank_pattern": {"q_proj": 5, r"layers\.[12]\.mlp\..*": 2, "0.mlp.up_proj": 7},
    "alpha_pattern": {"o_proj": 30, r".*\.2\.mlp\.down_proj": 1.5},
}
CASES = {
    "vera-one-width": ("llama", lambda: vera(target_modules=["q_proj"])),
    "vera-widths-are-slices": ("llama", lambda: vera(target_modules=GATED, vera_dropout=0.1)),
    "vera-regenerated": (
        "qwen3",
        lambda: vera(target_modules=GATED, save_projection=False, projection_prng_key=1234567),
    ),
    "vera-regenerated-default-key": ("llama", lambda: vera(save_projection=False)),
    "vera-conv": ("gpt2", lambda: vera(target_modules=CONV, fan_in_fan_out=True)),
    "vera-regenerated-conv": ("gpt2", lambda: vera(target_modules=CONV, save_projection=False)),
    "vera-biases": ("gpt2", lambda: vera(target_modules=["c_fc"], bias="vera_only", d_initial=0.3)),
    "vera-all-biases": ("gpt2", lambda: vera(target_modules=["c_attn"], bias="all")),
    "vera-layers": (
        "llama",
        lambda: vera(layers_to_transform=[0, 2], layers_pattern="layers", save_projection=False),
    ),
    "vera-head": ("llama", lambda: vera(target_modules=["q_proj", "lm_head"])),
    "vera-all-linear": ("llama", lambda: vera(target_modules="all-linear", save_projection=False)),
    "vera-moe": ("qwen3-moe", lambda: vera(target_modules=["q_proj", "o_proj"])),
    "loha": ("llama", lambda: loha(target_modules=GATED)),
    "loha-patterns": ("qwen3", lambda: loha(**PATTERNS)),
    "loha-dropouts": ("llama", lambda: loha(rank_dropout=0.3, module_dropout=0.2)),
    "loha-random-init": ("llama", lambda: loha(init_weights=False, use_effective_conv2d=True)),
    "loha-excluded": (
        "llama",
        lambda: loha(target_modules="all-linear", exclude_modules=["o_proj", "1.mlp.up_proj"]),
    ),
    "loha-moe": ("qwen3-moe", lambda: loha(target_modules=["o_proj", "v_proj"])),
    "lokr": ("llama", lambda: lokr(target_modules=GATED)),
    "lokr-both": ("llama", lambda: lokr(target_modules=GATED, decompose_both=True)),
    "lokr-whole": ("llama", lambda: lokr(target_modules=GATED, r=60)),
    "lokr-whole-both": ("qwen3", lambda: lokr(target_modules=GATED, r=60, decompose_both=True)),
    "lokr-factor": ("llama", lambda: lokr(target_modules=GATED, decompose_factor=2)),
    "lokr-factor-left-is-larger": (
        "llama",
        lambda: lokr(decompose_factor=32, target_modules=["q_proj"], decompose_both=True),
    ),
    "lokr-factor-not-a-divisor": ("llama", lambda: lokr(target_modules=GATED, decompose_factor=5)),
    "lokr-patterns": ("qwen3", lambda: lokr(**PATTERNS, decompose_factor=4)),
    "lokr-dropouts": (
        "llama",
        lambda: lokr(rank_dropout=0.3, rank_dropout_scale=True, module_dropout=0.2),
    ),
    "lokr-lycoris": ("llama", lambda: lokr(init_weights="lycoris", use_effective_conv2d=True)),
    "lokr-moe": ("qwen3-moe", lambda: lokr(target_modules=["o_proj"])),
}


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pefts_own_forward(tmp_path, case):
    family, make_config = CASES[case]
    base = MODELS[family]
    adapter = SavedAdapter(tmp_path, base, make_config())

    weights = adapter.read(facts_of(base, max_rank=4096))

    with torch.no_grad():
        undisturbed = base(IDS, use_cache=False).logits
    assert (adapter.logits - undisturbed).abs().max() > 1e-2 * undisturbed.abs().max()
    assert_close(apply_slowly(base, weights), adapter.logits)
    assert weights.warnings == ()


def peft_deltas(config):
    """What PEFT adds to each weight, of a model with random numbers, and its adapter's tensors."""
    with quiet():
        model = get_peft_model(copy.deepcopy(LLAMA), config).eval()
    randomise_(model, torch.float32)
    return model, {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(1, 9),
    alpha=st.floats(0.1, 40),
    factor=st.sampled_from([-1, 1, 2, 3, 4, 8, 16, 48, 1000]),
    is_both=st.booleans(),
    is_lokr=st.booleans(),
)
def test_pairs_are_pefts_change_of_every_weight(
    tmp_path_factory, rank, alpha, factor, is_both, is_lokr
):
    options = {"r": rank, "alpha": alpha, "target_modules": GATED, "layers_to_transform": 1}
    if is_lokr:
        config = lokr(**options, decompose_both=is_both, decompose_factor=factor)
    else:
        config = loha(**options)
    model, expected = peft_deltas(config)
    folder = tmp_path_factory.mktemp("one")
    with quiet():
        model.save_pretrained(folder)
    config, stored = ((folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME))

    contents = AdapterContents(config=config, weights=stored)
    weights = parse_adapter(AdapterRef("tests/one", "v1"), contents, FACTS)

    assert set(weights.modules) == set(expected)
    for name, delta in weights.modules.items():
        actual = delta.lora_b @ delta.lora_a
        assert (actual - expected[name]).abs().max() <= 2e-6 * expected[name].abs().max()


@given(width=st.integers(1, 20_000), factor=st.integers(-3, 300))
def test_widths_are_split_as_peft_splits_them(width, factor):
    split = split_width(width, factor)

    assert (split.left, split.right) == factorization(width, factor)


def test_a_lokr_takes_the_least_rank_that_its_matrices_allow(tmp_path):
    # 64 = 4 * 16 by factor 4: a whole left of rank 4; a right of r, or of its side if that is less.
    ranks = {}
    for r in (2, 30):
        config = lokr(r=r, decompose_factor=4, target_modules=["q_proj"])
        ranks[r] = SavedAdapter(tmp_path / str(r), LLAMA, config).read(FACTS).rank
    both = lokr(r=1, decompose_factor=4, target_modules=["q_proj"], decompose_both=True)
    # 64 = 1 * 64 and v_proj's 32 = 1 * 32 by factor 1: as a LoRA of rank 2.
    plain = lokr(r=2, decompose_factor=1, target_modules=["v_proj"])

    assert ranks == {2: 8, 30: 64}
    assert SavedAdapter(tmp_path / "both", LLAMA, both).read(FACTS).rank == 1
    assert SavedAdapter(tmp_path / "plain", LLAMA, plain).read(FACTS).rank == 2


@pytest.mark.parametrize(
    ("config", "rank", "words"),
    [
        (vera(r=12), 12, f"its rank of 12 at module '{Q0}'"),
        (loha(r=3), 9, f"its rank of 9 (from LoHa's r 3) at module '{Q0}'"),
        (
            lokr(decompose_factor=4, target_modules=["q_proj"]),
            8,
            f"its rank of 8 (from LoKr's matrices of ranks 4 and 2) at module '{Q0}'",
        ),
    ],
    ids=["vera", "loha", "lokr"],
)
def test_a_rank_over_the_limit_is_refused_by_name(tmp_path, config, rank, words):
    adapter = SavedAdapter(tmp_path, LLAMA, config)

    reason = refusal(lambda: adapter.read(facts_of(LLAMA, max_rank=rank - 1)))

    assert reason == f"{words} is over the limit of {rank - 1}"
    assert adapter.read(facts_of(LLAMA, max_rank=rank)).rank == rank


@pytest.mark.parametrize(("make", "method"), [(loha, "LoHa"), (lokr, "LoKr")])
def test_modules_that_peft_does_not_have_the_method_for_are_refused_by_name(tmp_path, make, method):
    adapter = SavedAdapter(tmp_path, LLAMA, make())
    adapter.edit_config(target_modules=["c_attn"])
    embedding = SavedAdapter(tmp_path / "embedding", LLAMA, make())
    embedding.edit_config(target_modules=["embed_tokens"])

    conv = refusal(lambda: adapter.read(facts_of(MODELS["gpt2"])))
    table = refusal(lambda: embedding.read(FACTS))

    assert conv == (
        f"{method} cannot change 'transformer.h.0.attn.c_attn': PEFT has no {method} for its kind "
        "(Conv1D)"
    )
    assert table == f"{method} cannot change the embedding 'model.embed_tokens'"


def test_a_saved_pair_of_another_size_is_refused_by_its_name(tmp_path):
    adapter = SavedAdapter(tmp_path, LLAMA, vera())
    adapter.edit_tensors(
        lambda name, tensor: tensor[:, :-1].contiguous() if "vera_A" in name else tensor
    )

    assert refusal(lambda: adapter.read(FACTS)) == (
        "base_model.vera_A is [12, 63], but this model and the adapter's configuration need "
        "[12, 64]"
    )


def test_a_pair_that_should_be_in_the_file_is_missed(tmp_path):
    adapter = SavedAdapter(tmp_path, LLAMA, vera(save_projection=False))
    adapter.edit_config(save_projection=True)

    assert "lacks 2 of 14 tensors, the first being 'base_model.vera_A'" in (
        refusal(lambda: adapter.read(FACTS))
    )


def test_a_pair_is_regenerated_as_if_it_were_saved(tmp_path):
    saved = SavedAdapter(tmp_path / "a", LLAMA, vera(projection_prng_key=7, target_modules=GATED))
    drawn = SavedAdapter(
        tmp_path / "b",
        LLAMA,
        vera(projection_prng_key=7, target_modules=GATED, save_projection=False),
    )
    assert not any(
        "vera_A" in name for name in load_file(drawn.folder / "adapter_model.safetensors")
    )

    expected, actual = saved.read(FACTS), drawn.read(FACTS)

    for name, delta in actual.modules.items():
        assert torch.equal(delta.lora_a, expected.modules[name].lora_a)
        assert torch.equal(delta.lora_b, expected.modules[name].lora_b)


def test_without_peft_a_pair_that_is_not_saved_is_refused_by_name(tmp_path, monkeypatch):
    saved = SavedAdapter(tmp_path / "a", LLAMA, vera())
    drawn = SavedAdapter(tmp_path / "b", LLAMA, vera(save_projection=False))
    monkeypatch.setitem(sys.modules, "peft.tuners.vera.model", None)

    assert "(save_projection), which only the package peft can make again" in (
        refusal(lambda: drawn.read(FACTS))
    )
    assert saved.read(FACTS).rank == 12


@pytest.mark.parametrize("config", [vera(), loha(), lokr()], ids=["vera", "loha", "lokr"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_multiplied_in_float32(tmp_path, config, dtype):
    adapter = SavedAdapter(tmp_path, LLAMA, config, dtype=dtype)

    weights = adapter.read(FACTS)

    with quiet(), torch.no_grad():
        model = PeftModel.from_pretrained(copy.deepcopy(LLAMA), tmp_path).eval()
        expected = model(IDS, use_cache=False).logits
    assert all(delta.lora_b.dtype == torch.float32 for delta in weights.modules.values())
    assert_close(apply_slowly(LLAMA, weights), expected)
