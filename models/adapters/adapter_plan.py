"""AdapterPlan: all of an adapter's configuration, applied to a base model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import Tensor

from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges, MethodSpec
from models.adapters.patterns import PatternMatcher
from models.adapters.saved_modules import SavedModulePlan, SavedModules
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.trainable_tokens import TrainableTokensPlan
from models.adapters.trained_tokens import TrainedTokens
from models.adapters.weights import ModelFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What a configuration says: one method, and what was trained besides.

    Attributes:
        method: the method.
        saved: modules that were trained whole.
        tokens: trained rows of the tables of tokens.
    """

    method: MethodSpec
    saved: SavedModules = dataclasses.field(default_factory=SavedModules)
    tokens: TrainedTokens = dataclasses.field(default_factory=TrainedTokens)


class AdapterPlan:
    """A configuration applied to a base model.

    Attributes:
        tensors: what the file must hold.
        num_added_tokens: tokens behind the base's vocabulary.
    """

    def __init__(self, spec: AdapterSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find all modules that are meant.

        Raises:
            AdapterFaultError: it does not fit the model, or a pattern is bad.
        """
        self._saved = SavedModulePlan(spec.saved, model)
        self._tokens = spec.tokens.plan(model)
        self._method = spec.method.plan(spec.saved.without(model), matcher)
        self.tensors: tuple[PlannedTensor, ...] = (
            *self._method.tensors,
            *self._saved.tensors,
            *self._tokens.tensors,
        )
        self.num_added_tokens = self._tokens.num_added_tokens
        if isinstance(self._method, TrainableTokensPlan):
            self.num_added_tokens = self._method.num_added_tokens
        _check_apart(
            {tensor.module for tensor in self._method.tensors if tensor.module},
            {tensor.module for tensor in self._saved.tensors},
            self._tokens.tables,
        )

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what the adapter changes.

        Args:
            tensors: by key, as planned; optional ones may be missing.

        Raises:
            AdapterFaultError: they contradict each other.
        """
        changes = self._method.build(tensors)
        besides = self._saved.build(tensors) | self._tokens.build(tensors)
        return dataclasses.replace(
            changes,
            modules={**changes.modules, **besides},
            num_added_tokens=self.num_added_tokens,
        )


def _check_apart(*parts: Iterable[str]) -> None:
    """Check that no module is changed in two ways, which PEFT does not have.

    Raises:
        AdapterFaultError: one is.
    """
    seen: set[str] = set()
    for part in map(set, parts):
        for name in sorted(part & seen):
            raise AdapterFaultError(f"it changes module '{name}' in two ways at once")
        seen |= part
