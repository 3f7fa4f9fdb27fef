"""AdapterLayers: adds each row's own adapter to the outputs of a model's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.adapters.store import BIAS, INPUT_GAIN, OUTPUT_GAIN, AdapterStore, LoraSlots
from models.runner.adapter_layout import (
    GROUP_MULTIPLE_ROWS,
    AdapterLayout,
    RowGroups,
    RowRange,
    SlotRows,
)
from models.runner.added_tokens import AddedTokens
from models.runner.input_rotation import InputRotator
from models.runner.table_rows import TableRows

# What changes no bit of any number when it is added; 0.0 would turn -0.0 into 0.0.
_NOTHING = -0.0
# Rows of the smallest groups, where that gives the same bits as GROUP_MULTIPLE_ROWS: a decode with
# an adapter for each row takes a fifth less time. Three rows or fewer take another kernel.
_FEWEST_ROWS = 4
_NUM_COMPARED_GROUPS = 16


class AdapterLayers:
    """Hooks on every module that an adapter may change.

    A row x of an adapter gets ``(W(x R * input_gain) + x A B) * output_gain + base_bias + bias``,
    a row of the base model exactly what it gets without any of this. Rows are gathered into equal
    groups by slot, so that a module costs two batched products per bucket of ranks, however many
    adapters there are; a row's arithmetic is the same in any company. Weights and rows of tables
    that an adapter has for itself go before all that (``TableRows``).

    The output head sees the wanted rows only, and so has a layout of its own; it runs last.

    Attributes:
        group_multiple: the least number of rows of a group that gives a row the same bits as any
            multiple of it; for ``make_adapter_layout``.

    Owner: the step thread.
    """

    def __init__(self, model: PreTrainedModel, store: AdapterStore) -> None:
        """Attach to ``model``; without a layout nothing changes.

        Args:
            model: has every module of the store.
            store: of the resident adapters.
        """
        self._store = store
        self._layout: AdapterLayout | None = None
        self._gathered_from: Tensor | None = None
        self._gathered: dict[int, Tensor] = {}
        self._selected: dict[tuple[int, frozenset[int]], tuple[Tensor, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._rotator = InputRotator(store)
        self._table_rows = TableRows(store.own_tables)
        self._added_tokens = AddedTokens(store.own_tables)
        self._embedding_index: int | None = None
        self._head_layout: AdapterLayout | None = None
        self._head_index: int | None = None
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        for index, shape in enumerate(store.modules):
            module = model.get_submodule(shape.name)
            if module is head:
                self._head_index = index
                module.register_forward_pre_hook(self._begin_head)
            if module is embedding:
                self._embedding_index = index
                module.register_forward_pre_hook(self._hide_added_tokens)
            if not (shape.is_norm or shape.is_embedding):
                module.register_forward_pre_hook(_BeforeModule(self, index))
            module.register_forward_hook(_AfterModule(self, index))
        self.group_multiple = _find_group_multiple(store, self._head_index)

    def begin_step(
        self, layout: AdapterLayout | None, head_layout: AdapterLayout | None = None
    ) -> None:
        """Take the layouts of the step whose forward pass follows; None is base rows only.

        Args:
            layout: of all rows.
            head_layout: of the rows that the output head sees, of groups of multiples of
                GROUP_MULTIPLE_ROWS.
        """
        self._head_layout = head_layout
        self._added_tokens.begin_step()
        self._begin(layout)

    @property
    def is_head_changed(self) -> bool:
        """Whether any resident adapter changes the output head."""
        return self._head_index is not None and self._store.is_changed(self._head_index)

    def _begin_head(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:  # noqa: ARG002
        self._begin(self._head_layout)

    def _hide_added_tokens(
        self,
        module: nn.Module,  # noqa: ARG002 - of the protocol
        inputs: tuple[Any, ...],
    ) -> tuple[Any, ...] | None:
        index = self._embedding_index
        if index is None or not self.is_active(index):
            return None
        num_tokens = self._store.modules[index].num_inputs
        return (self._added_tokens.hide(inputs[0], num_tokens), *inputs[1:])

    def _begin(self, layout: AdapterLayout | None) -> None:
        self._layout = layout
        self._gathered_from = None
        self._gathered.clear()
        self._selected.clear()
        self._sums.clear()
        self._rotator.begin_step()
        self._table_rows.begin_layout()

    def scale_inputs(self, index: int, inputs: Tensor) -> Tensor | None:
        """Return inputs [..., P, K] of a module as their rows' adapters turn and scale them.

        None if they stay.
        """
        assert self._layout is not None
        scaled = self._rotator.rotate(index, self._layout.buckets, inputs)
        for bucket in self._layout.buckets:
            found = self._store.vectors(INPUT_GAIN, bucket.bucket_rank, index, bucket.slots)
            if found is None:
                continue
            values, users = found
            rows, slots = self._select(bucket, users)
            scaled = inputs.clone() if scaled is None else scaled
            flat = scaled.view(-1, scaled.shape[-1])
            own = flat.index_select(0, rows) * values.index_select(0, slots).to(flat.dtype)
            flat.index_copy_(0, rows, own)
        return scaled

    def mask_added_tokens_(self, logits: Tensor) -> None:
        """Give rows of logits [P, V + added] -inf for tokens that are not their adapters'.

        Args:
            logits: of the step, which the output head saw last.
        """
        if self._head_index is not None:
            num_tokens = self._store.modules[self._head_index].num_outputs
            if logits.shape[1] > num_tokens:
                self._added_tokens.mask_(logits, num_tokens)

    def add_(self, index: int, module: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Change the outputs [..., P, N] of a module, in place, where rows have adapters.

        Returns:
            The same; of the output head with columns for added tokens, if the step has any.
        """
        layout = self._layout
        assert layout is not None
        ids = self._added_tokens.token_ids if index == self._embedding_index else None
        self._table_rows.replace_(index, module, layout.buckets, inputs, outputs, token_ids=ids)
        flat = outputs.view(-1, outputs.shape[-1])
        pairs = [
            self._store.lora(groups.bucket_rank, index, groups.slots_in_use)
            for groups in layout.groups
        ]
        if layout.row_range is None:
            self._add_by_rows_(index, layout, pairs, inputs, flat)
        elif any(pairs):
            self._add_to_range_(index, layout, layout.row_range, pairs, inputs, flat)
        for bucket in layout.buckets:
            self._scale_outputs_(index, module, bucket, flat)
            self._add_bias_(index, bucket, flat)
        if index == self._head_index:
            return self._added_tokens.widen(layout.buckets, inputs, outputs)
        return outputs

    def is_active(self, index: int) -> bool:
        """Return whether the step has rows of adapters, and any resident one changes a module."""
        return self._layout is not None and self._store.is_changed(index)

    def _add_to_range_(
        self,
        index: int,
        layout: AdapterLayout,
        row_range: RowRange,
        pairs: Sequence[LoraSlots | None],
        inputs: Tensor,
        flat: Tensor,
    ) -> None:
        """Write the products of all groups into one tensor and add that in one go."""
        width = flat.shape[1]
        products = self._sums.get(width)
        if products is None:
            products = torch.empty(
                row_range.num_places + 1, width, dtype=self._store.dtype, device=flat.device
            )
            products[-1] = _NOTHING
            self._sums[width] = products
        place = 0
        for number, (groups, pair) in enumerate(zip(layout.groups, pairs, strict=True)):
            own = products[place : place + groups.gathered.shape[0]]
            place += groups.gathered.shape[0]
            if pair is None:
                own.fill_(_NOTHING)
                continue
            inner = self._multiply_by_a(index, number, groups, inputs, pair)
            torch.bmm(inner, _of_groups(groups, pair.b), out=own.view(groups.num_groups, -1, width))
        added = products.index_select(0, row_range.places)
        flat[row_range.start : row_range.stop] += added.to(flat.dtype)

    def _add_by_rows_(
        self,
        index: int,
        layout: AdapterLayout,
        pairs: Sequence[LoraSlots | None],
        inputs: Tensor,
        flat: Tensor,
    ) -> None:
        for number, (groups, pair) in enumerate(zip(layout.groups, pairs, strict=True)):
            if pair is None:
                continue
            inner = self._multiply_by_a(index, number, groups, inputs, pair)
            added = torch.bmm(inner, _of_groups(groups, pair.b)).flatten(0, 1)
            if groups.places is not None:
                added = added.index_select(0, groups.places)
            flat.index_add_(0, groups.rows, added.to(flat.dtype))

    def _multiply_by_a(
        self, index: int, number: int, groups: RowGroups, inputs: Tensor, pair: LoraSlots
    ) -> Tensor:
        """Return the rows of the groups times their A, [G, M, R]; of a one-hot row a row of A."""
        if not self._store.modules[index].is_embedding:
            return torch.bmm(self._gather(number, groups, inputs), _of_groups(groups, pair.a))
        ids = inputs.reshape(-1).index_select(0, groups.gathered).view(groups.num_groups, -1)
        return pair.a[groups.slots[:, None], ids]

    def _gather(self, number: int, groups: RowGroups, inputs: Tensor) -> Tensor:
        """Return the rows of the groups, [G, M, K]; modules that share an input share them."""
        if self._gathered_from is not inputs:
            self._gathered_from = inputs
            self._gathered.clear()
        gathered = self._gathered.get(number)
        if gathered is None:
            flat = inputs.view(-1, inputs.shape[-1])
            gathered = flat.index_select(0, groups.gathered).to(self._store.dtype)
            gathered = gathered.view(groups.num_groups, -1, flat.shape[-1])
            self._gathered[number] = gathered
        return gathered

    def _scale_outputs_(
        self, index: int, module: nn.Module, bucket: SlotRows, flat: Tensor
    ) -> None:
        found = self._store.vectors(OUTPUT_GAIN, bucket.bucket_rank, index, bucket.slots)
        if found is None:
            return
        values, users = found
        rows, slots = self._select(bucket, users)
        own = flat.index_select(0, rows).float()
        gains = values.index_select(0, slots)
        bias = getattr(module, "bias", None)
        own = own * gains if bias is None else (own - bias) * gains + bias
        flat.index_copy_(0, rows, own.to(flat.dtype))

    def _add_bias_(self, index: int, bucket: SlotRows, flat: Tensor) -> None:
        found = self._store.vectors(BIAS, bucket.bucket_rank, index, bucket.slots)
        if found is None:
            return
        values, users = found
        rows, slots = self._select(bucket, users)
        flat.index_add_(0, rows, values.index_select(0, slots).to(flat.dtype))

    def _select(self, bucket: SlotRows, users: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of ``users`` and the slot of each; most modules have the same users."""
        if users == bucket.slots:
            return bucket.rows, bucket.row_slots
        key = (bucket.bucket_rank, users)
        found = self._selected.get(key)
        if found is None:
            places = [
                place for place, slot in enumerate(bucket.row_slots.tolist()) if slot in users
            ]
            chosen = torch.tensor(places, device=bucket.rows.device)
            found = (bucket.rows[chosen], bucket.row_slots[chosen])
            self._selected[key] = found
        return found


class _BeforeModule:
    """Turns and scales a module's inputs, also as the hook behind it sees them.

    No method of PEFT has that and a low-rank part at once.
    """

    def __init__(self, layers: AdapterLayers, index: int) -> None:
        self._layers = layers
        self._index = index

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._layers.is_active(self._index):
            return None
        scaled = self._layers.scale_inputs(self._index, inputs[0])
        return None if scaled is None else (scaled, *inputs[1:])


class _AfterModule:
    """Adds to a module's outputs."""

    def __init__(self, layers: AdapterLayers, index: int) -> None:
        self._layers = layers
        self._index = index

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> Tensor:
        if self._layers.is_active(self._index):
            return self._layers.add_(self._index, module, inputs[0], outputs)
        return outputs


def _find_group_multiple(store: AdapterStore, head_index: int | None) -> int:
    """Compare groups of few rows with full ones in all shapes of products of a store.

    Except for the output head's, which would take longest: its groups are full ones.
    Only in float32: there another order of summation shows in most elements, so that few of them
    tell. In half precision rounding hides it in all but one of thousands.
    """
    if store.device.type != "cpu" or store.dtype != torch.float32:
        return GROUP_MULTIPLE_ROWS
    shapes = set()
    for index, module in enumerate(store.modules):
        if module.is_norm or index == head_index:
            continue
        for rank in store.bucket_ranks:
            shapes.add((rank, module.num_outputs))
            if not module.is_embedding:
                shapes.add((module.num_inputs, rank))
    generator = torch.Generator().manual_seed(0)
    for width, num_columns in sorted(shapes):
        rows = torch.randn(_NUM_COMPARED_GROUPS, GROUP_MULTIPLE_ROWS, width, generator=generator)
        matrices = torch.randn(_NUM_COMPARED_GROUPS, width, num_columns, generator=generator)
        parts = [torch.bmm(part, matrices) for part in torch.split(rows, _FEWEST_ROWS, dim=1)]
        if not torch.equal(torch.cat(parts, dim=1), torch.bmm(rows, matrices)):
            return GROUP_MULTIPLE_ROWS
    return _FEWEST_ROWS


def _of_groups(groups: RowGroups, by_slot: Tensor) -> Tensor:
    """Return the matrices of the groups, [G, ...], of those of all slots, [S, ...]."""
    if groups.slot_range is not None:
        return by_slot[groups.slot_range]
    return by_slot.index_select(0, groups.slots)
