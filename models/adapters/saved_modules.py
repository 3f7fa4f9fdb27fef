"""Modules that an adapter has trained whole (``modules_to_save``): the file's replace the base's.

Any method may have them besides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape


@dataclasses.dataclass(frozen=True, slots=True)
class SavedModules:
    """Which modules were trained whole.

    Attributes:
        names: ends of the names of modules, or of modules around them; not only after a dot.
    """

    names: tuple[str, ...] = ()

    def select(self, model: ModelFacts) -> tuple[ModuleShape, ...]:
        """Return the modules that were trained whole, in the model's order."""
        return tuple(shape for shape in model.modules.values() if self._has(shape.name))

    def without(self, model: ModelFacts) -> ModelFacts:
        """Return the model as the targets of the method besides see it.

        There PEFT looks for whole parts of a name.
        """
        rest = {
            name: shape
            for name, shape in model.modules.items()
            if not any(f".{saved}." in f".{name}." for saved in self.names)
        }
        return dataclasses.replace(model, modules=rest)

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the names that mean no module of the model, sorted."""
        return tuple(
            sorted(
                saved
                for saved in self.names
                if not any(map(SavedModules((saved,))._has, model.modules))
            )
        )

    def _has(self, module: str) -> bool:
        return any(around.endswith(self.names) for around in _around(module))


class SavedModulePlan:
    """The modules that one adapter has trained whole, on a base model.

    Attributes:
        tensors: what the file must hold for them.
    """

    def __init__(self, saved: SavedModules, model: ModelFacts) -> None:
        """Find the modules."""
        self._model = model
        self._shapes = saved.select(model)
        self.tensors = tuple(tensor for shape in self._shapes for tensor in _plan_tensors(shape))

    def build(self, tensors: Mapping[str, Tensor]) -> dict[str, ModuleDelta]:
        """Return what happens to each module; one that is the base's stays away.

        Args:
            tensors: by key, as planned.
        """
        deltas = {}
        for shape in self._shapes:
            delta = ModuleDelta(
                weight=self._find_weight(shape, tensors[f"{shape.name}.weight"]),
                bias=self._find_bias(shape, tensors),
            )
            if any(True for _ in delta.tensors):
                deltas[shape.name] = delta
        return deltas

    def _find_weight(self, shape: ModuleShape, saved: Tensor) -> Tensor | None:
        """Return the saved weight, None if it is the base's: PEFT copies it at the start."""
        base = self._model.weight(shape.name)
        if shape.is_transposed or shape.is_embedding:
            base = base.t()
        # Base weights in half precision are exact in float32, and so is the way back.
        is_same = torch.equal(saved.to(shape.weight_dtype), base.to(shape.weight_dtype))
        return None if is_same else saved

    def _find_bias(self, shape: ModuleShape, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if not shape.has_bias:
            return None
        bias = tensors[f"{shape.name}.bias"].float() - self._model.bias(shape.name)
        return bias if bias.any() else None


def read_saved_modules(fields: ConfigFields) -> SavedModules:
    """Take the option "modules_to_save".

    Raises:
        AdapterFaultError: it is no list of names.
    """
    return SavedModules(tuple(name for name in fields.texts("modules_to_save") if name))


def _plan_tensors(shape: ModuleShape) -> Iterable[PlannedTensor]:
    yield PlannedTensor(shape.name, "weight", shape.table_shape)
    if shape.has_bias:
        yield PlannedTensor(shape.name, "bias", (shape.num_outputs,))


def _around(module: str) -> Iterable[str]:
    """Return the name of a module and those of the modules around it."""
    parts = module.split(".")
    return (".".join(parts[:stop]) for stop in range(1, len(parts) + 1))
