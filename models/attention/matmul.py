"""Attention as matrix product, float32 softmax, matrix product: the exact, row-independent backend.

What a row gets depends on its own keys only, bit for bit in bfloat16 on the CPU: not on the rows
beside it, on the padded length, or on how its prompt was cut (SDPA keeps none of this). The
reasons, each held by a test of the primitives: keys are padded at the end, to multiples of
KEY_MULTIPLE_TOKENS; softmax rows are reduced on their own; the product with the values is summed
over fixed spans of positions, so that the blocking a matrix library chooses for a long reduction
(seen from 256 keys on in float32, from 704 on in bfloat16) cannot depend on the padded length;
products in float32 have no fewer than MIN_FLOAT32_ROWS rows, below which they take another kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.backend import check_keywords, layer_index
from models.attention.layer_step import AttentionOptions, store_
from models.attention.layout import DecodeGroup, PrefillSegment, StepLayout
from models.kv_cache.store import KVCachePool

VALUE_SPAN_TOKENS = 256
FLOAT32_VALUE_SPAN_TOKENS = 128
MIN_FLOAT32_ROWS = 4


class MatmulAttention:
    """See the module's text. Works on any device. Owner: the step thread."""

    # What the text says holds on the CPU; shapes do depend on the company.
    is_row_independent = False

    def __init__(self, pool: KVCachePool, product_dtype: torch.dtype) -> None:
        """Attend over ``pool``.

        Args:
            pool: keys and values, in the model's dtype.
            product_dtype: of the operands of matrix products.
        """
        self._pool = pool
        self._product_dtype = product_dtype
        self._layout: StepLayout | None = None
        # Per step; layers share them when they have the same heads and window.
        self._indices: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def begin_step(self, layout: StepLayout) -> None:
        """Take the layout of the step whose forward pass follows."""
        self._layout = layout
        self._indices.clear()
        self._masks.clear()

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
        num_tokens = layout.num_tokens
        store_(self._pool, layer, layout, key, value)
        num_heads, num_rows = query.shape[1], query.shape[2]
        output = query.new_empty(1, num_rows, num_heads, value.shape[-1])
        if num_rows > num_tokens:
            output[:, num_tokens:] = 0
        options = AttentionOptions.of(keywords, query.shape[-1])
        grouped = query[0].to(self._product_dtype)
        grouped = grouped.view(key.shape[1], -1, num_rows, query.shape[-1])  # [Hkv, G, T, Dk]
        for number, group in enumerate(layout.decodes):
            rows = slice(group.row_start, group.row_start + group.num_rows)
            queries = grouped[:, :, rows].transpose(1, 2)  # [Hkv, B, G, Dk]
            keys, values = self._gather(layer, number, group.block_ids, key.shape[1])
            mask = self._decode_mask(number, group, options.sliding_window, keys.shape[1])
            mixed = _attend(queries, keys, values, mask, options)
            output[0, rows] = mixed.transpose(0, 1).flatten(1, 2)
        for number, segment in enumerate(layout.prefills, start=len(layout.decodes)):
            rows = slice(segment.row_start, segment.row_start + segment.num_rows)
            queries = grouped[:, :, rows]  # [Hkv, G, q, Dk]
            keys, values = self._gather(layer, number, segment.block_ids, key.shape[1])
            mask = self._prefill_mask(number, segment, options.sliding_window, keys.shape[1])
            mixed = _attend(queries, keys, values, mask, options)
            output[0, rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
        return output, None

    def _gather(
        self, layer: int, number: int, block_ids: Tensor, num_kv_heads: int
    ) -> tuple[Tensor, Tensor]:
        """Return keys [N, L, Dk] and values [N, L, Dv]; N is Hkv, times B for tables [B, n]."""
        index = self._indices.get((number, num_kv_heads))
        if index is None:
            index = self._pool.gather_index(block_ids, num_kv_heads)
            self._indices[number, num_kv_heads] = index
        keys, values = self._pool.gather(layer, index)
        num_batches = num_kv_heads * (block_ids.shape[0] if block_ids.dim() == 2 else 1)
        return (
            keys.to(self._product_dtype).view(num_batches, -1, keys.shape[-1]),
            values.to(self._product_dtype).view(num_batches, -1, values.shape[-1]),
        )

    def _decode_mask(
        self, number: int, group: DecodeGroup, window: int | None, num_keys: int
    ) -> Tensor:
        """Return what is hidden, [1, B, 1, L] bool."""
        mask = self._masks.get((number, window))
        if mask is None:
            positions = torch.arange(num_keys, device=group.lengths.device)
            lengths = group.lengths[:, None]
            mask = positions >= lengths
            if window is not None:
                mask |= positions < lengths - window
            mask = mask[None, :, None, :]
            self._masks[number, window] = mask
        return mask

    def _prefill_mask(
        self, number: int, segment: PrefillSegment, window: int | None, num_keys: int
    ) -> Tensor:
        """Return what is hidden, [q, L] bool."""
        mask = self._masks.get((number, window))
        if mask is None:
            device = segment.block_ids.device
            positions = torch.arange(num_keys, device=device)
            own = torch.arange(segment.start, segment.end, device=device)[:, None]
            mask = positions > own
            if window is not None:
                mask |= positions <= own - window
            self._masks[number, window] = mask
        return mask


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Return ``softmax(queries @ keys) @ values``, of the shape of ``queries`` with Dv columns.

    Args:
        queries: [Hkv, B, G, Dk] in a decode, [Hkv, G, q, Dk] in a prefill.
        keys: [Hkv * B, L, Dk] in a decode, [Hkv, L, Dk] in a prefill.
        values: the same with Dv.
        mask: [1, B, 1, L] or [q, L] bool; True hides a key.
        options: of the layer.
    """
    num_rows = queries.shape[2]
    missing = MIN_FLOAT32_ROWS - num_rows if queries.dtype == torch.float32 else 0
    if missing > 0:
        queries = functional.pad(queries, (0, 0, 0, missing))
        if mask.dim() == 2:
            mask = functional.pad(mask, (0, 0, 0, missing))
    shape = queries.shape[:3]
    num_batches = keys.shape[0]
    scores = torch.bmm(
        queries.reshape(num_batches, -1, queries.shape[-1]), keys.transpose(1, 2)
    ).view(*shape, -1)
    weights = _softmax(scores, mask, options).view(num_batches, -1, keys.shape[1])
    return _mix(weights, values).view(*shape, -1)[:, :, :num_rows]


def _softmax(scores: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Return attention weights in the dtype of ``scores``; computed in float32.

    Args:
        scores: [Hkv, B, G, L] or [Hkv, G, q, L], any float dtype.
        mask: bool, broadcastable; True hides a key.
        options: scale, soft cap, attention sinks.
    """
    logits = scores.float().mul_(options.scaling)
    if options.softcap is not None:
        logits = torch.tanh_(logits.div_(options.softcap)).mul_(options.softcap)
    logits.masked_fill_(mask, float("-inf"))
    if options.sinks is None:
        return torch.softmax(logits, dim=-1).to(scores.dtype)
    return _softmax_with_sinks(logits, options.sinks, mask.dim() == 4).to(scores.dtype)


def _softmax_with_sinks(logits: Tensor, sinks: Tensor, is_decode: bool) -> Tensor:
    """Softmax with one extra logit per head that takes mass and gives no value (gpt-oss).

    Args:
        logits: [Hkv, B, G, L] in a decode, [Hkv, G, q, L] in a prefill, float32.
        sinks: [H], H = Hkv * G.
        is_decode: which of the two shapes.
    """
    per_head = sinks.float().view(logits.shape[0], -1)  # [Hkv, G]
    if is_decode:
        per_head = functional.pad(per_head, (0, logits.shape[2] - per_head.shape[1]))
    sink = per_head[:, None, :, None] if is_decode else per_head[:, :, None, None]
    peak = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
    weights = torch.exp(logits - peak)
    return weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sink - peak))


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``weights @ values``, summed in float32 over fixed spans of positions.

    Args:
        weights: [B, M, L].
        values: [B, L, Dv], same dtype.
    """
    length = weights.shape[-1]
    is_float32 = weights.dtype == torch.float32
    num_span_tokens = FLOAT32_VALUE_SPAN_TOKENS if is_float32 else VALUE_SPAN_TOKENS
    if length <= num_span_tokens:
        return torch.bmm(weights, values)
    total: Tensor | None = None
    for start in range(0, length, num_span_tokens):
        span = slice(start, min(start + num_span_tokens, length))
        part = torch.bmm(weights[:, :, span], values[:, span]).float()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(weights.dtype)
