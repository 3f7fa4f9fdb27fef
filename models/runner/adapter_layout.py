"""AdapterLayout: which rows of a step use which adapter slot, as tensors all modules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from models.adapters.ledger import Slot

# Groups of rows are padded to a multiple of this, as the rows of a step are, unless a smaller one
# is known to give the same bits.
GROUP_MULTIPLE_ROWS = 8
# So many unused slots among used ones are multiplied too: a copy of the used ones reads and writes
# all of their matrices.
_MAX_HOLES_PER_USED_SLOT = 1 / 3
# Rows without an adapter are added to as well (a zero) if they are at most so many of all: one sum
# over a range of rows takes a third of the time of a sum per row.
_MAX_BASE_ROWS_PER_ROW = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows [row_start, row_start + num_rows) of the packed step use one slot.

    Attributes:
        slot: whose.
        row_start: first row.
        num_rows: how many.
    """

    slot: Slot
    row_start: int
    num_rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowGroups:
    """G groups of M places; each group's rows use one slot of one bucket.

    Attributes:
        bucket_rank: of the bucket.
        slots_in_use: the slots of the groups.
        num_groups: G.
        slots: [G] int64, the slot of each group; where a range needs it, unused ones too.
        slot_range: the same as a range if they are consecutive and rising, so that nothing needs
            to be copied; else None.
        gathered: [G * M] int64, the row at each place; places that are padding name row 0.
        rows: [n] int64, the real rows, in the order of their places.
        places: [n] int64, where these lie among the G * M; None if there is no padding.
    """

    bucket_rank: int
    slots_in_use: frozenset[int]
    num_groups: int
    slots: Tensor
    slot_range: slice | None
    gathered: Tensor
    rows: Tensor
    places: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRows:
    """All rows of one bucket with the slot of each.

    Attributes:
        bucket_rank: of the bucket.
        slots: the slots in use.
        rows: [n] int64.
        row_slots: [n] int64.
    """

    bucket_rank: int
    slots: frozenset[int]
    rows: Tensor
    row_slots: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, stop) of the step, of which most have adapters.

    Attributes:
        start: first row.
        stop: behind the last one.
        places: [stop - start] int64, each row's place when the places of all groups are numbered
            through; one behind the last place for a row that is in no group.
        num_places: of all groups.
    """

    start: int
    stop: int
    places: Tensor
    num_places: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLayout:
    """All of one step; rows that are in none of it use the base model.

    Attributes:
        groups: every row with an adapter is in one group.
        buckets: the same rows by bucket.
        row_range: where these rows lie, None if too many others lie between them.
    """

    groups: tuple[RowGroups, ...]
    buckets: tuple[SlotRows, ...]
    row_range: RowRange | None


def make_adapter_layout(
    parts: Sequence[AdapterRows],
    *,
    max_group_rows: int,
    device: torch.device,
    group_multiple: int = GROUP_MULTIPLE_ROWS,
    is_fixed: bool = False,
) -> AdapterLayout | None:
    """Group rows by slot; None if there are none.

    Few rows of a slot (a decode) and many (a prefill chunk) make groups of different sizes, so
    that the one is not padded to the other. Of more than ``max_group_rows`` rows several groups
    are made.

    Args:
        parts: rows of slots; a slot may occur several times.
        max_group_rows: most rows of one group, a multiple of GROUP_MULTIPLE_ROWS.
        device: where the tensors go.
        group_multiple: groups have this number of rows times a power of two.
        is_fixed: multiply one group at a time, and all of ``max_group_rows``: no product has a
            shape that depends on other slots.
    """
    if is_fixed:
        group_multiple = max_group_rows
    rows_of_slot: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        key = (part.slot.bucket_rank, part.slot.index)
        rows = rows_of_slot.setdefault(key, [])
        rows.extend(range(part.row_start, part.row_start + part.num_rows))
    if not rows_of_slot:
        return None
    by_size: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for (rank, slot), rows in sorted(rows_of_slot.items()):
        for tile in _tiles(rows, max_group_rows):
            by_size.setdefault((rank, _group_size(len(tile), group_multiple)), []).append(
                (slot, tile)
            )
    groups = tuple(
        _make_groups(rank, size, batch, device)
        for (rank, size), members in sorted(by_size.items())
        for batch in ([[member] for member in members] if is_fixed else [members])
    )
    return AdapterLayout(
        groups=groups,
        buckets=tuple(
            _make_slot_rows(rank, rows_of_slot, device)
            for rank in sorted({rank for rank, _ in rows_of_slot})
        ),
        row_range=_make_row_range(groups, device),
    )


def select_rows(parts: Sequence[AdapterRows], chosen: Sequence[int]) -> list[AdapterRows]:
    """Return which of the chosen rows use a slot; they are numbered by their place among these."""
    slot_of_row = {
        row: part.slot
        for part in parts
        for row in range(part.row_start, part.row_start + part.num_rows)
    }
    return [
        AdapterRows(slot_of_row[row], place, 1)
        for place, row in enumerate(chosen)
        if row in slot_of_row
    ]


def _tiles(rows: list[int], max_group_rows: int) -> Iterable[list[int]]:
    for start in range(0, len(rows), max_group_rows):
        yield rows[start : start + max_group_rows]


def _group_size(num_rows: int, multiple: int) -> int:
    """Return ``multiple`` times the power of two that is just enough."""
    size = multiple
    while size < num_rows:
        size *= 2
    return size


def _make_groups(
    rank: int, size: int, members: list[tuple[int, list[int]]], device: torch.device
) -> RowGroups:
    slots_in_use = frozenset(slot for slot, _ in members)
    members = _fill_holes(members)
    slots = [slot for slot, _ in members]
    gathered: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for _, tile in members:
        places.extend(range(len(gathered), len(gathered) + len(tile)))
        rows.extend(tile)
        gathered.extend(tile)
        gathered.extend([0] * (size - len(tile)))
    is_range = slots == list(range(slots[0], slots[0] + len(slots)))
    return RowGroups(
        bucket_rank=rank,
        slots_in_use=slots_in_use,
        num_groups=len(members),
        slots=torch.tensor(slots, device=device),
        slot_range=slice(slots[0], slots[0] + len(slots)) if is_range else None,
        gathered=torch.tensor(gathered, device=device),
        rows=torch.tensor(rows, device=device),
        places=None if len(rows) == len(gathered) else torch.tensor(places, device=device),
    )


def _fill_holes(members: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """Put empty groups between those of nearly consecutive slots, so that they make a range."""
    slots = [slot for slot, _ in members]
    wanted = range(slots[0], slots[-1] + 1)
    num_used = len(set(slots))
    if num_used < len(slots) or len(wanted) > num_used * (1 + _MAX_HOLES_PER_USED_SLOT):
        return members
    tiles = dict(members)
    return [(slot, tiles.get(slot, [])) for slot in wanted]


def _make_row_range(groups: Sequence[RowGroups], device: torch.device) -> RowRange | None:
    place_of_row: dict[int, int] = {}
    num_places = 0
    for each in groups:
        rows = each.rows.tolist()
        places = range(len(rows)) if each.places is None else each.places.tolist()
        place_of_row.update(
            (row, num_places + place) for row, place in zip(rows, places, strict=True)
        )
        num_places += each.gathered.numel()
    start, stop = min(place_of_row), max(place_of_row) + 1
    num_base_rows = stop - start - len(place_of_row)
    if num_base_rows > _MAX_BASE_ROWS_PER_ROW * len(place_of_row):
        return None
    places_of_range = [place_of_row.get(row, num_places) for row in range(start, stop)]
    return RowRange(start, stop, torch.tensor(places_of_range, device=device), num_places)


def _make_slot_rows(
    rank: int, rows_of_slot: dict[tuple[int, int], list[int]], device: torch.device
) -> SlotRows:
    mine = {slot: rows for (owner, slot), rows in rows_of_slot.items() if owner == rank}
    return SlotRows(
        bucket_rank=rank,
        slots=frozenset(mine),
        rows=torch.tensor([row for rows in mine.values() for row in rows], device=device),
        row_slots=torch.tensor([slot for slot, rows in mine.items() for _ in rows], device=device),
    )
