"""The self-check: passes on what is served, and refuses what computes something else."""

import dataclasses

import pytest
import torch

from models.attention.backend import attach
from models.attention.matmul import MatmulAttention
from models.config import KVCacheConfig
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, plan_kv_cache
from models.loading.arithmetic import product_dtype
from models.loading.loader import discover_layers
from models.runner.packed_forward import PackedForward
from models.runner.row_stability import RowPolicy
from models.runner.self_check import TOLERANCE, check_model
from tests.tiny_models import FAMILIES, Family, make_model


def family(name):
    return next(family for family in FAMILIES if family.name == name)


class Checked:
    """A model plugged in, and its self-check."""

    def __init__(self, model, *, block_size=4, num_blocks=8, backend_class=MatmulAttention):
        self.model = model
        layers = discover_layers(model)
        config = KVCacheConfig(budget_bytes=1 << 30, block_size_tokens=block_size)
        plan = dataclasses.replace(
            plan_kv_cache(config, layers, model.dtype), num_blocks=num_blocks
        )
        self.pool = KVCachePool(plan, layers, model.dtype, model.device)
        backend = backend_class(self.pool, product_dtype(model.dtype, model.device))
        attach(model, backend)
        policy = RowPolicy(8, max_forward_rows=0, smallest_tile_rows=0)
        self.forward = PackedForward(model, self.pool, backend, policy)

    def error(self):
        return check_model(self.model, self.forward, self.pool, name="tiny")

    def assert_refused(self, words="differ"):
        with pytest.raises(ConfigError, match=f"'tiny' is not served.*{words}") as caught:
            self.error()
        assert caught.value.field == "model"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family_passes(name):
    assert Checked(make_model(family(name))).error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_rounding_to_bfloat16_passes(name):
    model = make_model(family(name), dtype=torch.bfloat16)

    assert Checked(model).error() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_token_that_rounding_sends_to_another_expert_is_no_fault(name, seed):
    model = make_model(family(name), dtype=torch.bfloat16, seed=seed, head_dim=32)

    assert Checked(model).error() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_mixture_of_experts_that_never_calls_the_backend_is_refused(name):
    checked = Checked(make_model(family(name), dtype=torch.bfloat16))
    checked.model.config._attn_implementation = "eager"

    checked.assert_refused()


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_block_size_passes(block_size):
    checked = Checked(make_model(family("llama")), block_size=block_size, num_blocks=18)

    assert checked.error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_that_never_calls_the_backend_is_refused(name):
    checked = Checked(make_model(family(name)))
    checked.model.config._attn_implementation = "eager"

    checked.assert_refused()


@pytest.mark.parametrize("index", [0, 2])
def test_a_single_layer_that_bypasses_the_backend_is_refused(index):
    checked = Checked(make_model(family("llama")))
    attention = checked.model.model.layers[index].self_attn
    attention.config = type(attention.config)(**attention.config.to_dict())
    attention.config._attn_implementation = "eager"

    checked.assert_refused()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_wrong_positions_are_refused(monkeypatch, name):
    checked = Checked(make_model(family(name)))
    pack = checked.forward.pack
    monkeypatch.setattr(
        checked.forward,
        "pack",
        lambda parts: dataclasses.replace(
            inputs := pack(parts), positions=torch.zeros_like(inputs.positions)
        ),
    )

    checked.assert_refused()


def test_positions_that_count_within_the_chunk_are_refused(monkeypatch):
    # what a model does that makes its own positions
    checked = Checked(make_model(family("gpt2")))
    pack = checked.forward.pack
    monkeypatch.setattr(
        checked.forward,
        "pack",
        lambda parts: dataclasses.replace(
            inputs := pack(parts), positions=torch.arange(inputs.positions.shape[1])[None]
        ),
    )

    checked.assert_refused()


class Forgetful(MatmulAttention):
    """Leaves out one option of the attention."""

    option = ""

    def __call__(self, *tensors, **keywords):
        return super().__call__(*tensors, **{**keywords, self.option: None})


@pytest.mark.parametrize(
    ("name", "option"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gemma2", "scaling")],
)
def test_an_option_of_the_attention_that_is_left_out_is_refused(name, option):
    backend_class = type("Forgetful", (Forgetful,), {"option": option})

    Checked(make_model(family(name)), backend_class=backend_class).assert_refused()


def test_an_encoder_that_looks_ahead_is_refused():
    Checked(make_model(Family("bert", "bert", {}))).assert_refused()


def test_a_row_that_reads_another_sequences_blocks_is_refused(monkeypatch):
    checked = Checked(make_model(family("llama")))
    pack = checked.forward.pack

    def pack_into_one_table(parts):
        return pack([dataclasses.replace(part, block_ids=parts[0].block_ids) for part in parts])

    monkeypatch.setattr(checked.forward, "pack", pack_into_one_table)

    checked.assert_refused()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused(value):
    checked = Checked(make_model(family("llama")))
    checked.model.get_output_embeddings().weight.data[3, 0] = value

    checked.assert_refused("not finite numbers")


def test_a_pool_that_is_too_small_to_check_is_refused():
    with pytest.raises(
        ConfigError, match=r"4 KV blocks of 4 tokens are too few.* needs 5"
    ) as caught:
        Checked(make_model(family("llama")), num_blocks=4).error()

    assert caught.value.field == "kv_budget_bytes"


def test_the_smallest_pool_that_can_be_checked_passes():
    Checked(make_model(family("llama")), num_blocks=5).error()


def test_the_backend_stays_attached_whatever_happens():
    checked = Checked(make_model(family("llama")))
    attached = checked.model.config._attn_implementation

    checked.error()
    assert checked.model.config._attn_implementation == attached

    checked.model.get_output_embeddings().weight.data[:] = float("nan")
    checked.assert_refused("not finite")
    assert checked.model.config._attn_implementation == attached


def test_what_the_check_leaves_in_the_pool_harms_nobody():
    checked = Checked(make_model(family("llama")))

    assert checked.error() == checked.error()
    assert not checked.pool.keys[0][:, checked.pool.null_block_id].any()
