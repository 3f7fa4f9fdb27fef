"""Shows whether a model attends to exactly what it keeps of a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.attention.backend import attention_of, layer_index
from models.attention.layout import StepLayout

_NUM_PROBE_TOKENS = 3


def are_cached_keys_attended(model: PreTrainedModel) -> bool:
    """Tell whether attention gets keys and values in the form that the model's own cache has.

    What prefix tuning brings belongs into that cache. A model that rotates or widens what it has
    cached would do so with these too, and our attention comes behind that.

    Args:
        model: runs three tokens; its attention may be anything.
    """
    recorder = _Recorder()
    tokens = torch.arange(_NUM_PROBE_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode(), attention_of(model, recorder):
            output = model(input_ids=tokens, position_ids=tokens, use_cache=True)
        layers = output.cache.layers
        return set(recorder.seen) == set(range(len(layers))) and all(
            torch.equal(layers[index].keys, keys) and torch.equal(layers[index].values, values)
            for index, (keys, values) in recorder.seen.items()
        )
    except Exception:  # noqa: BLE001 - code of a hundred architectures; this is no such cache
        return False


class _Recorder:
    """An attention backend that attends to nothing and notes keys and values."""

    is_row_independent = True

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def begin_step(self, layout: StepLayout) -> None:
        """Nothing to prepare."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - part of the interface
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Note the keys and values of one layer."""
        self.seen[layer_index(module)] = (key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
