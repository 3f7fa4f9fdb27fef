"""Linear layers that keep rows independent or logits exact. Decides nothing about where.

They take the place of a loaded model's own layers by a change of class, so that weights stay where
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


class TiledLinear(nn.Linear):
    """A linear layer that multiplies at most ``tile_rows`` rows at a time, in its weight's dtype.

    The result has the dtype of the input: with weights in float32 and an input in half precision
    the product is rounded once, at its end.
    """

    tile_rows: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Map [..., T, K] to [..., T, N]."""
        rows = input.to(self.weight.dtype)
        if rows.shape[-2] <= self.tile_rows:
            return functional.linear(rows, self.weight, self.bias).to(input.dtype)
        return torch.cat(
            [
                functional.linear(tile, self.weight, self.bias).to(input.dtype)
                for tile in torch.split(rows, self.tile_rows, dim=-2)
            ],
            dim=-2,
        )


class TiledConv1D(Conv1D):  # type: ignore[misc]
    """The same for the transposed linear layer of GPT-2."""

    tile_rows: int

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., T, K] to [..., T, N]."""
        rows = x.to(self.weight.dtype)
        if rows.shape[-2] <= self.tile_rows:
            return conv1d(self, rows).to(x.dtype)
        return torch.cat(
            [conv1d(self, tile).to(x.dtype) for tile in torch.split(rows, self.tile_rows, dim=-2)],
            dim=-2,
        )


class Float32Head(nn.Linear):
    """An output head for rows in half precision whose result is float32.

    Where its weight is float32 (see ``product_dtype``) that is one product. Where it is half
    precision too, to about 16 bits, it is two: the first gives the rounded result; the second
    starts from its negative, so that the matrix library, which sums in float32, rounds the
    remainder only. A product in float32 would need a copy of the weights there and takes twice as
    long as both.

    Attributes:
        tile_rows: rows of one product, as in TiledLinear.
    """

    tile_rows: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Map [..., T, K] in half precision to [..., T, N] float32."""
        tiles = torch.split(input.flatten(0, -2).to(self.weight.dtype), self.tile_rows)
        logits = torch.cat([self.product(tile) for tile in tiles])
        if self.bias is not None:
            logits += self.bias
        return logits.view(*input.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """Map [T, K] to [T, N] in one piece, without the bias."""
        rounded = functional.linear(rows, self.weight)
        if rounded.dtype == torch.float32:
            return rounded
        remainder = torch.addmm(rounded, rows, self.weight.t(), beta=-1)
        return rounded.float().add_(remainder)


def conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    """Return what GPT-2's own layer gives, whatever the class of ``layer``."""
    output: Tensor = Conv1D.forward(layer, x)
    return output
