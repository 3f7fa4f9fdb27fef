"""Packs the sequences of a step into one row of tokens with its layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from models.attention.layout import KEY_MULTIPLE_TOKENS, DecodeGroup, PrefillSegment, StepLayout
from models.runner.adapter_layout import (
    GROUP_MULTIPLE_ROWS,
    AdapterLayout,
    AdapterRows,
    make_adapter_layout,
)
from models.runner.virtual_rows import VirtualRows, find_virtual_rows
from models.scheduling.step_plan import ScheduledSequence

# A group of decode rows is padded to its longest table; a row joins the group only if its own
# table is at least this fraction of that.
MIN_GROUP_FILL = 0.6


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """For ``make_adapter_layout``.

    Attributes:
        max_rows: most rows of a group.
        multiple: groups have this number of rows times a power of two.
        is_fixed: all have ``max_rows``, and are multiplied one at a time.
    """

    max_rows: int = 32
    multiple: int = GROUP_MULTIPLE_ROWS
    is_fixed: bool = False


SMALL_GROUPS = GroupSizes()


@dataclasses.dataclass(frozen=True, slots=True)
class PackedInputs:
    """One forward pass.

    Attributes:
        token_ids: [1, P] int64; P is T padded, at the end, with token 0 at position 0.
        positions: [1, P] int64.
        layout: where the T real rows belong.
        last_rows: for each part, in the order given, the row of its last token.
        adapters: which rows use which adapter slots; None if all use the base model.
        adapter_rows: the same by part.
        virtual_rows: which rows are virtual tokens; their token ids mean nothing.
    """

    token_ids: Tensor
    positions: Tensor
    layout: StepLayout
    last_rows: tuple[int, ...]
    adapters: AdapterLayout | None
    adapter_rows: tuple[AdapterRows, ...]
    virtual_rows: tuple[VirtualRows, ...]


def split_parts(
    sequences: Iterable[ScheduledSequence], max_rows: int
) -> Iterator[list[ScheduledSequence]]:
    """Cut a step into forward passes of at most ``max_rows`` rows; 0 is without limit.

    A chunk that is cut keeps ``is_sampled`` on its last part only; its ``scored_positions`` are
    cut with it.
    """
    parts: list[ScheduledSequence] = []
    if not max_rows:
        parts.extend(sequences)
        if parts:
            yield parts
        return
    room = max_rows
    for sequence in sequences:
        done = 0
        while done < len(sequence.token_ids):
            taken = sequence.token_ids[done : done + room]
            is_last = done + len(taken) == len(sequence.token_ids)
            start = sequence.start + done
            scored = sequence.scored_positions
            parts.append(
                dataclasses.replace(
                    sequence,
                    token_ids=taken,
                    start=start,
                    is_sampled=sequence.is_sampled and is_last,
                    scored_positions=range(
                        max(scored.start, start), min(scored.stop, start + len(taken))
                    ),
                )
            )
            done += len(taken)
            room -= len(taken)
            if room == 0:
                yield parts
                parts, room = [], max_rows
    if parts:
        yield parts


def pack(
    parts: Sequence[ScheduledSequence],
    *,
    block_size: int,
    null_block_id: int,
    multiple: int,
    groups: GroupSizes = SMALL_GROUPS,
    is_attention_by_row: bool = False,
    device: torch.device,
) -> PackedInputs:
    """Pack parts into one row: decodes first, longest table first, then the chunks.

    Args:
        parts: one entry per sequence, at least one.
        block_size: tokens of a KV block.
        null_block_id: pads block tables.
        multiple: P is a multiple of this.
        groups: sizes of groups of rows that use one adapter slot.
        is_attention_by_row: make every row, also those of chunks, a decode group of its own,
            whose table depends on its own position only.
        device: where the tensors go.
    """
    step = KEY_MULTIPLE_TOKENS // math.gcd(KEY_MULTIPLE_TOKENS, block_size)
    num_blocks = [-(-part.end // (block_size * step)) * step for part in parts]
    singles = [index for index, part in enumerate(parts) if len(part.token_ids) == 1]
    singles.sort(key=num_blocks.__getitem__, reverse=True)
    chunks = [index for index, part in enumerate(parts) if len(part.token_ids) > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    fresh: list[int] = []
    last_rows = [0] * len(parts)
    for index in (*singles, *chunks):
        part = parts[index]
        token_ids.extend(part.token_ids)
        positions.extend(range(part.start, part.end))
        for position in range(part.start, part.end):
            block_id = part.block_ids[position // block_size]
            offset = position % block_size
            slots.append(block_id * block_size + offset)
            if offset == 0:
                fresh.append(block_id)
        last_rows[index] = len(token_ids) - 1
    layout = StepLayout(
        num_tokens=len(token_ids),
        slots=torch.tensor(slots, device=device),
        fresh_block_ids=torch.tensor(fresh, device=device) if fresh else None,
        decodes=tuple(
            _row_groups(parts, (*singles, *chunks), block_size, step, null_block_id, device)
            if is_attention_by_row
            else _decode_groups(parts, singles, num_blocks, block_size, null_block_id, device)
        ),
        prefills=()
        if is_attention_by_row
        else tuple(
            PrefillSegment(
                row_start=last_rows[index] + 1 - len(parts[index].token_ids),
                block_ids=torch.tensor(
                    _padded_table(
                        parts[index],
                        parts[index].end,
                        num_blocks[index],
                        block_size,
                        null_block_id,
                    ),
                    device=device,
                ),
                start=parts[index].start,
                end=parts[index].end,
            )
            for index in chunks
        ),
    )
    padding = [0] * (-len(token_ids) % multiple)
    adapter_rows = tuple(
        AdapterRows(
            slot=part.slot,
            row_start=last_rows[index] + 1 - len(part.token_ids),
            num_rows=len(part.token_ids),
        )
        for index, part in enumerate(parts)
        if part.slot is not None
    )
    return PackedInputs(
        token_ids=torch.tensor([token_ids + padding], device=device),
        positions=torch.tensor([positions + padding], device=device),
        layout=layout,
        last_rows=tuple(last_rows),
        adapters=make_adapter_layout(
            adapter_rows,
            max_group_rows=groups.max_rows,
            group_multiple=groups.multiple,
            is_fixed=groups.is_fixed,
            device=device,
        ),
        adapter_rows=adapter_rows,
        virtual_rows=find_virtual_rows(parts, last_rows),
    )


def _decode_groups(
    parts: Sequence[ScheduledSequence],
    singles: Sequence[int],
    num_blocks: Sequence[int],
    block_size: int,
    null_block_id: int,
    device: torch.device,
) -> Iterator[DecodeGroup]:
    """Yield groups of rows; ``singles`` is sorted by table length, longest first."""
    row = 0
    while row < len(singles):
        longest = num_blocks[singles[row]]
        end = row + 1
        while end < len(singles) and num_blocks[singles[end]] >= longest * MIN_GROUP_FILL:
            end += 1
        members = singles[row:end]
        yield DecodeGroup(
            row_start=row,
            block_ids=torch.tensor(
                [
                    _padded_table(
                        parts[index], parts[index].end, longest, block_size, null_block_id
                    )
                    for index in members
                ],
                device=device,
            ),
            lengths=torch.tensor([parts[index].end for index in members], device=device),
        )
        row = end


def _row_groups(
    parts: Sequence[ScheduledSequence],
    order: Sequence[int],
    block_size: int,
    step: int,
    null_block_id: int,
    device: torch.device,
) -> Iterator[DecodeGroup]:
    """Yield a group per row; tables have whole multiples of ``step`` blocks."""
    row = 0
    for index in order:
        part = parts[index]
        for end in range(part.start + 1, part.end + 1):
            length = -(-end // (block_size * step)) * step
            table = _padded_table(part, end, length, block_size, null_block_id)
            yield DecodeGroup(
                row_start=row,
                block_ids=torch.tensor([table], device=device),
                lengths=torch.tensor([end], device=device),
            )
            row += 1


def _padded_table(
    part: ScheduledSequence, end: int, length: int, block_size: int, null_block_id: int
) -> list[int]:
    """Return the blocks that hold [0, end), with null blocks up to ``length`` entries."""
    num_used = -(-end // block_size)
    return [*part.block_ids[:num_used], *[null_block_id] * (length - num_used)]
