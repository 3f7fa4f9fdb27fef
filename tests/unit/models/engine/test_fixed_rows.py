"""Engines whose forward passes have fixed rows, as ``batch_invariant`` has them on a GPU.

Switched on by hand: on the CPU the setting changes nothing.
"""

import pytest
import torch

from models.attention.matmul import MatmulAttention
from models.config import AdapterConfig
from models.engine import build
from models.runner.row_stability import fix_rows
from tests.company import assert_company_changes_nothing
from tests.harness import make_parts, random_prompts
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model


def family(name):
    return next(family for family in FAMILIES if family.name == name)


@pytest.fixture
def fixed_rows(monkeypatch):
    def fix(model, *, dtype, max_rows, is_batch_invariant):
        assert is_batch_invariant
        return fix_rows(model, max_rows)

    monkeypatch.setattr(build, "make_row_independent", fix)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit(fixed_rows, dtype, has_adapters):
    prompts = random_prompts(4, vocabulary_size=VOCABULARY_SIZE, seed=2, longest=90)

    def make_engine(budget):
        parts = make_parts(
            make_model(family("mistral"), dtype=dtype),
            num_blocks=100,
            block_size=16,
            max_num_batched_tokens=budget,
            is_prefix_caching_enabled=False,
            adapters=AdapterConfig(path="anywhere" if has_adapters else ""),
            is_batch_invariant=True,
        )
        assert parts.row_policy.is_fixed
        assert (parts.adapters is not None) == has_adapters
        assert "rows" not in parts.engine._limits.numerics  # said of GPUs only
        return parts

    assert_company_changes_nothing(make_engine, prompts)


def test_the_output_head_multiplies_the_rows_of_a_pass_at_once(fixed_rows):
    model = make_model(family("llama"), dtype=torch.bfloat16)

    parts = make_parts(model, max_num_batched_tokens=19, is_batch_invariant=True)

    assert model.get_output_embeddings().tile_rows == parts.row_policy.multiple == 24


class CountingAttention(MatmulAttention):
    """Adds what depends on the number of tokens in the step."""

    def __call__(self, module, query, *tensors, **keywords):
        output, _ = super().__call__(module, query, *tensors, **keywords)
        return output + self._layout.num_tokens * 1e-6, None


def test_an_engine_that_does_not_keep_it_is_not_built(fixed_rows, monkeypatch):
    monkeypatch.setattr("models.attention.choice.MatmulAttention", CountingAttention)

    with pytest.raises(build.ConfigError, match="does not hold on this device"):
        make_parts(make_model(family("llama")), is_batch_invariant=True)
