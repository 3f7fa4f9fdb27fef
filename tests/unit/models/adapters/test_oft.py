"""OFT is read as rotations of inputs that do what PEFT's own layers do."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import OFTConfig, PeftModel
from peft.tuners.oft.layer import OFTLayer, OFTRotationModule

from models.adapters.oft import make_rotations, nearest_divisor
from tests.unit.models.adapters.peft_adapters import (
    IDS,
    MODELS,
    SavedAdapter,
    apply_slowly,
    facts_of,
    quiet,
    refusal,
)

LLAMA = MODELS["llama"]
FACTS = facts_of(LLAMA)
QV = ["q_proj", "v_proj"]
GATED = ["q_proj", "o_proj", "k_proj", "gate_proj", "down_proj"]


def oft(**options):
    if "r" in options:
        options["oft_block_size"] = 0
    common = {"oft_block_size": 16, "target_modules": QV, "task_type": "CAUSAL_LM"}
    return OFTConfig(**common | options)


CASES = {
    "series": ("llama", lambda: oft(target_modules=GATED)),
    "exact": ("llama", lambda: oft(target_modules=GATED, use_cayley_neumann=False)),
    "one-term": ("llama", lambda: oft(num_cayley_neumann_terms=2)),
    "seven-terms": ("qwen3", lambda: oft(num_cayley_neumann_terms=7, oft_block_size=4)),
    "size-adjusted": ("llama", lambda: oft(target_modules=GATED, oft_block_size=20)),
    "size-over-the-width": ("llama", lambda: oft(oft_block_size=500, use_cayley_neumann=False)),
    "number-of-blocks": ("llama", lambda: oft(target_modules=GATED, r=8)),
    "number-adjusted": ("qwen3", lambda: oft(target_modules=GATED, r=7)),
    "shared": ("llama", lambda: oft(target_modules=GATED, block_share=True)),
    "shared-exact": ("llama", lambda: oft(block_share=True, use_cayley_neumann=False, r=4)),
    "constrained": ("llama", lambda: oft(coft=True, eps=3.0)),
    "constrained-shared": ("llama", lambda: oft(coft=True, eps=0.7, block_share=True)),
    "constraint-without-effect": ("llama", lambda: oft(coft=True, eps=100.0)),
    "all-linear": ("llama", lambda: oft(target_modules="all-linear", module_dropout=0.3)),
    "head": ("llama", lambda: oft(target_modules=["lm_head", "q_proj"])),
    "excluded-layers": (
        "llama",
        lambda: oft(exclude_modules=["v_proj"], layers_to_transform=[0, 2]),
    ),
    "biases": ("qwen2", lambda: oft(bias="oft_only")),
    "all-biases": ("qwen2", lambda: oft(target_modules=["q_proj", "down_proj"], bias="all")),
    "moe": ("qwen3-moe", lambda: oft(target_modules=["q_proj", "o_proj"])),
}


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pefts_own_forward(tmp_path, case):
    family, make_config = CASES[case]
    base = MODELS[family]
    with quiet():
        adapter = SavedAdapter(tmp_path, base, make_config())

    weights = adapter.read(facts_of(base))

    with torch.no_grad():
        undisturbed = base(IDS, use_cache=False).logits
    assert (adapter.logits - undisturbed).abs().max() > 1e-2 * undisturbed.abs().max()
    assert_close(apply_slowly(base, weights), adapter.logits)
    assert weights.warnings == ()
    assert weights.rank == 0


@given(
    num_blocks=st.integers(1, 5),
    size=st.integers(1, 9),
    is_series=st.booleans(),
    num_terms=st.integers(-1, 8),
    constraint=st.none() | st.floats(1e-6, 10),
    scale=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
)
def test_rotations_are_pefts(num_blocks, size, is_series, num_terms, constraint, scale):
    module = OFTRotationModule(
        num_blocks,
        size * (size - 1) // 2,
        size,
        num_blocks * size,
        coft=constraint is not None,
        eps=constraint or 0,
        use_cayley_neumann=is_series,
        num_cayley_neumann_terms=num_terms,
    )
    angles = scale * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(5))
    module.weight.data.copy_(angles)

    rotations = make_rotations(
        angles, size, constraint=constraint, num_neumann_terms=num_terms if is_series else None
    )

    expected = module.get_weight().detach()
    actual = torch.block_diag(*rotations)
    assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max()


@given(width=st.integers(1, 5000), wanted=st.integers(1, 6000))
def test_blocks_are_adjusted_as_peft_adjusts_them(width, wanted):
    is_bad = width % wanted != 0 or wanted > width
    expected = OFTLayer.adjust_oft_parameters(None, width, wanted) if is_bad else wanted

    assert nearest_divisor(width, wanted) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_of_half_precision_files_are_made_in_float32(tmp_path, dtype):
    adapter = SavedAdapter(tmp_path, LLAMA, oft(use_cayley_neumann=False), dtype=dtype)

    weights = adapter.read(FACTS)

    with quiet(), torch.no_grad():
        model = PeftModel.from_pretrained(copy.deepcopy(LLAMA), tmp_path).eval()
        expected = model(IDS, use_cache=False).logits
    rotation = weights.modules["model.layers.1.self_attn.v_proj"].input_rotation
    assert rotation.dtype == torch.float32
    assert_close(rotation @ rotation.transpose(1, 2), torch.eye(16).expand(4, -1, -1))
    assert_close(apply_slowly(LLAMA, weights), expected)


def test_bytes_are_those_of_the_rotations(tmp_path):
    own = SavedAdapter(tmp_path / "own", LLAMA, oft(target_modules=["q_proj"])).read(FACTS)
    shared = oft(target_modules=["q_proj"], block_share=True)

    assert own.num_bytes == 3 * 4 * (4 * 16 * 16)
    assert SavedAdapter(tmp_path / "s", LLAMA, shared).read(FACTS).num_bytes == 3 * 4 * 16 * 16


def test_an_adapter_that_turns_nothing_is_told(tmp_path):
    adapter = SavedAdapter(tmp_path, LLAMA, oft())
    adapter.edit_tensors(lambda name, tensor: tensor * 0)

    assert adapter.read(FACTS).warnings == ("it changes nothing: the base model answers the same",)


def test_a_number_of_angles_of_another_block_size_is_refused_by_its_name(tmp_path):
    adapter = SavedAdapter(tmp_path, LLAMA, oft())
    adapter.edit_config(oft_block_size=8)

    assert refusal(lambda: adapter.read(FACTS)) == (
        "module 'model.layers.0.self_attn.q_proj': oft_R.weight is [4, 120], but this model and "
        "the adapter's configuration need [8, 28]"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"oft_block_size": None}, "its oft_block_size is not given: OFT of PEFT before 0.14"),
        ({"r": 4}, "one of r and oft_block_size must be 0 and the other above, not 4 and 16"),
        ({"oft_block_size": 0}, "not 0 and 0"),
        ({"oft_block_size": -4}, "not 0 and -4"),
        ({"num_cayley_neumann_terms": 2.5}, "num_cayley_neumann_terms must be a whole number"),
        ({"num_cayley_neumann_terms": 65}, "terms of 65 are over the limit of 64"),
        ({"coft": True, "eps": "x"}, "its eps must be a finite number"),
        ({"bias": "lora_only"}, "its bias must be none, all or oft_only, not 'lora_only'"),
        ({"target_modules": ["embed_tokens"]}, "OFT cannot change the embedding"),
    ],
)
def test_what_does_not_work_is_refused_by_name(tmp_path, changes, words):
    adapter = SavedAdapter(tmp_path, LLAMA, oft())
    adapter.edit_config(**changes)

    assert words in refusal(lambda: adapter.read(FACTS))


def test_layers_that_peft_has_no_oft_for_are_refused_by_name(tmp_path):
    adapter = SavedAdapter(tmp_path, LLAMA, oft())
    adapter.edit_config(target_modules=["c_attn"])

    assert "PEFT has no OFT for its kind (Conv1D)" in (
        refusal(lambda: adapter.read(facts_of(MODELS["gpt2"])))
    )
