"""IA3: one vector a module, on its input or on its output."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.adapters.faults import AdapterFaultError
from models.adapters.patterns import PatternMatcher
from models.adapters.peft_config import Ia3Spec
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape

_PART = "ia3_l"


class Ia3Plan:
    """A configuration of IA3, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: Ia3Spec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules.

        Raises:
            AdapterFaultError: no module is meant, an embedding is, or a pattern is bad.
        """
        self._model = model
        self._targets = spec.targets.select(model, matcher)
        for shape in self._targets:
            if shape.is_embedding:
                raise AdapterFaultError(f"IA3 cannot change the embedding '{shape.name}'")
        self._input_scaled = frozenset(
            shape.name
            for shape in self._targets
            if _is_feedforward(spec.feedforward, shape.name, matcher)
        )
        self.tensors = tuple(map(self._plan_tensor, self._targets))

    def build(self, tensors: Mapping[str, Tensor]) -> dict[str, ModuleDelta]:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        return {
            shape.name: self._build_target(shape, tensors[f"{shape.name}.{_PART}"])
            for shape in self._targets
        }

    def _build_target(self, shape: ModuleShape, vector: Tensor) -> ModuleDelta:
        gain = vector.flatten().float()
        if shape.name in self._input_scaled:
            return ModuleDelta(input_gain=gain)
        # PEFT scales the output with the base bias in it.
        bias = self._model.bias(shape.name) * (gain - 1) if shape.has_bias else None
        return ModuleDelta(output_gain=gain, bias=bias)

    def _plan_tensor(self, shape: ModuleShape) -> PlannedTensor:
        is_input = shape.name in self._input_scaled
        vector_shape = (1, shape.num_inputs) if is_input else (shape.num_outputs, 1)
        return PlannedTensor(shape.name, _PART, vector_shape)


def _is_feedforward(names: frozenset[str] | str, module: str, matcher: PatternMatcher) -> bool:
    """Apply PEFT's rule, which for lists does not look for a dot."""
    if isinstance(names, str):
        return matcher.fullmatch(names, module) is not None
    return module.endswith(tuple(names))
