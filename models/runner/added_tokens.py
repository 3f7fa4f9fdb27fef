"""AddedTokens: tokens of adapters that stand behind the base model's vocabulary.

The base's embedding does not see their ids. Where the output head has rows of such adapters, its
logits get columns for them, as many as the adapter with the most of them needs; a row has -inf in
those that are not its adapter's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from models.adapters.own_tables import OwnTables
from models.runner.adapter_layout import SlotRows
from models.runner.table_rows import token_logits


class AddedTokens:
    """Hides added tokens from the base model, and gives them logits.

    Attributes:
        token_ids: of the forward pass that runs, as they were before ``hide``; None before it.

    Owner: the step thread.
    """

    def __init__(self, tables: OwnTables) -> None:
        """Use the tables of the resident adapters."""
        self._tables = tables
        self.token_ids: Tensor | None = None
        self._columns: list[tuple[Tensor, Tensor]] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self.token_ids = None
        self._columns.clear()

    def hide(self, token_ids: Tensor, num_tokens: int) -> Tensor:
        """Return token ids as an embedding of ``num_tokens`` may see them."""
        self.token_ids = token_ids
        return token_ids.where(token_ids < num_tokens, 0)

    def widen(self, buckets: Sequence[SlotRows], inputs: Tensor, logits: Tensor) -> Tensor:
        """Return logits of the output head with columns for the step's added tokens.

        Args:
            buckets: the rows of the head by slot.
            inputs: [..., K] of the head.
            logits: [..., V].
        """
        num_added = max(
            self._tables.num_added_tokens(bucket.bucket_rank, slot)
            for bucket in buckets
            for slot in bucket.slots
        )
        if not num_added:
            return logits
        num_tokens = logits.shape[-1]
        wide = functional.pad(logits, (0, num_added))
        flat = wide.view(-1, wide.shape[-1])
        for bucket in buckets:
            for slot, table in self._tables.added_rows(bucket.bucket_rank).items():
                if slot in bucket.slots:
                    rows = bucket.rows[bucket.row_slots == slot]
                    flat[rows[:, None], table.ids] = token_logits(table, rows, inputs).to(
                        wide.dtype
                    )
                    self._columns.append((rows[:, None], table.ids - num_tokens))
        return wide

    def mask_(self, logits: Tensor, num_tokens: int) -> None:
        """Give every row -inf for the added tokens that are not its adapter's, in place.

        Args:
            logits: [P, V + added], whatever the model did to what the head gave.
            num_tokens: V.
        """
        added = logits[:, num_tokens:]
        is_own = torch.zeros_like(added, dtype=torch.bool)
        for rows, columns in self._columns:
            is_own[rows, columns] = True
        added.masked_fill_(~is_own, -math.inf)
