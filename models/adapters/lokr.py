"""LoKr: the Kronecker product of two matrices, of which each is whole or a low-rank product.

Factors of a Kronecker product are the Kronecker products of the factors:
``kron(u1 v1, u2 v2) = kron(u1, u2) kron(v1, v2)``. So each matrix is factored with the least rank
that its parts allow, a whole one through the unit matrix of its shorter side, and the ranks
multiply.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.lycoris import LycorisOptions, LycorisTarget, read_lycoris_options
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import check_rank
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LokrSpec:
    """What a configuration of LoKr says.

    Attributes:
        options: modules, ranks and scales.
        is_left_decomposed: the left matrix is a low-rank product too where that is smaller.
        factor: wanted size of the left matrix's sides; -1 is near the square root.
    """

    options: LycorisOptions
    is_left_decomposed: bool
    factor: int

    @property
    def base_name(self) -> str:
        """The base model it was trained on, "" if the file does not tell."""
        return self.options.base_name

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.options.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> LokrPlan:
        """Apply it to a base model; raises as ``LokrPlan`` does."""
        return LokrPlan(self, model, matcher)


@dataclasses.dataclass(frozen=True, slots=True)
class _Matrix:
    """One of the two matrices of a module.

    Attributes:
        part: its name in the file.
        num_rows: its share of the module's outputs.
        num_columns: its share of the module's inputs.
        inner_rank: of the product that it is; None if it is whole.
    """

    part: str
    num_rows: int
    num_columns: int
    inner_rank: int | None

    @property
    def rank(self) -> int:
        """The least rank with which it can be factored."""
        side = min(self.num_rows, self.num_columns)
        return side if self.inner_rank is None else min(side, self.inner_rank)

    def plan(self, module: str) -> Iterator[PlannedTensor]:
        if self.inner_rank is None:
            yield PlannedTensor(module, self.part, (self.num_rows, self.num_columns))
        else:
            yield PlannedTensor(module, f"{self.part}_a", (self.num_rows, self.inner_rank))
            yield PlannedTensor(module, f"{self.part}_b", (self.inner_rank, self.num_columns))

    def factor(self, module: str, tensors: Mapping[str, Tensor]) -> _Factors:
        key = f"{module}.{self.part}"
        if self.inner_rank is None:
            return _factor_whole(tensors[key].float())
        left, right = tensors[f"{key}_a"].float(), tensors[f"{key}_b"].float()
        if self.inner_rank > self.rank:
            return _factor_whole(left @ right)
        return _Factors(left, right)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """A matrix as the product ``left @ right``, float32: [rows, rank] and [rank, columns]."""

    left: Tensor
    right: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """One changed module, with its matrices."""

    base: LycorisTarget
    left: _Matrix
    right: _Matrix

    @property
    def rank(self) -> int:
        return self.left.rank * self.right.rank


class LokrPlan:
    """A configuration of LoKr, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: LokrSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules and the shapes of their matrices.

        Raises:
            AdapterFaultError: no module is meant, one is no plain linear layer, the least rank of
                a product is over the limit, or a pattern is bad.
        """
        self._targets = tuple(
            _plan_target(spec, target) for target in spec.options.select(model, matcher, "LoKr")
        )
        for target in self._targets:
            source = f"LoKr's matrices of ranks {target.left.rank} and {target.right.rank}"
            check_rank(target.base.shape, target.rank, model.max_rank, source=source)
        self.tensors = tuple(
            tensor
            for target in self._targets
            for matrix in (target.left, target.right)
            for tensor in matrix.plan(target.base.shape.name)
        )

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        return AdapterChanges(
            modules={
                target.base.shape.name: _build_target(target, tensors) for target in self._targets
            }
        )


def read_lokr_spec(fields: ConfigFields) -> LokrSpec:
    """Take LoKr's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore("rank_dropout_scale")
    spec = LokrSpec(
        options=read_lycoris_options(fields),
        is_left_decomposed=fields.flag("decompose_both"),
        factor=fields.integer("decompose_factor", default=-1),
    )
    fields.finish()
    return spec


def _build_target(target: _Target, tensors: Mapping[str, Tensor]) -> ModuleDelta:
    module = target.base.shape.name
    left = target.left.factor(module, tensors)
    right = target.right.factor(module, tensors)
    return ModuleDelta(
        lora_a=torch.kron(left.right, right.right),
        lora_b=torch.kron(left.left, right.left) * target.base.scale,
    )


def _plan_target(spec: LokrSpec, target: LycorisTarget) -> _Target:
    """Apply PEFT's rules for the shapes of the two matrices, and for which of them are whole."""
    inputs = split_width(target.shape.num_inputs, spec.factor)
    outputs = split_width(target.shape.num_outputs, spec.factor)
    rank = target.rank
    is_left_low = spec.is_left_decomposed and rank < max(outputs.left, inputs.left) / 2
    is_right_low = rank < max(outputs.right, inputs.right) / 2
    return _Target(
        target,
        _Matrix("lokr_w1", outputs.left, inputs.left, rank if is_left_low else None),
        _Matrix("lokr_w2", outputs.right, inputs.right, rank if is_right_low else None),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SplitWidth:
    """A width as ``left * right``: the sides of the two matrices."""

    left: int
    right: int


def split_width(width: int, factor: int) -> SplitWidth:
    """Split a width as PEFT does.

    Args:
        width: at least 1.
        factor: the wanted left side; taken if it divides the width. Else the left side is the
            largest divisor that is neither over ``factor`` (unless that is -1) nor over the right
            side.
    """
    if factor > 0 and width % factor == 0:
        return SplitWidth(factor, width // factor)
    limit = math.isqrt(width) if factor == -1 else min(factor, math.isqrt(width))
    divisors = (left for left in range(2, limit + 1) if width % left == 0)
    left = max(divisors, default=1)
    return SplitWidth(left, width // left)


def _factor_whole(matrix: Tensor) -> _Factors:
    num_rows, num_columns = matrix.shape
    if num_rows <= num_columns:
        return _Factors(torch.eye(num_rows), matrix)
    return _Factors(matrix, torch.eye(num_columns))
