"""Float32 logits from a bfloat16 head."""

import pytest
import torch
from torch import nn

from models.runner.linear_layers import Float32Head, TiledLinear
from models.runner.output_head import make_logits_float32
from tests.tiny_models import FAMILIES, make_model


def _head(*, has_bias=False, tile_rows=8):
    torch.manual_seed(0)
    head = nn.Linear(64, 500, bias=has_bias).to(torch.bfloat16)
    head.weight.data.mul_(20)
    head.__class__ = Float32Head
    head.tile_rows = tile_rows
    return head


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_logits_are_much_closer_to_the_exact_product_than_rounded_ones(has_bias):
    head = _head(has_bias=has_bias)
    hidden = torch.randn(1, 19, 64).to(torch.bfloat16)
    exact = hidden.double() @ head.weight.double().t()
    if has_bias:
        exact += head.bias.double()

    logits = head(hidden)

    rounded = nn.functional.linear(hidden, head.weight, head.bias)
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 19, 500)
    error = (logits - exact).abs().max()
    assert error < (rounded - exact).abs().max() / 50


@torch.no_grad()
def test_tokens_that_a_rounded_head_cannot_tell_apart_are_told_apart():
    head = _head()
    hidden = torch.randn(1, 1, 64).to(torch.bfloat16)
    head.weight.data[7] = head.weight.data[3]
    column = int(head.weight.data[3].abs().argmin())
    head.weight.data[7, column] *= 1.5
    rounded = nn.functional.linear(hidden, head.weight)[0, 0]

    logits = head(hidden)[0, 0]

    exact = hidden[0, 0].double() @ head.weight.double().t()
    assert rounded[3] == rounded[7]
    assert (logits[7] > logits[3]) == (exact[7] > exact[3])
    assert logits[7] != logits[3]


@torch.no_grad()
def test_a_row_does_not_depend_on_its_tile():
    hidden = torch.randn(24, 64).to(torch.bfloat16)

    whole = _head(tile_rows=24)(hidden)

    assert torch.equal(_head(tile_rows=8)(hidden), whole)


def test_the_head_of_a_half_precision_model_gets_tiles_of_its_own(monkeypatch):
    model = make_model(FAMILIES[0], dtype=torch.bfloat16)
    model.lm_head.__class__ = TiledLinear
    model.lm_head.tile_rows = 32
    measured = []

    def fake_stable_rows(product, width, dtype, limit):
        measured.append((product, width, dtype, limit))
        return 16

    monkeypatch.setattr("models.runner.output_head.stable_rows", fake_stable_rows)
    make_logits_float32(model, dtype=model.dtype, max_rows=61)

    assert type(model.lm_head) is Float32Head
    assert model.lm_head.tile_rows == 16
    assert measured == [(model.lm_head.product, 64, torch.bfloat16, 64)]


def test_a_widened_head_keeps_the_tile_that_was_measured(monkeypatch):
    model = make_model(FAMILIES[0], dtype=torch.bfloat16)
    exact = model.lm_head.weight.detach().double()
    model.lm_head.float()
    model.lm_head.__class__ = TiledLinear
    model.lm_head.tile_rows = 24
    monkeypatch.setattr("models.runner.output_head.stable_rows", None)  # not to be asked
    hidden = torch.randn(40, 64).bfloat16()

    make_logits_float32(model, dtype=torch.bfloat16, max_rows=61)

    assert (type(model.lm_head), model.lm_head.tile_rows) == (Float32Head, 24)
    logits = model.lm_head(hidden)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), hidden.double() @ exact.t(), rtol=1e-5, atol=1e-5)


def test_the_head_of_a_float32_model_is_left_alone():
    model = make_model(FAMILIES[0])

    make_logits_float32(model, dtype=model.dtype, max_rows=64)

    assert type(model.lm_head) is nn.Linear
