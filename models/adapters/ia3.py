"""IA3: one vector a module, on its input or on its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import TargetRules, read_targets
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape

_PART = "ia3_l"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ia3Spec:
    """What a configuration of IA3 says.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the modules it changes.
        feedforward: ends of the names (not only after a dot), or one pattern for the full name,
            of targets whose input is scaled instead of their output.
    """

    base_name: str
    targets: TargetRules
    feedforward: frozenset[str] | str

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> Ia3Plan:
        """Apply it to a base model; raises as ``Ia3Plan`` does."""
        return Ia3Plan(self, model, matcher)


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

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        return AdapterChanges(
            modules={
                shape.name: self._build_target(shape, tensors[f"{shape.name}.{_PART}"])
                for shape in self._targets
            }
        )

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


def read_ia3_spec(fields: ConfigFields) -> Ia3Spec:
    """Take IA3's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore("init_ia3_weights")
    fields.flag("fan_in_fan_out")
    # PEFT would take them from a table by architecture, but saves what it took.
    if not fields.is_given("feedforward_modules"):
        raise AdapterFaultError("its feedforward_modules are not given")
    spec = Ia3Spec(
        base_name=fields.text("base_model_name_or_path"),
        targets=TargetRules(
            targets=read_targets(fields), excluded=fields.names_or_pattern("exclude_modules")
        ),
        feedforward=fields.names_or_pattern("feedforward_modules"),
    )
    fields.finish()
    return spec


def _is_feedforward(names: frozenset[str] | str, module: str, matcher: PatternMatcher) -> bool:
    """Apply PEFT's rule, which for lists does not look for a dot."""
    if isinstance(names, str):
        return matcher.fullmatch(names, module) is not None
    return module.endswith(tuple(names))
