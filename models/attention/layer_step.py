"""What every backend does in one layer of one step before it attends."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from models.attention.layout import StepLayout
from models.kv_cache.store import KVCachePool


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Keywords of one layer's attention, read once.

    Attributes:
        scaling: of the scores.
        sliding_window: keys that a row attends to, its own included; None is without limit.
        softcap: scores are bent to stay below it; None leaves them.
        sinks: [H], a logit per head that takes mass and gives no value (gpt-oss); None without.
    """

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None

    @classmethod
    def of(cls, keywords: dict[str, Any], width: int) -> AttentionOptions:
        """Read the keywords of a layer whose keys have ``width`` elements."""
        scaling = keywords.get("scaling")
        return cls(
            width**-0.5 if scaling is None else float(scaling),
            keywords.get("sliding_window"),
            keywords.get("softcap"),
            keywords.get("s_aux"),
        )


def store_(pool: KVCachePool, layer: int, layout: StepLayout, key: Tensor, value: Tensor) -> None:
    """Store a layer's keys and values of a step, in place.

    Args:
        pool: gets them.
        layer: index of the layer.
        layout: of the step.
        key: [1, Hkv, P, Dk]; padding rows are not stored.
        value: [1, Hkv, P, Dv].
    """
    if layout.fresh_block_ids is not None:
        pool.clear_values_(layer, layout.fresh_block_ids)
    num_tokens = layout.num_tokens
    pool.write_(layer, key[0, :, :num_tokens], value[0, :, :num_tokens], layout.slots)
    if (given := layout.given) is not None:
        pool.write_(layer, given.keys[layer], given.values[layer], given.slots)
