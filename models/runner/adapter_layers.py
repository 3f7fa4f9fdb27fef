"""AdapterLayers: adds each row's own adapter to the outputs of a model's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.adapters.store import BIAS, INPUT_GAIN, OUTPUT_GAIN, AdapterStore, LoraSlots
from models.adapters.weights import ModuleShape
from models.attention.backend import own_attention
from models.runner.adapter_layout import (
    GROUP_MULTIPLE_ROWS,
    AdapterLayout,
    RowGroups,
    RowRange,
    SlotRows,
)
from models.runner.row_stability import LINEAR_CLASSES

_PROBE_TOKENS = 3
# What changes no bit of any number when it is added; 0.0 would turn -0.0 into 0.0.
_NOTHING = -0.0
# Rows of the smallest groups, where that gives the same bits as GROUP_MULTIPLE_ROWS: a decode with
# an adapter for each row takes a fifth less time. Three rows or fewer take another kernel.
_FEWEST_ROWS = 4
_NUM_COMPARED_GROUPS = 16


class AdapterLayers:
    """Hooks on every module that an adapter may change.

    A row x of an adapter gets ``(W(x * input_gain) + x A B) * output_gain + base_bias + bias``,
    a row of the base model exactly what it gets without any of this. Rows are gathered into equal
    groups by slot, so that a module costs two batched products per bucket of ranks, however many
    adapters there are; a row's arithmetic is the same in any company.

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
        self.group_multiple = _find_group_multiple(store)
        for index, shape in enumerate(store.modules):
            module = model.get_submodule(shape.name)
            module.register_forward_pre_hook(_BeforeModule(self, index))
            module.register_forward_hook(_AfterModule(self, index))

    def begin_step(self, layout: AdapterLayout | None) -> None:
        """Take the layout of the step whose forward pass follows; None is base rows only."""
        self._layout = layout
        self._gathered_from = None
        self._gathered.clear()
        self._selected.clear()
        self._sums.clear()

    def scale_inputs(self, index: int, inputs: Tensor) -> Tensor | None:
        """Return inputs [..., P, K] of a module with the gains of their rows; None if unchanged."""
        assert self._layout is not None
        scaled: Tensor | None = None
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

    def add_(self, index: int, module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        """Change the outputs [..., P, N] of a module, in place, where rows have adapters."""
        layout = self._layout
        assert layout is not None
        flat = outputs.view(-1, outputs.shape[-1])
        pairs = [
            self._store.lora(groups.bucket_rank, index, groups.slots_in_use)
            for groups in layout.groups
        ]
        if layout.row_range is None:
            self._add_by_rows_(layout, pairs, inputs, flat)
        elif any(pairs):
            self._add_to_range_(layout, layout.row_range, pairs, inputs, flat)
        for bucket in layout.buckets:
            self._scale_outputs_(index, module, bucket, flat)
            self._add_bias_(index, bucket, flat)

    @property
    def is_active(self) -> bool:
        """Whether the step has rows of adapters."""
        return self._layout is not None

    def _add_to_range_(
        self,
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
            a, b = _pairs_of(groups, pair)
            inner = torch.bmm(self._gather(number, groups, inputs), a)
            torch.bmm(inner, b, out=own.view(groups.num_groups, -1, width))
        added = products.index_select(0, row_range.places)
        flat[row_range.start : row_range.stop] += added.to(flat.dtype)

    def _add_by_rows_(
        self,
        layout: AdapterLayout,
        pairs: Sequence[LoraSlots | None],
        inputs: Tensor,
        flat: Tensor,
    ) -> None:
        for number, (groups, pair) in enumerate(zip(layout.groups, pairs, strict=True)):
            if pair is None:
                continue
            a, b = _pairs_of(groups, pair)
            added = torch.bmm(torch.bmm(self._gather(number, groups, inputs), a), b).flatten(0, 1)
            if groups.places is not None:
                added = added.index_select(0, groups.places)
            flat.index_add_(0, groups.rows, added.to(flat.dtype))

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
    """Scales a module's inputs, also as the hook behind it sees them.

    No method of PEFT has input gains and a low-rank part at once.
    """

    def __init__(self, layers: AdapterLayers, index: int) -> None:
        self._layers = layers
        self._index = index

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._layers.is_active:
            return None
        scaled = self._layers.scale_inputs(self._index, inputs[0])
        return None if scaled is None else (scaled, *inputs[1:])


class _AfterModule:
    """Adds to a module's outputs."""

    def __init__(self, layers: AdapterLayers, index: int) -> None:
        self._layers = layers
        self._index = index

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> None:
        if self._layers.is_active:
            self._layers.add_(self._index, module, inputs[0], outputs)


def _find_group_multiple(store: AdapterStore) -> int:
    """Compare groups of few rows with full ones in all shapes of products of a store.

    Only in float32: there another order of summation shows in most elements, so that few of them
    tell. In half precision rounding hides it in all but one of thousands.
    """
    if store.device.type != "cpu" or store.dtype != torch.float32:
        return GROUP_MULTIPLE_ROWS
    shapes = set()
    for module in store.modules:
        for rank in store.bucket_ranks:
            shapes |= {(module.num_inputs, rank), (rank, module.num_outputs)}
    generator = torch.Generator().manual_seed(0)
    for width, num_columns in sorted(shapes):
        rows = torch.randn(_NUM_COMPARED_GROUPS, GROUP_MULTIPLE_ROWS, width, generator=generator)
        matrices = torch.randn(_NUM_COMPARED_GROUPS, width, num_columns, generator=generator)
        parts = [torch.bmm(part, matrices) for part in torch.split(rows, _FEWEST_ROWS, dim=1)]
        if not torch.equal(torch.cat(parts, dim=1), torch.bmm(rows, matrices)):
            return GROUP_MULTIPLE_ROWS
    return _FEWEST_ROWS


def _pairs_of(groups: RowGroups, pair: LoraSlots) -> tuple[Tensor, Tensor]:
    """Return the pairs of the groups, [G, K, R] and [G, R, N]."""
    if groups.slot_range is not None:
        return pair.a[groups.slot_range], pair.b[groups.slot_range]
    return pair.a.index_select(0, groups.slots), pair.b.index_select(0, groups.slots)


def discover_modules(model: PreTrainedModel) -> tuple[ModuleShape, ...]:
    """Return what an adapter may change: modules through which every row passes exactly once.

    These are linear layers, and norms that have a bias. Others (the experts of a mixture, which
    see some of the rows; the output head, which sees the wanted ones only) cannot be changed.
    """
    calls: dict[str, list[int]] = {}
    handles = []
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is not head and _is_changeable(module):
            rows = calls.setdefault(name, [])

            def note(_: nn.Module, inputs: tuple[Any, ...], rows: list[int] = rows) -> None:
                rows.append(inputs[0].numel() // inputs[0].shape[-1])

            handles.append(module.register_forward_pre_hook(note))
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), own_attention(model):
            model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(
        _shape_of(name, model.get_submodule(name))
        for name, rows in calls.items()
        if rows == [_PROBE_TOKENS]
    )


def _is_changeable(module: nn.Module) -> bool:
    # A subclass may compute something else than a product (the router of phimoe does).
    return type(module) in LINEAR_CLASSES or isinstance(module, nn.LayerNorm)


def _shape_of(name: str, module: nn.Module) -> ModuleShape:
    weight = module.weight
    assert isinstance(weight, Tensor)
    has_bias = getattr(module, "bias", None) is not None
    if weight.dim() == 1:
        width = weight.shape[0]
        return ModuleShape(
            name=name, num_inputs=width, num_outputs=width, is_norm=True, has_bias=has_bias
        )
    is_transposed = isinstance(module, Conv1D)
    first, second = weight.shape
    return ModuleShape(
        name=name,
        num_inputs=first if is_transposed else second,
        num_outputs=second if is_transposed else first,
        is_transposed=is_transposed,
        has_bias=has_bias,
    )
