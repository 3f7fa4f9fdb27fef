"""Attention written as its definition, one row at a time: slow, and easy to be sure of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.attention.backend import check_keywords, layer_index
from models.attention.layer_step import AttentionOptions, store_
from models.attention.layout import StepLayout
from models.kv_cache.store import KVCachePool


class ReferenceAttention:
    """What the other backends are compared with. Float32 throughout, on any device.

    Owner: the step thread.
    """

    is_row_independent = True

    def __init__(self, pool: KVCachePool) -> None:
        """Attend over ``pool``."""
        self._pool = pool
        self._layout: StepLayout | None = None

    def begin_step(self, layout: StepLayout) -> None:
        """Take the layout of the step whose forward pass follows."""
        self._layout = layout

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - None by construction, see attach
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Store ``key`` and ``value``, attend, and return ``([1, T, H, Dv], None)``."""
        check_keywords(keywords)
        layout = self._layout
        assert layout is not None
        layer = layer_index(module)
        store_(self._pool, layer, layout, key, value)
        options = AttentionOptions.of(keywords, query.shape[-1])
        _, num_heads, num_rows, _ = query.shape
        output = query.new_zeros(1, num_rows, num_heads, value.shape[-1])
        for group in layout.decodes:
            for index, length in enumerate(group.lengths.tolist()):
                row = group.row_start + index
                output[0, row] = self._attend(
                    layer, query[0, :, row], group.block_ids[index], length, options
                )
        for segment in layout.prefills:
            for index, position in enumerate(range(segment.start, segment.end)):
                row = segment.row_start + index
                output[0, row] = self._attend(
                    layer, query[0, :, row], segment.block_ids, position + 1, options
                )
        return output, None

    def _attend(
        self, layer: int, query: Tensor, table: Tensor, length: int, options: AttentionOptions
    ) -> Tensor:
        """Return what one row gets, [H, Dv] float32.

        Args:
            layer: index of the layer.
            query: [H, Dk].
            table: [n], the row's blocks.
            length: keys up to the row's own.
            options: of the layer.
        """
        window = options.sliding_window
        first = 0 if window is None else max(0, length - window)
        num_heads = query.shape[0]
        keys, values = (
            _by_head(blocks[:, table].flatten(1, 2)[:, first:length], num_heads)
            for blocks in (self._pool.keys[layer], self._pool.values[layer])
        )
        scores = (keys @ query.float()[:, :, None])[:, :, 0] * options.scaling  # [H, L]
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks.float()[:, None]], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : length - first]
        return (weights[:, None, :] @ values)[:, 0]


def _by_head(rows: Tensor, num_heads: int) -> Tensor:
    """Give each of H query heads the rows [Hkv, L, D] of its kv head: [H, L, D] float32."""
    return rows.float().repeat_interleave(num_heads // rows.shape[0], dim=0)
