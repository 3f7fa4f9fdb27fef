"""How many rows a product may have, measured; and the products of the processor at hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from models.loading.arithmetic import product_dtype
from models.runner import row_stability
from models.runner.row_stability import (
    ROW_MULTIPLE,
    RowPolicy,
    TiledConv1D,
    TiledLinear,
    make_row_independent,
    stable_rows,
)
from tests.tiny_models import FAMILIES, Family, make_model

BUNDLED_SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576))  # inputs, outputs
WIDTH = 16
CPU = torch.device("cpu")


def family(name):
    return next(family for family in FAMILIES if family.name == name)


def product_that_breaks(is_broken, *, row=0):
    """Return a product whose result differs in one row when the number of rows is such."""

    def product(rows):
        output = rows.double() * 3
        if is_broken(len(rows)):
            output[row] += 1
        return output

    return product


def measure(is_broken, *, limit=256, **options):
    return stable_rows(product_that_breaks(is_broken), WIDTH, torch.bfloat16, limit, **options)


@pytest.mark.parametrize("limit", [16, 64, 256])
def test_a_product_that_never_breaks_is_stable_up_to_the_limit(limit):
    assert measure(lambda _: False, limit=limit) == limit


@pytest.mark.parametrize(
    ("first_broken", "expected"), [(16, 8), (24, 16), (32, 16), (33, 32), (65, 32)]
)
def test_a_product_that_breaks_from_some_number_on_is_stable_below(first_broken, expected):
    assert measure(lambda count: count >= first_broken) == expected


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("broken", [40, 128, 256])
def test_a_product_that_breaks_at_one_large_number_is_stable_up_to_32(broken, row):
    product = product_that_breaks(lambda count: count == broken, row=row)

    assert stable_rows(product, WIDTH, torch.bfloat16, 256) == 32


def test_a_limit_between_the_usual_numbers_is_tried_itself():
    assert measure(lambda count: count == 104, limit=104) == 32


def test_rows_at_the_end_count_as_those_at_the_start(monkeypatch):
    monkeypatch.setattr(row_stability, "MIN_COMPARED_ELEMENTS", 1)  # as for a very wide product

    def product(rows):
        is_start = rows.storage_offset() == 0
        return rows.double() + float(len(rows) > 16 and not is_start)

    assert stable_rows(product, WIDTH, torch.bfloat16, 256) == 16


def test_numbers_beyond_the_limit_do_not_count():
    assert measure(lambda count: count > 96, limit=96) == 96


def test_odd_numbers_of_rows_count_only_where_they_occur(monkeypatch):
    monkeypatch.setattr(row_stability, "MAX_COMPARED_ROWS", 512)

    def is_broken(count):
        return count == 13

    assert measure(is_broken) == 256
    assert measure(is_broken, multiple=1) == 8


def test_a_product_that_breaks_at_the_smallest_numbers_is_stable_one_row_at_a_time():
    assert measure(lambda count: count < 8, multiple=1) == 1


@pytest.mark.parametrize("num_columns", [4, 192])
def test_a_difference_in_one_element_of_twenty_thousand_is_noticed(num_columns):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(WIDTH, num_columns, generator=generator, dtype=torch.float64)

    def product(rows):
        output = rows.double() @ weight
        bits = (output.sin() * 1e6).long()  # a pseudo-random number of each element
        return output + (bits % 20_000 == 7) if len(rows) > 16 else output

    assert stable_rows(product, WIDTH, torch.bfloat16, 256) == 16


class Router(nn.Linear):
    """A linear layer that computes something else, as some routers do."""

    def forward(self, rows):
        return super().forward(rows).argmax(dim=-1)


class Experts(nn.Module):
    """A stack of matrices that no linear layer holds."""

    def __init__(self, dtype=None, num_columns=24):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, num_columns, WIDTH, dtype=dtype))


def multiply_in(monkeypatch, chosen):
    """Let every processor multiply in one dtype."""
    monkeypatch.setattr(row_stability, "product_dtype", lambda _dtype, _device: chosen)


def fake_measurement(monkeypatch, rows_of_shape, *, chosen=torch.bfloat16):
    """Answer for (columns of the input, rows wanted), and note what was asked."""
    multiply_in(monkeypatch, chosen)
    asked = []

    def stable_rows(product, width, dtype, limit, *, multiple=ROW_MULTIPLE):
        num_columns = product(torch.zeros(8, width, dtype=dtype)).shape[-1]
        asked.append((width, num_columns, dtype, limit, multiple))
        return rows_of_shape.get((width, num_columns), limit)

    monkeypatch.setattr(row_stability, "stable_rows", stable_rows)
    return asked


def test_exactly_the_products_that_need_it_are_tiled(monkeypatch):
    fake_measurement(monkeypatch, {(16, 24): 16, (24, 16): 32})
    model = nn.Sequential(
        nn.Linear(16, 24), nn.Linear(16, 32), Conv1D(24, 16), Conv1D(32, 16), nn.Linear(24, 16)
    ).bfloat16()

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=256)

    classes = [type(layer) for layer in model]
    assert classes == [TiledLinear, nn.Linear, TiledConv1D, Conv1D, TiledLinear]
    assert [model[index].tile_rows for index in (0, 2, 4)] == [16, 16, 32]
    assert policy == RowPolicy(ROW_MULTIPLE, max_forward_rows=0, smallest_tile_rows=16)


def test_a_step_that_is_never_taller_than_the_tile_needs_none(monkeypatch):
    fake_measurement(monkeypatch, {(16, 24): 32})
    model = nn.Sequential(nn.Linear(16, 24)).bfloat16()

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=32)

    assert type(model[0]) is nn.Linear
    assert policy.smallest_tile_rows == 0


def test_a_second_measurement_finds_the_same(monkeypatch):
    asked = fake_measurement(monkeypatch, {(16, 24): 16})
    model = nn.Sequential(nn.Linear(16, 24), Conv1D(24, 16), Experts()).bfloat16()
    first = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)
    num_asked = len(asked)
    rows = torch.randn(1, 40, 16).bfloat16()
    expected = [layer(rows) for layer in model[:2]]

    assert make_row_independent(model, dtype=torch.bfloat16, max_rows=64) == first
    assert asked[num_asked:] == asked[:num_asked]
    assert [type(layer) for layer in model[:2]] == [TiledLinear, TiledConv1D]
    assert all(torch.equal(layer(rows), old) for layer, old in zip(model, expected, strict=False))


def test_layers_of_one_shape_are_measured_once_and_a_bias_makes_another(monkeypatch):
    asked = fake_measurement(monkeypatch, {})
    layers = [nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(16, 24, bias=False)]

    make_row_independent(nn.Sequential(*layers).bfloat16(), dtype=torch.bfloat16, max_rows=64)

    assert asked == [(16, 24, torch.bfloat16, 64, ROW_MULTIPLE)] * 2


@pytest.mark.parametrize(("max_rows", "limit"), [(20, 24), (64, 64), (1000, 256)])
def test_no_more_rows_are_measured_than_a_step_has(monkeypatch, max_rows, limit):
    asked = fake_measurement(monkeypatch, {})

    make_row_independent(
        nn.Sequential(nn.Linear(16, 24)).bfloat16(), dtype=torch.bfloat16, max_rows=max_rows
    )

    assert [entry[3] for entry in asked] == [limit]


@pytest.mark.parametrize("max_rows", [1, 3, 7, 8, 1001])
def test_tiles_of_widened_products_have_a_multiple_of_rows(monkeypatch, max_rows):
    fake_measurement(monkeypatch, {})
    monkeypatch.setattr(row_stability, "product_dtype", lambda *_: torch.float32)
    model = nn.Sequential(nn.Linear(16, 24)).bfloat16()

    make_row_independent(model, dtype=torch.bfloat16, max_rows=max_rows)

    assert model[0].weight.dtype == torch.float32
    assert model[0].tile_rows % ROW_MULTIPLE == 0


def test_stacks_of_matrices_bound_the_forward_pass(monkeypatch):
    asked = fake_measurement(monkeypatch, {(16, 24): 32})
    model = nn.Sequential(nn.Linear(16, 16), Experts()).bfloat16()

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=256)

    assert policy == RowPolicy(ROW_MULTIPLE, max_forward_rows=32, smallest_tile_rows=0)
    assert asked[1:] == [(16, 24, torch.bfloat16, 256, 1)]  # an expert gets any number of rows


@pytest.mark.parametrize("rows_of_shape", [{24: 32, 48: 16}, {24: 16, 48: 32}, {48: 16}])
def test_the_least_stable_stack_bounds_the_forward_pass(monkeypatch, rows_of_shape):
    fake_measurement(monkeypatch, {(16, columns): rows for columns, rows in rows_of_shape.items()})
    model = nn.Sequential(Experts(), Experts(num_columns=48)).bfloat16()

    assert make_row_independent(model, dtype=torch.bfloat16, max_rows=256).max_forward_rows == 16


def test_a_subclass_of_a_linear_layer_keeps_its_own_arithmetic(monkeypatch):
    fake_measurement(monkeypatch, {(16, 24): 16})
    model = nn.Sequential(Router(16, 24)).bfloat16()

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert type(model[0]) is Router
    assert policy.max_forward_rows == 16


def test_weights_of_another_dtype_are_measured_in_theirs(monkeypatch):
    # mixtures of experts keep their routers in float32
    asked = fake_measurement(monkeypatch, {})
    model = nn.Sequential(nn.Linear(16, 16).bfloat16(), nn.Linear(16, 24), Experts(torch.float32))

    make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert [entry[2] for entry in asked] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mixtral", {(64, 4, 8), (64, 192, 1), (96, 64, 1)}),
        ("qwen3-moe", {(64, 4, 8), (64, 64, 1), (32, 64, 1)}),
    ],
)
def test_experts_and_routers_of_a_mixture_are_found(monkeypatch, name, shapes):
    asked = fake_measurement(monkeypatch, {next(iter(sorted(shapes)))[:2]: 8})
    model = make_model(family(name), dtype=torch.bfloat16)

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert shapes <= {(width, height, multiple) for width, height, _, _, multiple in asked}
    assert policy.max_forward_rows == 8


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_without_experts_has_no_bound_on_its_forward_pass(monkeypatch, name):
    monkeypatch.setattr(row_stability, "MAX_COMPARED_ROWS", 512)
    model = make_model(family(name), dtype=torch.bfloat16)

    assert make_row_independent(model, dtype=torch.bfloat16, max_rows=64).max_forward_rows == 0


def test_a_router_in_float32_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(row_stability, "MAX_COMPARED_ROWS", 512)
    extra = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    }
    model = make_model(Family("glm4-moe", "glm4_moe", extra), dtype=torch.bfloat16)
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.weight.data = module.weight.data.float()
    assert torch.float32 in {parameter.dtype for parameter in model.parameters()}

    make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    with torch.inference_mode():
        logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits
    assert logits.isfinite().all()


def test_a_float32_model_is_padded_and_never_tiled(monkeypatch):
    asked = fake_measurement(monkeypatch, {(16, 24): 8})
    model = nn.Sequential(nn.Linear(16, 24), Experts())

    policy = make_row_independent(model, dtype=torch.float32, max_rows=64)

    assert policy == RowPolicy(ROW_MULTIPLE, max_forward_rows=0, smallest_tile_rows=0)
    assert type(model[0]) is nn.Linear
    assert not asked


def test_a_model_off_the_cpu_is_left_alone():
    model = nn.Sequential(nn.Linear(16, 24, device="meta"))

    assert make_row_independent(model, dtype=torch.bfloat16, max_rows=64) == RowPolicy(1, 0, 0)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_processor_without_bfloat16_products_gets_wider_weights(monkeypatch, name):
    model = make_model(family(name), dtype=torch.bfloat16)
    embedding = model.get_input_embeddings()
    tokens = torch.arange(16)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits.float()
    asked = fake_measurement(monkeypatch, {}, chosen=torch.float32)

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)
    layers = [layer for layer in model.modules() if isinstance(layer, TiledLinear | TiledConv1D)]
    again = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert layers
    assert {layer.weight.dtype for layer in layers} == {torch.float32}
    assert {entry[2] for entry in asked} == {torch.float32}
    assert embedding.weight.dtype == torch.bfloat16  # also where the head shared it
    assert policy == again == RowPolicy(ROW_MULTIPLE, max_forward_rows=0, smallest_tile_rows=0)
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.02 * expected.norm()


def test_wider_weights_are_tiled_where_the_measurement_says_so(monkeypatch):
    fake_measurement(monkeypatch, {(16, 24): 16}, chosen=torch.float32)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).bfloat16()

    policy = make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert [layer.tile_rows for layer in model] == [16, 64]
    assert policy.smallest_tile_rows == 16


@pytest.mark.parametrize("layer", [nn.Linear(16, 24), Conv1D(24, 16)])
def test_a_wider_layer_rounds_once_at_its_end(monkeypatch, layer):
    fake_measurement(monkeypatch, {}, chosen=torch.float32)
    model = nn.Sequential(layer).bfloat16()
    rows = torch.randn(40, 16).bfloat16()
    exact = copy.deepcopy(layer).double()(rows.double())

    make_row_independent(model, dtype=torch.bfloat16, max_rows=64)

    assert layer(rows).dtype == torch.bfloat16
    assert torch.equal(layer(rows), exact.float().bfloat16())


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 29])
@pytest.mark.parametrize("has_batch_dimension", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_tiled_linear_layer_equals_a_whole_one(num_rows, has_batch_dimension, bias):
    layer = nn.Linear(16, 24, bias=bias, dtype=torch.float64)
    rows = torch.randn(num_rows, 16, dtype=torch.float64)
    rows = rows[None] if has_batch_dimension else rows
    expected = layer(rows)
    layer.__class__, layer.tile_rows = TiledLinear, 8

    output = layer(rows)

    assert output.shape == expected.shape
    assert torch.allclose(output, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 29])
def test_a_tiled_transposed_layer_equals_a_whole_one(num_rows):
    layer = Conv1D(24, 16).double()
    nn.init.normal_(layer.bias)
    rows = torch.randn(1, num_rows, 16, dtype=torch.float64)
    expected = layer(rows)
    layer.__class__, layer.tile_rows = TiledConv1D, 8

    output = layer(rows)

    assert output.shape == expected.shape
    assert torch.allclose(output, expected, rtol=1e-12, atol=0)


def test_tiles_are_never_taller_than_they_may_be(monkeypatch):
    seen = []
    real = functional.linear
    monkeypatch.setattr(
        row_stability.functional,
        "linear",
        lambda rows, *rest: (seen.append(rows.shape[-2]), real(rows, *rest))[1],
    )
    layer = nn.Linear(16, 24)
    layer.__class__, layer.tile_rows = TiledLinear, 8

    layer(torch.randn(1, 29, 16))

    assert seen == [8, 8, 8, 5]


@pytest.mark.parametrize("chosen", [product_dtype(torch.bfloat16, CPU), torch.float32])
@torch.inference_mode()
def test_products_of_this_processor_give_a_row_the_same_bits_in_any_company(monkeypatch, chosen):
    """The primitive on which row independence rests: a processor that breaks it is named here."""
    multiply_in(monkeypatch, chosen)
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(*[nn.Linear(k, n, bias=False) for k, n in BUNDLED_SHAPES]).bfloat16()
    make_row_independent(model, dtype=torch.bfloat16, max_rows=304)
    broken = []
    for layer in model:
        rows = torch.randn(320, layer.in_features, generator=generator).bfloat16()
        expected = torch.cat([layer(rows[start : start + 8]) for start in range(0, 320, 8)])
        for count in range(8, 305, 8):
            # so that a row is first, last, and somewhere between
            for start in {0, (320 - count) // 16 * 8, 320 - count}:
                part = slice(start, start + count)
                if not torch.equal(layer(rows[part]), expected[part]):
                    broken.append((layer.in_features, layer.out_features, count, start))
    assert not broken


@pytest.mark.parametrize("chosen", [product_dtype(torch.bfloat16, CPU), torch.float32])
@torch.inference_mode()
def test_a_row_gets_the_same_bits_wherever_it_stands_in_its_eight(monkeypatch, chosen):
    multiply_in(monkeypatch, chosen)
    generator = torch.Generator().manual_seed(6)
    for width, height in BUNDLED_SHAPES:
        model = nn.Sequential(nn.Linear(width, height, bias=False)).bfloat16()
        make_row_independent(model, dtype=torch.bfloat16, max_rows=8)
        layer = model[0]
        row = torch.randn(1, width, generator=generator).bfloat16()
        others = torch.randn(7, width, generator=generator).bfloat16()
        outputs = [
            layer(torch.cat([others[:place], row, others[place:]]))[place] for place in range(8)
        ]
        assert all(torch.equal(output, outputs[0]) for output in outputs), (width, height)
