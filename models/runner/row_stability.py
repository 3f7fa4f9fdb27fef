"""Keeps matrix products row-independent on processors whose libraries are not.

In bfloat16 a row's result must not depend on how many rows are multiplied with it. Some CPU
kernels keep that for any number of rows; others (AMX) choose another order of summation for tall
inputs. What the processor at hand does is measured at load, on the model's own weights; products
that are only stable up to a number of rows are then cut into tiles of at most that many. Where the
processor cannot multiply bfloat16 at all, weights are widened to float32 first.

On a GPU not only products depend on the number of rows: the mean in a norm does too. Where
independence is asked for there, every forward pass has the same number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from models.errors import ConfigError
from models.loading.arithmetic import product_dtype
from models.runner.linear_layers import Float32Head, TiledConv1D, TiledLinear, conv1d

# Rows of a step are padded to a multiple of this: products of very few rows are slower than
# products of eight (one row takes another kernel), and one class of row counts is enough to check.
ROW_MULTIPLE = 8
LARGEST_TILE_ROWS = 256
SMALL_TILES_ROWS = (32, 16, 8)
LARGE_COUNTS_ROWS = (40, 64, 96, 128, 192, 256)
# Another order of summation shows in about one element of 20,000: narrow products need more rows
# before their equality says anything.
MIN_COMPARED_ELEMENTS = 200_000
MAX_COMPARED_ROWS = 8192
# Rows of every forward pass where they are fixed. By the data sheet of an H200 (989 TFLOP/s,
# 4.8 TB/s) reading a bfloat16 weight takes as long as multiplying 200 rows with it, so that a
# decode of a few should pay little for the others. Not measured.
FIXED_ROWS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class RowPolicy:
    """How many rows one forward pass and one product may have.

    Attributes:
        multiple: rows of a forward pass are padded, at the end, to a multiple of this.
        max_forward_rows: most rows of one forward pass; 0 is without limit. Set when a model
            multiplies weights outside of layers that can be tiled one by one (experts).
        smallest_tile_rows: the smallest tile in use, 0 if no product needs tiles.
        is_fixed: every forward pass has the same number of rows, and whatever else has a shape
            that depends on the company (attention, adapters) is taken apart.
    """

    multiple: int
    max_forward_rows: int
    smallest_tile_rows: int
    is_fixed: bool = False


# Exactly these: a subclass may compute something else (the router of phimoe does).
LINEAR_CLASSES = (nn.Linear, TiledLinear, Conv1D, TiledConv1D)


def make_row_independent(
    model: nn.Module, *, dtype: torch.dtype, max_rows: int, is_batch_invariant: bool = False
) -> RowPolicy:
    """Measure the products of ``model`` and tile, in place, those that need it.

    Args:
        model: on its device. A GPU's libraries need other means and are left alone, unless
            ``is_batch_invariant``. In float32, where the law is equal tokens and nearly equal log
            probabilities, rows are padded but products are not tiled.
        dtype: what the model was loaded in.
        max_rows: most rows of a step.
        is_batch_invariant: fix the rows of a forward pass on a GPU.

    Raises:
        ConfigError: see ``fix_rows``.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        if is_batch_invariant:
            return fix_rows(model, max_rows)
        return RowPolicy(multiple=1, max_forward_rows=0, smallest_tile_rows=0)
    if dtype == torch.float32:
        return RowPolicy(ROW_MULTIPLE, max_forward_rows=0, smallest_tile_rows=0)
    if (wide := product_dtype(dtype, device)) != dtype:
        # Tiles of another number than a multiple would end in products of any number of rows.
        _widen(model, wide, padded_rows(max_rows))
    limit = row_limit(max_rows)
    tiles: dict[tuple[object, ...], int] = {}
    smallest = 0
    for layer in _linear_layers(model):
        is_transposed = isinstance(layer, Conv1D)
        # Some routers stay in float32 in a model of another dtype.
        weight_dtype = layer.weight.dtype
        key = (*layer.weight.shape, weight_dtype, layer.bias is None, is_transposed)
        if key not in tiles:
            width = layer.weight.shape[0 if is_transposed else 1]
            tiles[key] = stable_rows(_untiled(layer), width, weight_dtype, limit)
        tile = tiles[key]
        if tile < max_rows:
            _tile(layer, tile)
            smallest = min(smallest or tile, tile)
    forward_rows = 0
    for stack in _foreign_weights(model):
        matrix = stack.flatten(0, -3)[0] if stack.dim() > 2 else stack
        rows = stable_rows(
            _product_with(matrix),
            matrix.shape[1],
            matrix.dtype,
            limit,
            # An expert gets any number of rows, a router all of the padded ones.
            multiple=1 if stack.dim() > 2 else ROW_MULTIPLE,
        )
        if rows < max_rows:
            forward_rows = min(forward_rows or rows, rows)
    return RowPolicy(ROW_MULTIPLE, forward_rows, smallest)


