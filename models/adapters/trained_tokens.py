"""Rows of the tables of tokens that an adapter has trained: the file's replace the base's.

Tokens behind the base's vocabulary were added before training. PEFT then saves the whole tables
too if it knows the base model: rows that were not trained are taken from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape, TokenRows

TRAINED_ROWS = "trainable_tokens_delta"
# An adapter may add so many tokens to the base's vocabulary.
MAX_NUM_ADDED_TOKENS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Which tokens of which tables were trained, as LoRA has it besides.

    Attributes:
        by_table: token ids by the end of a table's name (not only after a dot); "" is the input
            embedding.
    """

    by_table: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def plan(self, model: ModelFacts) -> TrainedTokenPlan:
        """Find the tables.

        Raises:
            AdapterFaultError: a name means something else than a table of tokens, or too many
                tokens were added.
        """
        own = {
            shape.name: token_ids
            for name, token_ids in self.by_table.items()
            for shape in _find_tables(name, model)
        }
        tied = own.get(model.input_embedding or "")
        if not model.is_head_tied or tied is None or model.output_head is None:
            return TrainedTokenPlan(own, model, part=f"token_adapter.{TRAINED_ROWS}")
        head = model.output_head
        # Different tokens untie the tables, equal ones are saved with the embedding alone.
        is_untied = own.get(head, tied) != tied
        if not is_untied:
            own.pop(head, None)
        return TrainedTokenPlan(
            own,
            model,
            part=f"token_adapter.{TRAINED_ROWS}",
            is_head_the_embedding=not is_untied,
        )


class TrainedTokenPlan:
    """The trained tokens of one adapter on a base model.

    Attributes:
        tensors: what the file must hold for them.
        num_added_tokens: behind the base's vocabulary.
    """

    def __init__(
        self,
        by_module: Mapping[str, tuple[int, ...]],
        model: ModelFacts,
        *,
        part: str,
        is_head_the_embedding: bool = False,
    ) -> None:
        """Check the tokens.

        Args:
            by_module: token ids by the full name of a table.
            model: the base model.
            part: the name of the tensor inside of its module.
            is_head_the_embedding: the output head gets the rows of the input embedding, which
                the file may repeat.

        Raises:
            AdapterFaultError: a table cannot have such rows, or too many tokens were added.
        """
        self._model = model
        self._part = part
        self._tables = dict(by_module)
        self._copy = model.output_head if is_head_the_embedding else None
        for name in sorted(self._tables):
            _check_table(model.modules[name], model)
        self.num_added_tokens = self._count_added()
        for name in sorted(self.tables):
            _check_table(model.modules[name], model)
        self.tensors = tuple(self._plan_tensors())

    @property
    def tables(self) -> frozenset[str]:
        """Names of the modules that get rows."""
        return frozenset(self._names()) | ({self._copy} if self._copy is not None else set())

    def build(self, tensors: Mapping[str, Tensor]) -> dict[str, ModuleDelta]:
        """Return what happens to each table.

        Args:
            tensors: by key, as planned.

        Raises:
            AdapterFaultError: rows of tied tables differ.
        """
        found = {name: self._find_rows(name, tensors) for name in self._names()}
        embedding, head = self._model.input_embedding, self._copy
        if head is not None and embedding is not None:
            found[head] = found[embedding]
            rows = tensors[f"{embedding}.{self._part}"]
            if not torch.equal(rows, tensors.get(f"{head}.{self._part}", rows)):
                raise AdapterFaultError(
                    f"its trained tokens differ at '{embedding}' and '{head}', which are tied"
                )
        deltas = {}
        for name, table in found.items():
            scale = self._model.modules[name].output_scale
            if table is not None and scale != 1:
                table = dataclasses.replace(table, rows=table.rows.float() * scale)
            # A head without rows of added tokens still has their columns.
            deltas[name] = ModuleDelta(token_rows=table)
        return deltas

    def _names(self) -> list[str]:
        """Return the tables that get rows of their own, perhaps of added tokens only."""
        if not self.num_added_tokens:
            return list(self._tables)
        both = (self._model.input_embedding, self._model.output_head)
        return [name for name in both if name is not None and name != self._copy]

    def _find_rows(self, name: str, tensors: Mapping[str, Tensor]) -> TokenRows | None:
        """Return the rows of a table, in the order of their ids; None if it has none.

        Without a row at the output head an added token is never drawn.
        """
        token_ids = list(self._tables.get(name, ()))
        parts = [tensors[f"{name}.{self._part}"]] if token_ids else []
        num_tokens = _num_tokens(self._model.modules[name])
        added = range(num_tokens, num_tokens + self.num_added_tokens)
        untrained = sorted(set(added) - set(token_ids))
        saved = tensors.get(f"{name}.weight")
        if untrained and saved is not None:
            parts.append(saved[untrained])
            token_ids += untrained
        elif untrained and name == self._model.input_embedding:
            raise AdapterFaultError(
                f"its file lacks the row of the added token {untrained[0]} at '{name}'"
            )
        if not token_ids:
            return None
        ids, order = torch.tensor(token_ids).sort()
        return TokenRows(
            ids=ids, rows=torch.cat([part.to(parts[0].dtype) for part in parts])[order]
        )

    def _count_added(self) -> int:
        if not any(self._tables.values()):
            return 0
        highest = max(max(token_ids) for token_ids in self._tables.values() if token_ids)
        both = {name for name in (self._model.input_embedding, self._model.output_head) if name}
        shapes = [self._model.modules[name] for name in both if name in self._model.modules]
        num_tokens = min(map(_num_tokens, shapes))
        num_added = highest + 1 - num_tokens
        if num_added <= 0:
            return 0
        is_one_vocabulary = len(shapes) == 2 and len(set(map(_num_tokens, shapes))) == 1
        if not is_one_vocabulary or num_added > MAX_NUM_ADDED_TOKENS:
            raise AdapterFaultError(
                f"its token {highest} is too far behind the vocabulary of {num_tokens} tokens"
            )
        return num_added

    def _plan_tensors(self) -> Iterator[PlannedTensor]:
        for name, token_ids in self._tables.items():
            yield PlannedTensor(name, self._part, (len(token_ids), _width(self._model, name)))
        if self._copy is not None:
            embedding = self._model.input_embedding
            assert embedding is not None
            shape = (len(self._tables[embedding]), _width(self._model, self._copy))
            yield PlannedTensor(self._copy, self._part, shape, is_optional=True)


