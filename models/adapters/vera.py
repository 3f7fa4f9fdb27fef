"""VeRA: one pair of random matrices for all modules, and two trained vectors for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import (
    TargetRules,
    check_rank,
    check_supported,
    read_target_rules,
)
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.trained_biases import TrainedBiases, TrainedBiasPlan, read_trained_biases
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape

# The dropout is of training, the others set first values.
_IGNORED = ("vera_dropout", "d_initial", "init_weights")
_A_KEY, _B_KEY = "base_model.vera_A", "base_model.vera_B"
# What torch takes for a seed.
_SEEDS = range(-(2**63), 2**64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VeraSpec:
    """What a configuration of VeRA says.

    ``fan_in_fan_out`` is not among it: how the base stores a weight is the base's to know.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the modules it changes.
        rank: of the shared pair.
        is_pair_saved: the file holds the shared pair; else ``seed`` makes it again.
        seed: of the random numbers in the shared pair.
        trained_biases: biases of the base that the file replaces.
    """

    base_name: str
    targets: TargetRules
    rank: int
    is_pair_saved: bool
    seed: int
    trained_biases: TrainedBiases

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> VeraPlan:
        """Apply it to a base model; raises as ``VeraPlan`` does."""
        return VeraPlan(self, model, matcher)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _SharedPair:
    """The matrices of all modules, as large as the largest needs; others use the first parts.

    Attributes:
        a: [rank, most inputs], the file's dtype.
        b: [most outputs, rank], float32.
    """

    a: Tensor
    b: Tensor


class VeraPlan:
    """A configuration of VeRA, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: VeraSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules.

        Raises:
            AdapterFaultError: no module is meant, an embedding is, the rank is over the limit, or
                a pattern is bad.
        """
        self._spec = spec
        self._targets = spec.targets.select(model, matcher)
        check_supported(self._targets, "VeRA", is_conv1d_supported=True)
        check_rank(self._targets[0], spec.rank, model.max_rank)
        self._a_shape = (spec.rank, max(shape.num_inputs for shape in self._targets))
        self._b_shape = (max(shape.num_outputs for shape in self._targets), spec.rank)
        self._biases = TrainedBiasPlan(spec.trained_biases, self._targets, model)
        self.tensors: Sequence[PlannedTensor] = (*self._plan_tensors(), *self._biases.tensors)

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.

        Raises:
            AdapterFaultError: the shared pair cannot be made again.
        """
        if self._spec.is_pair_saved:
            pair = _SharedPair(tensors[_A_KEY], tensors[_B_KEY].float())
        else:
            pair = _draw_pair(self._a_shape, self._b_shape, self._spec.seed)
        deltas = {shape.name: _build_target(shape, pair, tensors) for shape in self._targets}
        return AdapterChanges(modules=self._biases.add_to(deltas, tensors))

    def _plan_tensors(self) -> Iterator[PlannedTensor]:
        if self._spec.is_pair_saved:
            yield PlannedTensor("", _A_KEY, self._a_shape)
            yield PlannedTensor("", _B_KEY, self._b_shape)
        for shape in self._targets:
            yield PlannedTensor(shape.name, "vera_lambda_b", (shape.num_outputs,))
            yield PlannedTensor(shape.name, "vera_lambda_d", (self._spec.rank,))


def read_vera_spec(fields: ConfigFields) -> VeraSpec:
    """Take VeRA's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore(*_IGNORED)
    fields.flag("fan_in_fan_out")
    spec = VeraSpec(
        base_name=fields.text("base_model_name_or_path"),
        targets=read_target_rules(fields),
        rank=fields.count("r", default=256),
        is_pair_saved=fields.flag("save_projection", default=True),
        seed=fields.integer("projection_prng_key", default=0),
        trained_biases=read_trained_biases(fields, "vera"),
    )
    fields.finish()
    if spec.seed not in _SEEDS:
        raise AdapterFaultError(f"its projection_prng_key {spec.seed} is not a seed of 64 bits")
    return spec


def _build_target(
    shape: ModuleShape, pair: _SharedPair, tensors: Mapping[str, Tensor]
) -> ModuleDelta:
    lambda_b = tensors[f"{shape.name}.vera_lambda_b"].float()
    lambda_d = tensors[f"{shape.name}.vera_lambda_d"].float()
    return ModuleDelta(
        # Both vectors go to B: A stays a view of the shared matrix.
        lora_a=pair.a[:, : shape.num_inputs],
        lora_b=pair.b[: shape.num_outputs] * lambda_d * lambda_b[:, None],
    )


def _draw_pair(a_shape: tuple[int, int], b_shape: tuple[int, int], seed: int) -> _SharedPair:
    """Draw the shared pair as PEFT does, with its own code: A first, then B.

    Raises:
        AdapterFaultError: PEFT is not installed.
    """
    try:
        # Here because it takes seconds, and no other adapter needs it.
        from peft.tuners.vera.model import _kaiming_init
    except ImportError as error:
        raise AdapterFaultError(
            "it was saved without its projection (save_projection), which only the package peft "
            "can make again, and peft is not installed"
        ) from error
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        _kaiming_init(torch.empty(shape, dtype=torch.float32), generator)
        for shape in (a_shape, b_shape)
    )
    return _SharedPair(a, b)
