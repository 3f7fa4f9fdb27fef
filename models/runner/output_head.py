"""Float32 logits from a half-precision output head.

A head in bfloat16 rounds its logits to 8 bits: at 25 they lie 0.125 apart, so the best two tokens
are often equal, and which one a greedy request gets is an accident of the processor's arithmetic.
Weights and hidden states are not the cause; only the rounding of the result is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.runner.row_stability import TiledLinear


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
        logits = torch.cat([self._product(tile) for tile in tiles])
        if self.bias is not None:
            logits += self.bias
        return logits.view(*input.shape[:-1], -1)

    def _product(self, rows: Tensor) -> Tensor:
        rounded = functional.linear(rows, self.weight)
        remainder = torch.addmm(rounded, rows, self.weight.t(), beta=-1)
        return rounded.float().add_(remainder)


def make_logits_float32(model: PreTrainedModel, *, max_rows: int) -> None:
    """Let the output head of a half-precision model give float32 logits, in place.

    A head that is no plain linear layer is left alone.

    Args:
        model: after ``make_row_independent``, whose tiles are kept.
        max_rows: most rows of a step.
    """
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, TiledLinear) or head.weight.dtype == torch.float32:
        return
    tile_rows = head.tile_rows if isinstance(head, TiledLinear) else max_rows
    head.__class__ = Float32Head
    head.tile_rows = tile_rows
