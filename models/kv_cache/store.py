"""KVCachePool: the tensors of the KV cache, and how many blocks fit a budget. Holds no policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from models.config import KVCacheConfig
from models.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer.

    Attributes:
        num_kv_heads: H, heads of keys and values.
        key_width: Dk, elements of one key of one head.
        value_width: Dv, elements of one value of one head.
    """

    num_kv_heads: int
    key_width: int
    value_width: int


@dataclasses.dataclass(frozen=True, slots=True)
class KVCachePlan:
    """What ``plan_kv_cache`` made of a budget.

    Attributes:
        num_blocks: blocks that sequences can use.
        block_size_tokens: tokens of one block.
        bytes_per_token: keys and values of one token in all layers.
        total_bytes: of all tensors, the null block included.
    """

    num_blocks: int
    block_size_tokens: int
    bytes_per_token: int
    total_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that all usable blocks hold."""
        return self.num_blocks * self.block_size_tokens


def plan_kv_cache(
    config: KVCacheConfig, layers: Sequence[LayerShape], dtype: torch.dtype
) -> KVCachePlan:
    """Compute how many blocks the budget holds; one more (the null block) is set apart.

    Raises:
        ConfigError: the budget is less than two blocks.
    """
    elements = sum(layer.num_kv_heads * (layer.key_width + layer.value_width) for layer in layers)
    bytes_per_token = elements * dtype.itemsize
    bytes_per_block = bytes_per_token * config.block_size_tokens
    num_blocks = config.budget_bytes // bytes_per_block - 1
    if num_blocks < 1:
        raise ConfigError(
            "kv_budget_bytes",
            f"{config.budget_bytes} bytes hold no KV block: this model needs at least "
            f"{2 * bytes_per_block} bytes ({bytes_per_token} a token)",
        )
    return KVCachePlan(
        num_blocks=num_blocks,
        block_size_tokens=config.block_size_tokens,
        bytes_per_token=bytes_per_token,
        total_bytes=(num_blocks + 1) * bytes_per_block,
    )


class KVCachePool:
    """Keys and values of all layers, in blocks.

    Layer l has ``keys[l]: [H, N + 1, S, Dk]`` and ``values[l]: [H, N + 1, S, Dv]``. Head-major, so
    that one ``index_select`` of whole ``[S, D]`` blocks yields ``[H, B * n, S, D]``: contiguous
    batches for a matrix product. Block N is the null block: always zero, never written; block
    tables of unequal length are padded with it, so that padding can never carry a former tenant's
    values (in particular no NaN, which a probability of 0 would not cancel).

    Owner: the step thread.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(num_heads: int, width: int) -> Tensor:
            shape = (num_heads, plan.num_blocks + 1, plan.block_size_tokens, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.plan = plan
        self.null_block_id = plan.num_blocks
        self.keys = [zeros(layer.num_kv_heads, layer.key_width) for layer in layers]
        self.values = [zeros(layer.num_kv_heads, layer.value_width) for layer in layers]

    def write_(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store the keys and values of a step's tokens, in place.

        Args:
            layer: index of the layer.
            keys: [H, T, Dk].
            values: [H, T, Dv].
            slots: [T] int64; block id times block size plus offset.
        """
        self.keys[layer].flatten(1, 2).index_copy_(1, slots, keys)
        self.values[layer].flatten(1, 2).index_copy_(1, slots, values)

    def clear_values_(self, layer: int, block_ids: Tensor) -> None:
        """Zero the values of blocks that got a new tenant, in place.

        Slots behind a sequence's end are masked, but a masked value still meets a probability of
        0, and 0 times a former tenant's NaN is NaN.

        Args:
            layer: index of the layer.
            block_ids: [n] int64.
        """
        self.values[layer].index_fill_(1, block_ids, 0)

    def gather(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks into contiguous rows.

        Args:
            layer: index of the layer.
            index: [H * n] int64 from ``gather_index`` for this layer's H.

        Returns:
            keys [H * n * S, Dk] and values [H * n * S, Dv].
        """
        keys, values = self.keys[layer], self.values[layer]
        return (
            keys.flatten(0, 1).flatten(1).index_select(0, index).view(-1, keys.shape[-1]),
            values.flatten(0, 1).flatten(1).index_select(0, index).view(-1, values.shape[-1]),
        )

    def gather_index(self, block_ids: Tensor, num_kv_heads: int) -> Tensor:
        """Return the index that ``gather`` needs, head-major.

        Args:
            block_ids: int64, any shape, n elements.
            num_kv_heads: H of the layers that it will be used for.

        Returns:
            [H * n] int64.
        """
        heads = torch.arange(num_kv_heads, device=block_ids.device) * (self.plan.num_blocks + 1)
        return (heads[:, None] + block_ids.reshape(1, -1)).reshape(-1)
