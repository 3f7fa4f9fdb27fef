"""LoRA and DoRA: which tensors they have, and what these do to a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from models.adapters.faults import AdapterFaultError
from models.adapters.patterns import PatternMatcher
from models.adapters.peft_config import LoraSpec, TrainedBiases
from models.adapters.targets import find_value
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """One changed module: its rank, and the factor on its B."""

    shape: ModuleShape
    rank: int
    scale: float

    @property
    def a_key(self) -> str:
        part = "lora_embedding_A" if self.shape.is_embedding else "lora_A.weight"
        return f"{self.shape.name}.{part}"

    @property
    def b_key(self) -> str:
        part = "lora_embedding_B" if self.shape.is_embedding else "lora_B.weight"
        return f"{self.shape.name}.{part}"


class LoraPlan:
    """A configuration of LoRA or DoRA, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: LoraSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules and their ranks.

        Raises:
            AdapterFaultError: no module is meant, a rank is over the limit, or a pattern is bad.
        """
        self._spec = spec
        self._model = model
        self._targets = tuple(
            _plan_target(spec, shape, model.max_rank, matcher)
            for shape in spec.targets.select(model, matcher)
        )
        self._trained_biases = tuple(self._find_trained_biases())
        self.tensors = tuple(self._plan_tensors())

    def build(self, tensors: Mapping[str, Tensor]) -> dict[str, ModuleDelta]:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        biases = {
            shape.name: tensors[f"{shape.name}.bias"].float() - self._model.bias(shape.name)
            for shape in self._trained_biases
        }
        deltas = {}
        for target in self._targets:
            name = target.shape.name
            deltas[name] = self._build_target(target, tensors, biases.pop(name, None))
        deltas.update((name, ModuleDelta(bias=bias)) for name, bias in biases.items())
        return deltas

    def _build_target(
        self, target: _Target, tensors: Mapping[str, Tensor], bias: Tensor | None
    ) -> ModuleDelta:
        name = target.shape.name
        lora_a = tensors[target.a_key]
        lora_b = tensors[target.b_key].float() * target.scale
        output_gain = None
        if self._spec.has_magnitudes:
            changed = torch.addmm(self._model.weight(name), lora_b, lora_a.float())
            norms = torch.linalg.vector_norm(changed, dim=1)
            output_gain = tensors[f"{name}.lora_magnitude_vector"].float() / norms
        if self._spec.has_output_bias:
            own_bias = tensors[f"{name}.lora_B.bias"].float() * target.scale
            bias = own_bias if bias is None else bias + own_bias
        return ModuleDelta(
            lora_a=lora_a,
            # The norms of DoRA are those of the table, before the module scales its output.
            lora_b=lora_b * target.shape.output_scale,
            bias=bias,
            output_gain=output_gain,
        )

    def _find_trained_biases(self) -> Iterator[ModuleShape]:
        if self._spec.trained_biases == TrainedBiases.NONE:
            return
        is_targets_only = self._spec.trained_biases == TrainedBiases.TARGETS
        targets = (target.shape for target in self._targets)
        shapes = targets if is_targets_only else iter(self._model.modules.values())
        yield from (shape for shape in shapes if shape.has_bias)

    def _plan_tensors(self) -> Iterator[PlannedTensor]:
        for target in self._targets:
            shape = target.shape
            yield _planned(shape, target.a_key, (target.rank, shape.num_inputs))
            yield _planned(shape, target.b_key, (shape.num_outputs, target.rank))
            if self._spec.has_output_bias:
                yield PlannedTensor(shape.name, "lora_B.bias", (shape.num_outputs,))
            if self._spec.has_magnitudes:
                yield PlannedTensor(shape.name, "lora_magnitude_vector", (shape.num_outputs,))
        for shape in self._trained_biases:
            yield PlannedTensor(shape.name, "bias", (shape.num_outputs,))


def _planned(module: ModuleShape, key: str, shape: tuple[int, int]) -> PlannedTensor:
    return PlannedTensor(module.name, key.removeprefix(f"{module.name}."), shape)


def _plan_target(
    spec: LoraSpec, shape: ModuleShape, max_rank: int, matcher: PatternMatcher
) -> _Target:
    rank = find_value(spec.rank_pattern, shape.name, spec.rank, matcher)
    alpha = find_value(spec.alpha_pattern, shape.name, spec.alpha, matcher)
    if rank > max_rank:
        raise AdapterFaultError(
            f"its rank of {rank} at module '{shape.name}' is over the limit of {max_rank}"
        )
    if shape.is_embedding and spec.has_output_bias:
        raise AdapterFaultError(f"lora_bias cannot be used on the embedding '{shape.name}'")
    return _Target(shape, rank, spec.scale(rank, alpha))
