"""Which tensors an adapter's file must hold, and whether it does.

Every planned tensor must be there and every tensor must be planned: an adapter of which a part is
dropped in silence answers almost like the base model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set

from models.adapters.faults import AdapterFaultError, shown, shown_shape
from models.adapters.tensor_file import StoredTensor
from models.adapters.weights import ModelFacts

_PREFIX = "base_model.model."
# PEFT writes what is the base's own either with the wrapper's name before it or without.
_WRAPPED_PARTS = {
    ".token_adapter.base_layer.weight": ".weight",
    ".base_layer.bias": ".bias",
    ".base_layer.weight": ".weight",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that belongs to an adapter.

    Attributes:
        module: the module that it changes; "" for one of the adapter as a whole, whose ``part`` is
            all of its name in the file.
        part: its name inside of the module, such as "lora_A.weight".
        shape: what it must be.
        is_optional: it need not be in the file.
    """

    module: str
    part: str
    shape: tuple[int, ...]
    is_optional: bool = False

    @property
    def key(self) -> str:
        """The name under which plans and builders know it."""
        return f"{self.module}.{self.part}" if self.module else self.part


def match_tensors(
    planned: Iterable[PlannedTensor], stored: Mapping[str, StoredTensor], model: ModelFacts
) -> dict[str, str]:
    """Return the name in the file of every planned tensor that is there, by its key.

    Raises:
        AdapterFaultError: a tensor is missing, has another shape or is not planned.
    """
    if not stored:
        raise AdapterFaultError("its file holds no tensors")
    plan = {tensor.key: tensor for tensor in planned}
    names = _names_by_key(stored, {key for key, tensor in plan.items() if not tensor.module})
    # Shapes first: files for another base model differ in all three ways, and this one tells it.
    for key, name in names.items():
        if key in plan and stored[name].shape != plan[key].shape:
            raise AdapterFaultError(_explain_shape(plan[key], stored[name]))
    for key, name in names.items():
        if key not in plan:
            raise AdapterFaultError(_explain_surplus(key, name, model))
    required = [tensor.key for tensor in plan.values() if not tensor.is_optional]
    missing = [key for key in required if key not in names]
    if missing:
        raise AdapterFaultError(
            f"its file lacks {len(missing)} of {len(required)} tensors, the first being "
            f"'{shown(missing[0])}'"
        )
    return names


def _names_by_key(stored: Mapping[str, StoredTensor], bare: Set[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in stored:
        if name in bare:
            names[name] = name
            continue
        if not name.startswith(_PREFIX):
            raise AdapterFaultError(f"the tensor '{shown(name)}' is not named as PEFT names them")
        key = name.removeprefix(_PREFIX)
        for wrapped, plain in _WRAPPED_PARTS.items():
            if key.endswith(wrapped):
                key = key.removesuffix(wrapped) + plain
                break
        if key in names:
            raise AdapterFaultError(f"the tensor '{shown(key)}' is there under two names")
        names[key] = name
    return names


def _explain_shape(wanted: PlannedTensor, stored: StoredTensor) -> str:
    owner = f"module '{shown(wanted.module)}': " if wanted.module else ""
    return (
        f"{owner}{wanted.part} is {shown_shape(stored.shape)}, but this "
        f"model and the adapter's configuration need {shown_shape(wanted.shape)}"
    )


def _explain_surplus(key: str, name: str, model: ModelFacts) -> str:
    parents = (key.rpartition(".")[0], key.rpartition(".")[0].rpartition(".")[0])
    if any(parent in model.modules for parent in parents):
        return f"its configuration does not account for the tensor '{shown(name)}'"
    return (
        f"the tensor '{shown(name)}' belongs to no module of this model that an adapter can change"
    )
