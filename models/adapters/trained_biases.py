"""Biases of the base model that an adapter has trained besides: those of its file replace them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape


class TrainedBiases(enum.StrEnum):
    """Whose biases were trained."""

    NONE = "none"
    ALL = "all"
    TARGETS = "targets"


class TrainedBiasPlan:
    """The trained biases of one adapter on a base model.

    Attributes:
        tensors: what the file must hold for them.
    """

    def __init__(
        self, trained: TrainedBiases, targets: Sequence[ModuleShape], model: ModelFacts
    ) -> None:
        """Find the biases.

        Args:
            trained: whose biases these are.
            targets: the modules that the adapter changes.
            model: the base model.
        """
        shapes: Sequence[ModuleShape] = ()
        if trained == TrainedBiases.TARGETS:
            shapes = targets
        elif trained == TrainedBiases.ALL:
            shapes = tuple(model.modules.values())
        self._model = model
        self.tensors = tuple(
            PlannedTensor(shape.name, "bias", (shape.num_outputs,))
            for shape in shapes
            if shape.has_bias
        )

    def add_to(
        self, deltas: Mapping[str, ModuleDelta], tensors: Mapping[str, Tensor]
    ) -> dict[str, ModuleDelta]:
        """Return ``deltas`` with what the trained biases add to those of the base.

        Args:
            deltas: by module; in which order stays.
            tensors: by key, as planned.
        """
        changed = dict(deltas)
        for planned in self.tensors:
            bias = tensors[planned.key].float() - self._model.bias(planned.module)
            delta = changed.get(planned.module, ModuleDelta())
            if delta.bias is not None:
                bias = bias + delta.bias
            changed[planned.module] = dataclasses.replace(delta, bias=bias)
        return changed


def read_trained_biases(fields: ConfigFields, method: str) -> TrainedBiases:
    """Take the option "bias".

    Args:
        fields: of the configuration.
        method: what stands before "_only", such as "lora".

    Raises:
        AdapterFaultError: it is none of the three.
    """
    choices = {
        "none": TrainedBiases.NONE,
        "all": TrainedBiases.ALL,
        f"{method}_only": TrainedBiases.TARGETS,
    }
    name = fields.text("bias") or "none"
    if name not in choices:
        raise AdapterFaultError(f"its bias must be none, all or {method}_only, not '{shown(name)}'")
    return choices[name]
