"""TableRows: rows of adapters that have a module's weight, or rows of a table, for themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.adapters.own_tables import OwnTables
from models.adapters.weights import TokenRows
from models.runner.adapter_layout import SlotRows
from models.runner.row_stability import ROW_MULTIPLE

_Table = TypeVar("_Table")


class TableRows:
    """Overwrites the rows of such adapters in a module's outputs, an adapter at a time.

    The arithmetic is the module's own, of a number of rows that occurs in steps of the base model
    too: what makes a row of that independent of its neighbours does so here. The logits of token
    rows are products of exactly ROW_MULTIPLE rows in float32. On a GPU, where independence needs a
    fixed number of rows in every product, each is of all rows of the step.

    Owner: the step thread.
    """

    def __init__(self, tables: OwnTables) -> None:
        """Use the tables of the resident adapters."""
        self._tables = tables
        self._rows: dict[tuple[int, int], Tensor] = {}

    def begin_layout(self) -> None:
        """Forget the rows of the layout before."""
        self._rows.clear()

    def replace_(
        self,
        index: int,
        module: nn.Module,
        buckets: Sequence[SlotRows],
        inputs: Tensor,
        outputs: Tensor,
        *,
        token_ids: Tensor | None,
    ) -> None:
        """Overwrite rows of a module's outputs, in place.

        Args:
            index: of the module in the store.
            module: the base model's.
            buckets: the rows of the step by slot.
            inputs: [..., K] of P rows, or ids of an embedding; of a norm of heads [1, P, H, D].
            outputs: [..., N] of the same rows.
            token_ids: what the input embedding has been given, if ``inputs`` hides a part of it.
        """
        outputs = outputs.view(-1, *outputs.shape[2 if outputs.dim() > 3 else -1 :])
        for bucket in buckets:
            for slot, weight in _used(self._tables.weights(bucket.bucket_rank, index), bucket):
                _replace_by_weight_(module, weight, self._find(bucket, slot), inputs, outputs)
            for slot, table in _used(self._tables.token_rows(bucket.bucket_rank, index), bucket):
                rows = self._find(bucket, slot)
                if isinstance(module, nn.Embedding):
                    ids = inputs if token_ids is None else token_ids
                    _replace_embeddings_(table, rows, ids, outputs)
                else:
                    logits = token_logits(table, rows, inputs)
                    outputs[rows[:, None], table.ids] = logits.to(outputs.dtype)

    def _find(self, bucket: SlotRows, slot: int) -> Tensor:
        """Return the rows of a slot, [n] int64; most modules have the same users."""
        key = (bucket.bucket_rank, slot)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = bucket.rows[bucket.row_slots == slot]
        return rows


def _used(tables: Mapping[int, _Table], bucket: SlotRows) -> list[tuple[int, _Table]]:
    return [(slot, table) for slot, table in tables.items() if slot in bucket.slots]


def _padded(rows: Tensor) -> Tensor:
    """Return rows with row 0 behind them, up to a multiple of ROW_MULTIPLE."""
    return functional.pad(rows, (0, -len(rows) % ROW_MULTIPLE), value=0)


def _replace_by_weight_(
    module: nn.Module, weight: Tensor, rows: Tensor, inputs: Tensor, outputs: Tensor
) -> None:
    """Overwrite rows of outputs [P, ...] with what the module gives with another weight."""
    other = _with_weight(module, weight)
    if weight.dim() == 1 or inputs.device.type != "cpu":
        # A norm is cheap, and of all rows it is what the base model's is.
        own = other.forward(inputs).view(outputs.shape).index_select(0, rows)
    else:
        flat = _flatten(module, inputs)
        own = other.forward(flat.index_select(0, _padded(rows))[None])[0, : len(rows)]
    outputs.index_copy_(0, rows, own.to(outputs.dtype))


def _with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """Return a module that differs from ``module`` in its weight only, to call its ``forward``.

    The module itself is never touched: other threads read its weight while adapters load.
    """
    other = copy.copy(module)
    # A shallow copy shares the mapping of its parameters.
    other.__dict__["_parameters"] = dict(vars(module)["_parameters"])
    other.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    return other


def _flatten(module: nn.Module, inputs: Tensor) -> Tensor:
    return inputs.flatten() if isinstance(module, nn.Embedding) else inputs.flatten(0, -2)


def _replace_embeddings_(table: TokenRows, rows: Tensor, ids: Tensor, outputs: Tensor) -> None:
    """Overwrite outputs [P, N] of those rows whose token the table has."""
    own_ids = ids.flatten().index_select(0, rows)
    places = torch.searchsorted(table.ids, own_ids).clamp_(max=len(table.ids) - 1)
    is_there = table.ids[places] == own_ids
    own = torch.where(is_there[:, None], table.rows[places].to(outputs.dtype), outputs[rows])
    outputs.index_copy_(0, rows, own)


def token_logits(table: TokenRows, rows: Tensor, inputs: Tensor) -> Tensor:
    """Return the logits [n, k] float32 of a table's tokens.

    Args:
        table: of k tokens.
        rows: [n] int64, which rows.
        inputs: [..., K] of the output head.
    """
    hidden = inputs.flatten(0, -2)
    if hidden.device.type != "cpu":
        return (hidden.float() @ table.rows.t()).index_select(0, rows)
    own = hidden.index_select(0, _padded(rows)).float()
    tiles = own.view(-1, ROW_MULTIPLE, own.shape[1])
    logits = torch.bmm(tiles, table.rows.t().expand(len(tiles), -1, -1))
    return logits.flatten(0, 1)[: len(rows)]
