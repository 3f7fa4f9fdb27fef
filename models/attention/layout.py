"""StepLayout: where the packed tokens of a step belong, as tensors that all layers share."""

from __future__ import annotations

import dataclasses

from torch import Tensor

# Block tables are padded to whole multiples of this many tokens: with a shorter tail a matrix
# library may sum the last keys another way (AMX does, once in some 10^5 elements).
KEY_MULTIPLE_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [row_start, row_start + B) of the packed step: one token of each of B sequences.

    Attributes:
        row_start: first row.
        block_ids: [B, n] int64 block tables, padded with the null block.
        lengths: [B] int64 tokens to attend to, the row's own included.
    """

    row_start: int
    block_ids: Tensor
    lengths: Tensor

    @property
    def num_rows(self) -> int:
        """B."""
        return self.block_ids.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows [row_start, row_start + end - start): tokens [start, end) of one sequence.

    Attributes:
        row_start: first row.
        block_ids: [n] int64, the blocks that cover [0, end), padded with the null block.
        start: position of the first token of the chunk.
        end: position behind the last one.
    """

    row_start: int
    block_ids: Tensor
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class GivenKeyValues:
    """Keys and values that an adapter brings for some rows, instead of those the model computes.

    Attributes:
        slots: [n] int64, where they are stored; each is the slot of a row of the step.
        keys: [layers, H, n, Dk], the pool's dtype, rotated or not as the adapter has them.
        values: [layers, H, n, Dv].
    """

    slots: Tensor
    keys: Tensor
    values: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class StepLayout:
    """All of one step.

    Attributes:
        num_tokens: T, without padding rows; padding rows are behind them and store nothing.
        slots: [T] int64, where each row's key and value are stored.
        fresh_block_ids: [m] int64, blocks whose first slot this step writes; None without any.
        decodes: groups of single-token rows.
        prefills: chunks.
        given: keys and values of rows whose own are not stored; None without any.
    """

    num_tokens: int
    slots: Tensor
    fresh_block_ids: Tensor | None
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSegment, ...]
    given: GivenKeyValues | None = None
