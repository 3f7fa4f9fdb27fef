"""PackedForward: the only caller of the model. Parts of sequences in, logits out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.attention.backend import AttentionBackend
from models.kv_cache.store import KVCachePool
from models.runner.adapter_layers import AdapterLayers
from models.runner.adapter_layout import (
    GROUP_MULTIPLE_ROWS,
    AdapterLayout,
    make_adapter_layout,
    select_rows,
)
from models.runner.inputs import GroupSizes, PackedInputs, pack
from models.runner.row_stability import LARGEST_TILE_ROWS, RowPolicy
from models.runner.virtual_rows import VirtualTokenRows
from models.scheduling.step_plan import ScheduledSequence

# Where products have fixed shapes, all groups of rows with an adapter have so many places.
FIXED_GROUP_ROWS = 16


class PackedForward:
    """Runs packed inputs through a transformers model whose attention is ``backend``.

    Owner: the step thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVCachePool,
        backend: AttentionBackend,
        policy: RowPolicy,
        adapters: AdapterLayers | None = None,
        virtual_rows: VirtualTokenRows | None = None,
    ) -> None:
        """Wire a forward pass.

        Args:
            model: its attention is ``backend``.
            pool: that the backend reads and writes.
            backend: told the layout of every step.
            policy: how rows are padded.
            adapters: hooks on the model's modules; None if it has none.
            virtual_rows: the hook on its embedding module; None without adapters.
        """
        self._model = model
        self._pool = pool
        self._backend = backend
        self.policy = policy
        self._adapters = adapters
        self._virtual_rows = virtual_rows
        self._groups = GroupSizes(
            max_rows=policy.smallest_tile_rows or LARGEST_TILE_ROWS,
            multiple=GROUP_MULTIPLE_ROWS if adapters is None else adapters.group_multiple,
        )
        if policy.is_fixed:
            self._groups = GroupSizes(max_rows=FIXED_GROUP_ROWS, is_fixed=True)
        self._device = model.device
        self._can_slice_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def pack(self, parts: Sequence[ScheduledSequence]) -> PackedInputs:
        """Pack parts for ``run``; cheap next to it."""
        return pack(
            parts,
            block_size=self._pool.plan.block_size_tokens,
            null_block_id=self._pool.null_block_id,
            multiple=self.policy.multiple,
            groups=self._groups,
            is_attention_by_row=self.policy.is_fixed and not self._backend.is_row_independent,
            device=self._device,
        )

    @torch.inference_mode()
    def run(self, inputs: PackedInputs, rows: Sequence[int]) -> Tensor | None:
        """Run one forward pass, which stores the KV of every real row.

        Args:
            inputs: from ``pack``.
            rows: rows whose logits are wanted; may be empty.

        Returns:
            [len(rows), V] in the dtype of the model's head, or None if ``rows`` is empty. More
            columns if the step has rows of adapters with added tokens; -inf where a row has none.
        """
        layout = inputs.layout
        if self._virtual_rows is not None:
            layout = self._virtual_rows.begin_step(inputs.virtual_rows, layout)
        self._backend.begin_step(layout)
        if self._adapters is not None:
            self._adapters.begin_step(inputs.adapters, self._make_head_layout(inputs, rows))
        wanted = list(rows) or [0]
        padded = wanted + wanted[:1] * (-len(wanted) % self.policy.multiple)
        index = torch.tensor(padded, device=self._device)
        keep = {"logits_to_keep": index} if self._can_slice_logits else {}
        output = self._model(
            input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False, **keep
        )
        if not rows:
            return None
        logits: Tensor = output.logits[0]
        if self._adapters is not None:
            self._adapters.mask_added_tokens_(logits)
        return logits[: len(rows)] if self._can_slice_logits else logits[index[: len(rows)]]

    def _make_head_layout(self, inputs: PackedInputs, rows: Sequence[int]) -> AdapterLayout | None:
        """Return which of the rows that the output head sees use which adapter slots."""
        assert self._adapters is not None
        if not rows or not self._adapters.is_head_changed:
            return None
        seen = rows if self._can_slice_logits else range(inputs.layout.num_tokens)
        return make_adapter_layout(
            select_rows(inputs.adapter_rows, seen),
            max_group_rows=self._groups.max_rows,
            is_fixed=self._groups.is_fixed,
            device=self._device,
        )
