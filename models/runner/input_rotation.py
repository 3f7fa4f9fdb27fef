"""InputRotator: turns the rows of adapters that rotate a module's input (OFT).

Every product has exactly ROWS_PER_TILE rows of one adapter and one block, whatever else is in the
step, so that a row's bits do not depend on its company. Arithmetic is float32, as PEFT's is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from models.adapters.store import AdapterStore
from models.runner.adapter_layout import SlotRows

ROWS_PER_TILE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """T tiles of rows.

    Attributes:
        slots: of each tile.
        gathered: [T * ROWS_PER_TILE] int64, the row at each place; one of the tile's own rows
            where it is padding.
        rows: [n] int64, the real rows.
        places: [n] int64, where these lie among the places.
    """

    slots: Sequence[int]
    gathered: Tensor
    rows: Tensor
    places: Tensor


class InputRotator:
    """Rotates inputs by the slots of a store.

    Owner: the step thread.
    """

    def __init__(self, store: AdapterStore) -> None:
        """Use the rotations of ``store``."""
        self._store = store
        self._tiles: dict[tuple[int, frozenset[int]], _Tiles] = {}

    def begin_step(self) -> None:
        """Forget the rows of the step before."""
        self._tiles.clear()

    def rotate(self, index: int, buckets: Sequence[SlotRows], inputs: Tensor) -> Tensor | None:
        """Return inputs [..., P, K] of a module with the rows turned; None if no row is.

        Args:
            index: of the module in the store.
            buckets: the rows of the step.
            inputs: stay as they are.
        """
        rotated: Tensor | None = None
        for bucket in buckets:
            for users in self._users_by_size(index, bucket):
                if rotated is None:
                    rotated = inputs.clone()
                self._rotate_(rotated.view(-1, inputs.shape[-1]), index, bucket, users)
        return rotated

    def _users_by_size(self, index: int, bucket: SlotRows) -> list[frozenset[int]]:
        """Return the slots in use that have rotations here, those with equal blocks together."""
        by_size: dict[int, set[int]] = {}
        for slot, rotations in self._store.rotations(bucket.bucket_rank, index).items():
            if slot in bucket.slots:
                by_size.setdefault(rotations.shape[-1], set()).add(slot)
        return [frozenset(users) for users in by_size.values()]

    def _rotate_(self, flat: Tensor, index: int, bucket: SlotRows, users: frozenset[int]) -> None:
        tiles = self._find_tiles(bucket, users)
        rotations = self._store.rotations(bucket.bucket_rank, index)
        size = rotations[tiles.slots[0]].shape[-1]
        num_blocks = flat.shape[1] // size
        matrices = torch.stack([rotations[slot].expand(num_blocks, -1, -1) for slot in tiles.slots])
        blocks = flat.index_select(0, tiles.gathered).float()
        blocks = blocks.view(-1, ROWS_PER_TILE, num_blocks, size).transpose(1, 2)
        turned = torch.bmm(blocks.flatten(0, 1), matrices.flatten(0, 1))
        turned = turned.view(-1, num_blocks, ROWS_PER_TILE, size).transpose(1, 2)
        own = turned.reshape(-1, flat.shape[1]).index_select(0, tiles.places)
        flat.index_copy_(0, tiles.rows, own.to(flat.dtype))

    def _find_tiles(self, bucket: SlotRows, users: frozenset[int]) -> _Tiles:
        """Return the tiles of some slots; most modules have the same."""
        key = (bucket.bucket_rank, users)
        tiles = self._tiles.get(key)
        if tiles is None:
            tiles = self._tiles[key] = _make_tiles(bucket, users)
        return tiles


def _make_tiles(bucket: SlotRows, users: frozenset[int]) -> _Tiles:
    rows_of_slot: dict[int, list[int]] = {slot: [] for slot in sorted(users)}
    for row, slot in zip(bucket.rows.tolist(), bucket.row_slots.tolist(), strict=True):
        if slot in users:
            rows_of_slot[slot].append(row)
    slots: list[int] = []
    gathered: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    for slot, own in rows_of_slot.items():
        for start in range(0, len(own), ROWS_PER_TILE):
            tile = own[start : start + ROWS_PER_TILE]
            slots.append(slot)
            rows.extend(tile)
            places.extend(range(len(gathered), len(gathered) + len(tile)))
            gathered.extend(tile + tile[-1:] * (ROWS_PER_TILE - len(tile)))
    device = bucket.rows.device
    return _Tiles(
        slots=slots,
        gathered=torch.tensor(gathered, device=device),
        rows=torch.tensor(rows, device=device),
        places=torch.tensor(places, device=device),
    )
