"""VirtualRows: which rows of a step are virtual tokens, and what these rows get instead of ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.adapters.ledger import Slot
from models.adapters.store import AdapterStore
from models.adapters.virtual_tokens import (
    KeyValueShape,
    VirtualEmbeddings,
    VirtualKeyValues,
    VirtualTokenFacts,
    VirtualTokens,
)
from models.attention.layout import GivenKeyValues, StepLayout
from models.kv_cache.store import LayerShape
from models.runner.cached_keys import are_cached_keys_attended
from models.scheduling.step_plan import ScheduledSequence


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualRows:
    """Rows [row_start, row_start + num_rows) are virtual tokens of one adapter.

    Attributes:
        slot: of the adapter.
        row_start: first row.
        start: which of its virtual tokens that is; the others follow.
        num_rows: how many, at least 1.
    """

    slot: Slot
    row_start: int
    start: int
    num_rows: int

    @property
    def rows(self) -> slice:
        """The rows."""
        return slice(self.row_start, self.row_start + self.num_rows)

    @property
    def tokens(self) -> slice:
        """The virtual tokens that they are."""
        return slice(self.start, self.start + self.num_rows)


def find_virtual_rows(
    parts: Sequence[ScheduledSequence], last_rows: Sequence[int]
) -> tuple[VirtualRows, ...]:
    """Return the rows of a step that are virtual tokens; most steps have none.

    Args:
        parts: of the step.
        last_rows: the row of each part's last token.
    """
    found = []
    for part, last_row in zip(parts, last_rows, strict=True):
        num_rows = min(part.end, part.num_virtual_tokens) - part.start
        if num_rows > 0:
            assert part.slot is not None
            row_start = last_row + 1 - len(part.token_ids)
            found.append(VirtualRows(part.slot, row_start, part.start, num_rows))
    return tuple(found)


def virtual_facts_of(
    model: PreTrainedModel, layers: Sequence[LayerShape], *, max_num_tokens: int
) -> VirtualTokenFacts:
    """Return what virtual tokens of a model must look like.

    Args:
        model: the base model.
        layers: its attention layers.
        max_num_tokens: most virtual tokens that are served.
    """
    first = layers[0]
    is_uniform = first.key_width == first.value_width and set(layers) == {first}
    can_be_given = is_uniform and are_cached_keys_attended(model)
    return VirtualTokenFacts(
        max_num_tokens=max_num_tokens,
        embedding_width=model.get_input_embeddings().weight.shape[1],
        key_values=KeyValueShape(len(layers), first.num_kv_heads, first.key_width)
        if can_be_given
        else None,
    )


class VirtualTokenRows:
    """Gives rows of virtual tokens their adapters' vectors, or their keys and values.

    Vectors replace the outputs of the embedding module, by a hook on it. Keys and values go to the
    attention backend with the layout: such rows run through the model like any, and what it makes
    of them is not stored.

    Owner: the step thread.
    """

    def __init__(self, model: PreTrainedModel, store: AdapterStore) -> None:
        """Attach to ``model``; without virtual rows nothing changes.

        Args:
            model: the base model.
            store: of the resident adapters.
        """
        self._store = store
        self._dtype = model.dtype
        self._embedded: list[tuple[VirtualRows, Tensor]] = []
        model.get_input_embeddings().register_forward_hook(self._replace_)

    def begin_step(self, rows: Sequence[VirtualRows], layout: StepLayout) -> StepLayout:
        """Take the virtual rows of the step whose forward pass follows.

        Args:
            rows: those of the step; their slots are filled.
            layout: of the step.

        Returns:
            The layout, with the keys and values that are given.
        """
        self._embedded = []
        given = []
        for each in rows:
            virtual = self._virtual_tokens_of(each)
            if isinstance(virtual, VirtualEmbeddings):
                self._embedded.append((each, virtual.embeddings[each.tokens]))
            else:
                given.append((each, virtual))
        if not given:
            return layout
        return dataclasses.replace(layout, given=self._give(given, layout))

    def _virtual_tokens_of(self, rows: VirtualRows) -> VirtualTokens:
        virtual = self._store.virtual_tokens(rows.slot)
        assert virtual is not None
        return virtual

    def _give(
        self, given: Sequence[tuple[VirtualRows, VirtualKeyValues]], layout: StepLayout
    ) -> GivenKeyValues:
        keys = [virtual.keys[:, :, rows.tokens] for rows, virtual in given]
        values = [virtual.values[:, :, rows.tokens] for rows, virtual in given]
        return GivenKeyValues(
            slots=torch.cat([layout.slots[rows.rows] for rows, _ in given]),
            keys=torch.cat(keys, dim=2).to(self._dtype),
            values=torch.cat(values, dim=2).to(self._dtype),
        )

    def _replace_(self, module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:  # noqa: ARG002
        """Overwrite the outputs [1, P, E] of the embedding module, in place."""
        for rows, embeddings in self._embedded:
            outputs[0, rows.rows] = embeddings.to(outputs.dtype)
