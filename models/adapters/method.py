"""What every PEFT method has here: a specification, and a plan of its tensors on a base model.

A method is one file and one line in ``peft_config``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from models.adapters.patterns import PatternMatcher
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.virtual_tokens import VirtualTokens
from models.adapters.weights import ModelFacts, ModuleDelta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterChanges:
    """What an adapter changes of its base model.

    Attributes:
        modules: what happens to each module, by name.
        virtual_tokens: what stands before every prompt; None is nothing.
        num_added_tokens: tokens behind the base's vocabulary, whose rows are among ``modules``.
    """

    modules: Mapping[str, ModuleDelta]
    virtual_tokens: VirtualTokens | None = None
    num_added_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        num_bytes = sum(delta.num_bytes for delta in self.modules.values())
        return num_bytes + (0 if self.virtual_tokens is None else self.virtual_tokens.num_bytes)

    @property
    def changes_nothing(self) -> bool:
        """Whether the base model answers the same."""
        if self.virtual_tokens is not None:
            return False
        return all(delta.changes_nothing for delta in self.modules.values())


class MethodPlan(Protocol):
    """A configuration applied to a base model."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]:
        """What the file must hold."""
        ...

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what the adapter changes.

        Args:
            tensors: by key, as planned; optional ones may be missing.
        """
        ...


class MethodSpec(Protocol):
    """What a configuration of one method says. Immutable; needs no weights."""

    @property
    def base_name(self) -> str:
        """The base model it was trained on, "" if the file does not tell."""
        ...

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model at all, sorted."""
        ...

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> MethodPlan:
        """Find the modules that are meant, and the tensors that this needs.

        Raises:
            AdapterFaultError: it does not fit the model, or a pattern is bad.
        """
        ...
