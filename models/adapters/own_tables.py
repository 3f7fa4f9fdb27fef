"""OwnTables: weights and rows of tables that resident adapters have for themselves, on the device.

They are made when an adapter gets its slot, and go with it: few adapters have them, and one may be
as large as the base model's table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.adapters.ledger import Slot
from models.adapters.weights import ModuleDelta, ModuleShape, TokenRows


class OwnTables:
    """Own weights and token rows by module and slot.

    Owner: the step thread.

    Invariants: holds nothing of a slot's former tenant.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold nothing.

        Args:
            device: where the tensors lie.
        """
        self._device = device
        self._weights: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._token_rows: dict[tuple[int, int], dict[int, TokenRows]] = {}
        # Of the output head, by bucket.
        self._added_rows: dict[int, dict[int, TokenRows]] = {}
        self._num_added_tokens: dict[Slot, int] = {}

    def weights(self, bucket_rank: int, module: int) -> Mapping[int, Tensor]:
        """Return own weights of a module by slot, in the base's stored form and dtype."""
        return self._weights.get((bucket_rank, module), {})

    def token_rows(self, bucket_rank: int, module: int) -> Mapping[int, TokenRows]:
        """Return own rows of a table by slot: of an embedding in its dtype, else in float32."""
        return self._token_rows.get((bucket_rank, module), {})

    def added_rows(self, bucket_rank: int) -> Mapping[int, TokenRows]:
        """Return rows of the output head for tokens behind the base's vocabulary, by slot."""
        return self._added_rows.get(bucket_rank, {})

    def num_added_tokens(self, bucket_rank: int, slot: int) -> int:
        """Return how many tokens behind the base's vocabulary the rows of a slot may have."""
        return self._num_added_tokens.get(Slot(bucket_rank, slot), 0)

    def begin_(self, slot: Slot, num_added_tokens: int) -> None:
        """Take a slot's new tenant, whose modules ``write_`` takes.

        Args:
            slot: which.
            num_added_tokens: behind the base's vocabulary.
        """
        self._num_added_tokens[slot] = num_added_tokens
        self._added_rows.get(slot.bucket_rank, {}).pop(slot.index, None)

    def write_(
        self, slot: Slot, number: int, module: ModuleShape, delta: ModuleDelta | None
    ) -> None:
        """Take what a slot's new tenant has of a module, and drop the former one's.

        Args:
            slot: which.
            number: of the module.
            module: its shape.
            delta: what happens to it; None is nothing.
        """
        key = (slot.bucket_rank, number)
        for tables in (self._weights, self._token_rows):
            if key in tables:
                tables[key].pop(slot.index, None)
        if delta is None:
            return
        if delta.weight is not None:
            self._weights.setdefault(key, {})[slot.index] = self._copy(
                delta.weight, module.weight_dtype
            )
        if delta.token_rows is not None:
            self._write_token_rows_(slot, number, module, delta.token_rows)

    def _write_token_rows_(
        self, slot: Slot, number: int, module: ModuleShape, table: TokenRows
    ) -> None:
        ids = table.ids.to(self._device, copy=True)
        rows = self._copy(table.rows, _row_dtype(module))
        if not module.is_embedding:
            num_own = int((table.ids < module.num_outputs).sum())
            if num_own < len(ids):
                self._added_rows.setdefault(slot.bucket_rank, {})[slot.index] = TokenRows(
                    ids=ids[num_own:], rows=rows[num_own:]
                )
            ids, rows = ids[:num_own], rows[:num_own]
        if len(ids):
            by_slot = self._token_rows.setdefault((slot.bucket_rank, number), {})
            by_slot[slot.index] = TokenRows(ids=ids, rows=rows)

    def _copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(device=self._device, dtype=dtype, copy=True)


def cost_bytes(module: ModuleShape, delta: ModuleDelta) -> int:
    """Return the memory of what ``OwnTables`` keeps of a module."""
    num_bytes = 0
    if delta.weight is not None:
        num_bytes += delta.weight.numel() * module.weight_dtype.itemsize
    if delta.token_rows is not None:
        num_bytes += delta.token_rows.ids.nbytes
        num_bytes += delta.token_rows.rows.numel() * _row_dtype(module).itemsize
    return num_bytes


def _row_dtype(module: ModuleShape) -> torch.dtype:
    return module.weight_dtype if module.is_embedding else torch.float32
