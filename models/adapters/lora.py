"""LoRA and DoRA: which tensors they have, and what these do to a module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import TargetRules, check_rank, find_value, read_target_rules
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.trained_biases import TrainedBiases, TrainedBiasPlan, read_trained_biases
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape

_IGNORED = (
    "lora_dropout",
    "megatron_core",
    "runtime_config",
    # Meant only with init_lora_weights of that name, or with the option before it.
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
)
_REFUSED = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "layer_replication": "replication of layers",
    "target_parameters": "LoRA on bare parameters",
    "megatron_config": "Megatron's parallel layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "ensure_weight_tying": "an adapter shared by tied layers",
}
# They leave the base weights as they were, whatever the first values of A and B.
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")
# They move a part of the base weights into A and B, so that the file fits the changed base only.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """What a configuration of LoRA or DoRA says.

    ``fan_in_fan_out`` is not among it: how the base stores a weight is the base's to know.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the modules it changes.
        rank: of modules that ``rank_pattern`` does not name.
        alpha: the same for the scale.
        rank_pattern: ranks by pattern for the end of a module's name; the first that fits counts.
        alpha_pattern: the same for alpha.
        trained_biases: biases of the base that the file replaces.
        has_output_bias: B has a bias of its own, scaled with it.
        is_rank_stabilised: the scale is alpha / sqrt(rank) instead of alpha / rank.
        has_magnitudes: it is DoRA.
    """

    base_name: str
    targets: TargetRules
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    trained_biases: TrainedBiases
    has_output_bias: bool
    is_rank_stabilised: bool
    has_magnitudes: bool

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor on B of a module."""
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> LoraPlan:
        """Apply it to a base model; raises as ``LoraPlan`` does."""
        return LoraPlan(self, model, matcher)


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
        self._biases = TrainedBiasPlan(
            spec.trained_biases, [target.shape for target in self._targets], model
        )
        self.tensors = (*self._plan_tensors(), *self._biases.tensors)

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        deltas = {
            target.shape.name: self._build_target(target, tensors) for target in self._targets
        }
        return AdapterChanges(modules=self._biases.add_to(deltas, tensors))

    def _build_target(self, target: _Target, tensors: Mapping[str, Tensor]) -> ModuleDelta:
        name = target.shape.name
        lora_a = tensors[target.a_key]
        lora_b = tensors[target.b_key].float() * target.scale
        output_gain = None
        if self._spec.has_magnitudes:
            changed = torch.addmm(self._model.weight(name), lora_b, lora_a.float())
            norms = torch.linalg.vector_norm(changed, dim=1)
            output_gain = tensors[f"{name}.lora_magnitude_vector"].float() / norms
        bias = None
        if self._spec.has_output_bias:
            bias = tensors[f"{name}.lora_B.bias"].float() * target.scale
        return ModuleDelta(
            lora_a=lora_a,
            # The norms of DoRA are those of the table, before the module scales its output.
            lora_b=lora_b * target.shape.output_scale,
            bias=bias,
            output_gain=output_gain,
        )

    def _plan_tensors(self) -> Iterator[PlannedTensor]:
        for target in self._targets:
            shape = target.shape
            yield _planned(shape, target.a_key, (target.rank, shape.num_inputs))
            yield _planned(shape, target.b_key, (shape.num_outputs, target.rank))
            if self._spec.has_output_bias:
                yield PlannedTensor(shape.name, "lora_B.bias", (shape.num_outputs,))
            if self._spec.has_magnitudes:
                yield PlannedTensor(shape.name, "lora_magnitude_vector", (shape.num_outputs,))


def _planned(module: ModuleShape, key: str, shape: tuple[int, int]) -> PlannedTensor:
    return PlannedTensor(module.name, key.removeprefix(f"{module.name}."), shape)


def _plan_target(
    spec: LoraSpec, shape: ModuleShape, max_rank: int, matcher: PatternMatcher
) -> _Target:
    rank = find_value(spec.rank_pattern, shape.name, spec.rank, matcher)
    alpha = find_value(spec.alpha_pattern, shape.name, spec.alpha, matcher)
    check_rank(shape, rank, max_rank)
    if shape.is_embedding and spec.has_output_bias:
        raise AdapterFaultError(f"lora_bias cannot be used on the embedding '{shape.name}'")
    return _Target(shape, rank, spec.scale(rank, alpha))


def read_lora_spec(fields: ConfigFields) -> LoraSpec:
    """Take LoRA's and DoRA's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    _check_init(fields.raw("init_lora_weights", default=True))
    fields.refuse(_REFUSED)
    fields.ignore(*_IGNORED)
    fields.flag("fan_in_fan_out")
    spec = LoraSpec(
        base_name=fields.text("base_model_name_or_path"),
        targets=read_target_rules(fields),
        rank=fields.count("r", default=8),
        alpha=fields.number("lora_alpha", default=8),
        rank_pattern=fields.counts("rank_pattern"),
        alpha_pattern=fields.numbers("alpha_pattern"),
        trained_biases=read_trained_biases(fields, "lora"),
        has_output_bias=fields.flag("lora_bias"),
        is_rank_stabilised=fields.flag("use_rslora"),
        has_magnitudes=fields.flag("use_dora"),
    )
    fields.finish()
    if spec.has_output_bias and spec.has_magnitudes:
        raise AdapterFaultError("lora_bias and use_dora exclude each other")
    return spec


def _check_init(init: Any) -> None:
    """Check that the base weights stayed what they were.

    Raises:
        AdapterFaultError: they did not, or nobody knows.
    """
    if isinstance(init, bool) or init in _HARMLESS_INITS:
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterFaultError(
            f"it was trained with init_lora_weights '{shown(init)}', which changes the base "
            "weights; save it with path_initial_model_for_weight_conversion to convert it"
        )
    raise AdapterFaultError(f"its init_lora_weights {shown(repr(init))} is not known here")