def fix_rows(model: nn.Module, max_rows: int) -> RowPolicy:
    """Return the policy by which every forward pass has the same number of rows.

    Every product of a weight, and every other operation of the model on rows, then has the same
    shape always, and a library the same kernel for it. A step of more rows takes several passes.

    Args:
        model: of any device.
        max_rows: most rows of a step.

    Raises:
        ConfigError: the model has experts, which get any number of rows.
    """
    if any(parameter.dim() > 2 for parameter in _foreign_weights(model)):
        raise ConfigError(
            "batch_invariant",
            "this model has experts, whose numbers of rows depend on the company",
        )
    rows = min(FIXED_ROWS, padded_rows(max_rows))
    return RowPolicy(rows, max_forward_rows=rows, smallest_tile_rows=0, is_fixed=True)


def row_limit(max_rows: int) -> int:
    """Return the largest number of rows of one product that is of interest."""
    return min(LARGEST_TILE_ROWS, padded_rows(max_rows))


def padded_rows(num_rows: int) -> int:
    """Return the rows of a forward pass of so many rows, padding included."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


@torch.inference_mode()
def stable_rows(
    product: Callable[[Tensor], Tensor],
    width: int,
    dtype: torch.dtype,
    limit: int,
    *,
    multiple: int = ROW_MULTIPLE,
) -> int:
    """Return the most rows up to which ``product`` gives every row the same bits.

    Compared are the numbers of rows up to 32 that are multiples of ``multiple``, and a few larger
    ones (each new number costs the library a new kernel). Larger numbers count only all together:
    what holds at 64 and fails at 320 is not trusted at 128.

    Args:
        product: maps [T, width] to [T, N].
        width: columns of the input.
        dtype: of the input.
        limit: the most rows of interest.
        multiple: which numbers of rows occur.

    Returns:
        ``limit``, one of SMALL_TILES_ROWS, or 1 if not even all numbers below 8 agree.
    """
    smallest = SMALL_TILES_ROWS[-1]
    num_columns = product(torch.zeros(smallest, width, dtype=dtype)).shape[-1]
    num_rows = min(MAX_COMPARED_ROWS, -(-MIN_COMPARED_ELEMENTS // num_columns))
    num_rows = max(limit, SMALL_TILES_ROWS[0], -(-num_rows // smallest) * smallest)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, width, generator=generator).to(dtype)
    expected = torch.cat([product(tile) for tile in torch.split(rows, smallest)])

    def is_stable(count: int) -> bool:
        num_slices = max(2, -(-MIN_COMPARED_ELEMENTS // (count * num_columns)))
        starts = range(0, num_rows - count + 1, count)[: num_slices - 1]
        return all(
            torch.equal(product(rows[start : start + count]), expected[start : start + count])
            for start in (*starts, num_rows - count)
        )

    for tile in reversed(SMALL_TILES_ROWS):
        if not all(is_stable(count) for count in range(multiple, tile + 1, multiple)):
            return tile // 2 if tile > smallest else 1
    larger = sorted({*LARGE_COUNTS_ROWS, limit} - set(SMALL_TILES_ROWS))
    is_flat = all(is_stable(count) for count in larger if count <= limit)
    return limit if is_flat else SMALL_TILES_ROWS[0]


def _widen(model: nn.Module, dtype: torch.dtype, max_rows: int) -> None:
    """Store the weights of linear layers in ``dtype``; their inputs and outputs keep theirs."""
    for layer in _linear_layers(model):
        if layer.weight.dtype == dtype:
            continue
        for name, parameter in list(layer.named_parameters(recurse=False)):
            # A new parameter: an embedding that shared the old one keeps it.
            setattr(layer, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
        _tile(layer, max_rows)


def _tile(layer: nn.Linear | Conv1D, tile_rows: int) -> None:
    layer.__class__ = TiledConv1D if isinstance(layer, Conv1D) else TiledLinear
    layer.tile_rows = tile_rows


def _untiled(layer: nn.Linear | Conv1D) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, Conv1D):
        return lambda rows: conv1d(layer, rows)
    return lambda rows: functional.linear(rows, layer.weight, layer.bias)


def _product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda rows: functional.linear(rows, weight)


def _linear_layers(model: nn.Module) -> Iterator[nn.Linear | Conv1D]:
    for module in model.modules():
        if type(module) in LINEAR_CLASSES:
            yield module


def _foreign_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield matrices that are not the weight of a linear layer or an embedding, one per shape."""
    seen: set[tuple[object, ...]] = set()
    for module in model.modules():
        if type(module) in LINEAR_CLASSES or isinstance(module, nn.Embedding | Float32Head):
            continue
        for parameter in module.parameters(recurse=False):
            key = (*parameter.shape, parameter.dtype)
            if parameter.dim() >= 2 and key not in seen:
                seen.add(key)
                yield parameter
