"""Attention by FlashAttention's kernel for sequences of unequal lengths, which reads block tables.

One call a layer, for decodes and chunks together; keys and values stay where they are in the pool.
The kernel is torch's own (``torch.nn.attention.varlen``), for CUDA and half precision.

What its source and its issues say, for FlashAttention 2, which torch brings along:

- a block has a multiple of BLOCK_MULTIPLE_TOKENS tokens; heads have at most MAX_WIDTH elements, a
  multiple of WIDTH_MULTIPLE; only the last dimension must be contiguous, so that a permuted view
  of the head-major pool will do;
- ``cu_seq_k`` must be given beside ``seqused_k``, which is the one that counts;
- more than one split of the keys gave wrong rows in paged calls of some versions (pytorch issue
  194167: rows that are never written), so ``num_splits`` is 1 always. That is also what makes a
  row's result independent of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen as torch_varlen

from models.attention.backend import check_keywords, layer_index
from models.attention.layer_step import AttentionOptions, store_
from models.attention.layout import StepLayout
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool

BLOCK_MULTIPLE_TOKENS = 256
MAX_WIDTH = 256
WIDTH_MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)

_EVERY_KEY = (-1, -1)

# With the signature of torch.nn.attention.varlen.varlen_attn.
VarlenFunction = Callable[..., Any]
TORCH_VARLEN: VarlenFunction = torch_varlen.varlen_attn


@dataclasses.dataclass(frozen=True, slots=True)
class _Segments:
    """The rows of a step as the kernel wants them: N sequences of one or more rows.

    Attributes:
        query_starts: [N + 1] int32, first row of each.
        key_starts: [N + 1] int32, where each one's keys would lie if tables were laid out flat.
        lengths: [N] int32, keys of each, those of its own rows included.
        tables: [N, n] int32, padded with the null block.
        longest_query: most rows of a sequence.
        longest_key: no sequence has more keys.
    """

    query_starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    tables: Tensor
    longest_query: int
    longest_key: int


class VarlenAttention:
    """See the module's text. Owner: the step thread."""

    def __init__(
        self,
        pool: KVCachePool,
        *,
        is_batch_invariant: bool,
        attend: VarlenFunction = TORCH_VARLEN,
    ) -> None:
        """Attend over ``pool``.

        Args:
            pool: keys and values in half precision, keys as wide as values.
            is_batch_invariant: give up what is faster for some steps only: a row then takes the
                same kernel in any company.
            attend: the kernel.
        """
        self.is_row_independent = is_batch_invariant
        self._pool = pool
        self._attend = attend
        self._layout: StepLayout | None = None
        self._segments: _Segments | None = None

    def begin_step(self, layout: StepLayout) -> None:
        """Take the layout of the step whose forward pass follows."""
        self._layout = layout
        self._segments = self._plan(layout)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - None by construction, see attach
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Store ``key`` and ``value``, attend, and return ``([1, T, H, Dv], None)``.

        Raises:
            ConfigError: the layer needs what the kernel has not.
        """
        check_keywords(keywords)
        layout, segments = self._layout, self._segments
        assert layout is not None
        assert segments is not None
        options = AttentionOptions.of(keywords, query.shape[-1])
        _check_options(options)
        layer = layer_index(module)
        store_(self._pool, layer, layout, key, value)
        _, num_heads, num_rows, width = query.shape
        mixed = self._attend(
            query[0, :, : layout.num_tokens].transpose(0, 1).contiguous(),
            self._pool.keys[layer].permute(1, 2, 0, 3),  # [N + 1, S, Hkv, D]
            self._pool.values[layer].permute(1, 2, 0, 3),
            segments.query_starts,
            segments.key_starts,
            segments.longest_query,
            segments.longest_key,
            scale=options.scaling,
            window_size=self._window(options, segments),
            enable_gqa=num_heads != key.shape[1],
            seqused_k=segments.lengths,
            block_table=segments.tables,
            num_splits=1,
        )
        if num_rows == layout.num_tokens:
            return mixed[None], None
        output = query.new_zeros(1, num_rows, num_heads, width)
        output[0, : layout.num_tokens] = mixed
        return output, None

    def _window(self, options: AttentionOptions, segments: _Segments) -> tuple[int, int]:
        """Return how many keys to the left and right of its own a row attends to; -1 is all."""
        if options.sliding_window is not None:
            return options.sliding_window - 1, 0
        if segments.longest_query == 1 and not self.is_row_independent:
            # The last row of a sequence has no key to its right. Told so, the kernel takes the
            # query heads that share a kv head together and reads their keys once.
            return _EVERY_KEY
        return -1, 0

    def _plan(self, layout: StepLayout) -> _Segments:
        tables = [*_tables(layout)]
        num_blocks = max(table.shape[1] for table in tables)
        padded = torch.cat(
            [
                functional.pad(
                    table, (0, num_blocks - table.shape[1]), value=self._pool.null_block_id
                )
                for table in tables
            ]
        )
        ends = torch.tensor(
            [segment.end for segment in layout.prefills],
            dtype=torch.int64,
            device=layout.slots.device,
        )
        lengths = torch.cat([*(group.lengths for group in layout.decodes), ends])
        starts = [0]
        for group in layout.decodes:
            starts.extend(range(group.row_start + 1, group.row_start + group.num_rows + 1))
        starts.extend(segment.row_start + segment.num_rows for segment in layout.prefills)
        assert starts[-1] == layout.num_tokens
        plan = self._pool.plan
        num_keys = num_blocks * plan.block_size_tokens
        device = layout.slots.device
        return _Segments(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            key_starts=torch.arange(len(starts), dtype=torch.int32, device=device) * num_keys,
            lengths=lengths.to(torch.int32),
            tables=padded.to(torch.int32),
            longest_query=max((each.num_rows for each in layout.prefills), default=1),
            # A bound is enough, and the kernel only compares windows with it. One that depends on
            # the company could choose another kernel for a row.
            longest_key=plan.num_tokens if self.is_row_independent else num_keys,
        )


def _tables(layout: StepLayout) -> Iterator[Tensor]:
    """Yield block tables [B, n] in the order of the rows."""
    for group in layout.decodes:
        yield group.block_ids
    for segment in layout.prefills:
        yield segment.block_ids[None]


def _check_options(options: AttentionOptions) -> None:
    for name, option in (("a soft cap", options.softcap), ("sinks", options.sinks)):
        if option is not None:
            raise ConfigError("attention_backend", f"varlen cannot attend with {name}")
