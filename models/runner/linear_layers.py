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
    """A linear layer that multiplies at most ``tile_rows`` rows at a time."""

    tile_rows: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Map [..., T, K] to [..., T, N]."""
        if input.shape[-2] <= self.tile_rows:
            return functional.linear(input, self.weight, self.bias)
        return torch.cat(
            [
                functional.linear(tile, self.weight, self.bias)
                for tile in torch.split(input, self.tile_rows, dim=-2)
            ],
            dim=-2,
        )


class TiledConv1D(Conv1D):  # type: ignore[misc]
    """The same for the transposed linear layer of GPT-2."""

    tile_rows: int

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., T, K] to [..., T, N]."""
        if x.shape[-2] <= self.tile_rows:
            return conv1d(self, x)
        return torch.cat(
            [conv1d(self, tile) for tile in torch.split(x, self.tile_rows, dim=-2)],
            dim=-2,
        )


class Float32Head(nn.Linear):
    """A linear layer in half precision whose result is float32, to about 16 bits.

    Two products: the first gives the rounded result; the second starts from its negative, so that
    the matrix library, which sums in float32, rounds the remainder only. A product in float32
    would need a copy of the weights and takes twice as long as both.

    Attributes:
        tile_rows: rows of one product, as in TiledLinear.
    """

    tile_rows: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Map [..., T, K] in half precision to [..., T, N] float32."""
        tiles = torch.split(input.flatten(0, -2), self.tile_rows)
        logits = torch.cat([self.product(tile) for tile in tiles])
        if self.bias is not None:
            logits += self.bias
        return logits.view(*input.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """Map [T, K] to [T, N] in one piece, without the bias."""
        rounded = functional.linear(rows, self.weight)
        remainder = torch.addmm(rounded, rows, self.weight.t(), beta=-1)
        return rounded.float().add_(remainder)


def conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    """Return what GPT-2's own layer gives, whatever the class of ``layer``."""
    output: Tensor = Conv1D.forward(layer, x)
    return output