def read_trained_tokens(fields: ConfigFields) -> TrainedTokens:
    """Take LoRA's option "trainable_token_indices".

    Raises:
        AdapterFaultError: it is neither a list of token ids nor such lists by module.
    """
    name = "trainable_token_indices"
    value = fields.raw(name, default={})
    by_table = value if isinstance(value, dict) else {"": value}
    return TrainedTokens(
        {table: as_token_ids(name, ids) for table, ids in by_table.items() if ids != []}
    )


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of token ids.

    Args:
        name: of the option.
        value: of the option.

    Raises:
        AdapterFaultError: it is something else, or one is there twice.
    """
    is_list = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not is_list or len(set(value)) < len(value):
        raise AdapterFaultError(f"its {name} must be a list of token ids, not {shown(repr(value))}")
    return tuple(value)


def _find_tables(name: str, model: ModelFacts) -> list[ModuleShape]:
    if not name:
        found = [model.modules[each] for each in (model.input_embedding,) if each is not None]
    else:
        found = [shape for shape in model.modules.values() if shape.name.endswith(name)]
    if not found:
        meant = shown(name or "the input embedding")
        raise AdapterFaultError(f"its trainable_token_indices name '{meant}', not in this model")
    return found


def _check_table(shape: ModuleShape, model: ModelFacts) -> None:
    if shape.name not in (model.input_embedding, model.output_head):
        raise AdapterFaultError(f"'{shape.name}' is no table of tokens, and has no trainable ones")
    if shape.has_bias:
        # PEFT leaves the bias out then.
        raise AdapterFaultError(f"trainable tokens cannot be used on '{shape.name}' with its bias")


def _num_tokens(shape: ModuleShape) -> int:
    return shape.num_inputs if shape.is_embedding else shape.num_outputs


def _width(model: ModelFacts, name: str) -> int:
    shape = model.modules[name]
    return shape.num_outputs if shape.is_embedding else shape.num_inputs
