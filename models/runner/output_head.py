"""Float32 logits from a half-precision output head.

A head in bfloat16 rounds its logits to 8 bits: at 25 they lie 0.125 apart, so the best two tokens
are often equal, and which one a greedy request gets is an accident of the processor's arithmetic.
Weights and hidden states are not the cause; only the rounding of the result is.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from models.runner.linear_layers import Float32Head, TiledLinear
from models.runner.row_stability import padded_rows, row_limit, stable_rows


def make_logits_float32(model: PreTrainedModel, *, dtype: torch.dtype, max_rows: int) -> None:
    """Let the output head of a half-precision model give float32 logits, in place.

    A head that is no plain linear layer is left alone.

    Args:
        model: after ``make_row_independent``. On the CPU a head in half precision is measured
            again, on its own two products: of the remainder every bit shows, not one in 256. One
            whose weight was widened is the one product that has been measured.
        dtype: what the model was loaded in.
        max_rows: most rows of a step.
    """
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, TiledLinear) or dtype == torch.float32:
        return
    is_measured = head.weight.dtype == torch.float32 and head.bias is None
    tile_rows = head.tile_rows if isinstance(head, TiledLinear) else padded_rows(max_rows)
    head.__class__ = Float32Head
    head.tile_rows = tile_rows
    if head.weight.device.type == "cpu" and not is_measured:
        limit = row_limit(max_rows)
        head.tile_rows = stable_rows(head.product, head.in_features, head.weight.dtype, limit)
