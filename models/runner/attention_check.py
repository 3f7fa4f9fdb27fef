"""Shows on random numbers that a backend attends as the reference does, over several blocks.

The self-check of a model has sequences of one block; a kernel that reads block tables is tried
here on longer ones, before it serves anybody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.attention.backend import AttentionBackend
from models.attention.reference import ReferenceAttention
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, LayerShape
from models.runner.inputs import PackedInputs, pack
from models.scheduling.step_plan import ScheduledSequence

# Relative error of the outputs of one step (norm of the difference over the norm). Backends that
# multiply in half precision round the weights of the softmax; a key too many or too few, or a
# block in the wrong place, is an error of 0.1 and more.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
WINDOW_TOKENS = 19
# Tokens of the second and the third step of each of three sequences; the rest is the first step.
_TAILS = ((1, 1), (5, 1), (1, 1))


@torch.inference_mode()
def check_attention(
    backend: AttentionBackend,
    pool: KVCachePool,
    layers: Sequence[LayerShape],
    *,
    num_heads: int,
    name: str,
) -> float:
    """Run three sequences through a backend and through the reference, layer shape by layer shape.

    First chunks, then two decodes beside a chunk, then decodes only. Uses the first blocks of the
    pool, before any sequence does.

    Args:
        backend: over ``pool``.
        pool: with room for 8 and 7 tokens; with little more the sequences are short.
        layers: shapes of keys and values.
        num_heads: query heads of every layer.
        name: of the backend, for the message.

    Returns:
        The largest relative error of a step.

    Raises:
        ConfigError: the outputs differ, or are not numbers.
    """
    worst = 0.0
    for shape in dict.fromkeys(layers):
        for keywords in ({}, {"sliding_window": WINDOW_TOKENS}):
            trial = _Trial(pool, layers.index(shape), shape, num_heads)
            for spans in trial.steps():
                error = trial.error(backend, spans, keywords)
                if not error <= TOLERANCE[pool.keys[0].dtype]:
                    raise ConfigError(
                        "attention_backend",
                        f"the outputs of '{name}' differ from the reference's by {error:.2g}",
                    )
                worst = max(worst, error)
    return worst


class _Trial:
    """Random queries, keys and values of a few sequences, for one layer."""

    def __init__(self, pool: KVCachePool, layer: int, shape: LayerShape, num_heads: int) -> None:
        self._pool = pool
        self._module = cast("nn.Module", SimpleNamespace(layer_idx=layer))
        size = pool.plan.block_size_tokens
        self._lengths = next(
            lengths
            for lengths in ((2 * size + 11, size + 7, 3), (8, 7, 3), (8, 7))
            if sum(-(-length // size) for length in lengths) <= pool.plan.num_blocks
        )
        num_blocks = [-(-length // size) for length in self._lengths]
        blocks = iter(reversed(range(sum(num_blocks))))
        self._tables = [tuple(next(blocks) for _ in range(number)) for number in num_blocks]
        generator = torch.Generator().manual_seed(0)
        keys = pool.keys[layer]

        def draw(num_heads: int, width: int) -> list[Tensor]:
            return [
                torch.randn(num_heads, length, width, generator=generator).to(keys)
                for length in self._lengths
            ]

        self._queries = draw(num_heads, shape.key_width)
        self._keys = draw(shape.num_kv_heads, shape.key_width)
        self._values = draw(shape.num_kv_heads, shape.value_width)

    def steps(self) -> list[list[range]]:
        """Return which tokens of each sequence are run by each step."""
        steps: list[list[range]] = [[], [], []]
        for length, tail in zip(self._lengths, _TAILS, strict=False):
            stops = [length - sum(tail), length - tail[1], length]
            for step, start, stop in zip(steps, [0, *stops], stops, strict=False):
                step.append(range(start, stop))
        return steps

    def error(
        self, backend: AttentionBackend, spans: Sequence[range], keywords: Mapping[str, Any]
    ) -> float:
        """Return the relative error of one step; infinite if an output is not a number."""
        inputs, tensors = self._pack(spans)
        outputs = []
        for each in (backend, ReferenceAttention(self._pool)):
            each.begin_step(inputs.layout)
            query, key, value = tensors
            output, _ = each(self._module, query, key, value, None, **keywords)
            outputs.append(output.float())
        found, expected = outputs
        error = float((found - expected).norm() / expected.norm())
        return error if math.isfinite(error) else math.inf

    def _pack(self, spans: Sequence[range]) -> tuple[PackedInputs, list[Tensor]]:
        """Return the inputs of a step and its queries, keys and values, [1, H, T, D] each."""
        parts = [
            ScheduledSequence(index, (0,) * len(span), span.start, self._tables[index], False)
            for index, span in enumerate(spans)
        ]
        keys = self._pool.keys[0]
        inputs = pack(
            parts,
            block_size=self._pool.plan.block_size_tokens,
            null_block_id=self._pool.null_block_id,
            multiple=1,
            device=keys.device,
        )
        tensors = []
        for drawn in (self._queries, self._keys, self._values):
            num_heads, _, width = drawn[0].shape
            rows = drawn[0].new_zeros(1, num_heads, inputs.layout.num_tokens, width)
            for part, last in zip(parts, inputs.last_rows, strict=True):
                where = slice(last + 1 - len(part.token_ids), last + 1)
                rows[0, :, where] = drawn[part.seq_id][:, part.start : part.end]
            tensors.append(rows)
        return inputs, tensors
