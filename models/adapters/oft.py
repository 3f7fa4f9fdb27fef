"""OFT: a module's input is rotated, block by block, before the module sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import TargetRules, check_supported, read_target_rules
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.trained_biases import TrainedBiases, TrainedBiasPlan, read_trained_biases
from models.adapters.weights import ModelFacts, ModuleDelta, ModuleShape

# The dropout is of training, the other sets first values.
_IGNORED = ("module_dropout", "init_weights")
_PART = "oft_R.weight"
# PEFT takes 5. Each is a product of all blocks, and the file may ask for any number.
_MAX_NEUMANN_TERMS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OftSpec:
    """What a configuration of OFT says.

    ``fan_in_fan_out`` is not among it: PEFT has no OFT for layers that it means.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the modules it changes.
        num_blocks: wanted blocks of each module; 0 if the size is given instead.
        block_size: wanted width of a block; 0 if the number is given instead.
        is_block_shared: all blocks of a module are rotated alike.
        constraint: most that a module's blocks may turn (constrained OFT); None is without limit.
        num_neumann_terms: terms of the series that stands for the inverse in Cayley's formula;
            None is the exact formula.
        trained_biases: biases of the base that the file replaces.
    """

    base_name: str
    targets: TargetRules
    num_blocks: int
    block_size: int
    is_block_shared: bool
    constraint: float | None
    num_neumann_terms: int | None
    trained_biases: TrainedBiases

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> OftPlan:
        """Apply it to a base model; raises as ``OftPlan`` does."""
        return OftPlan(self, model, matcher)

    def block_size_for(self, width: int) -> int:
        """Return the size of the blocks of a module: PEFT takes the nearest that divides it."""
        if self.block_size:
            return nearest_divisor(width, self.block_size)
        return width // nearest_divisor(width, self.num_blocks)


class OftPlan:
    """A configuration of OFT, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: OftSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules.

        Raises:
            AdapterFaultError: no module is meant, one is no plain linear layer, or a pattern is
                bad.
        """
        self._spec = spec
        self._targets = spec.targets.select(model, matcher)
        check_supported(self._targets, "OFT", is_conv1d_supported=False)
        self._biases = TrainedBiasPlan(spec.trained_biases, self._targets, model)
        self.tensors: Sequence[PlannedTensor] = (*self._plan_tensors(), *self._biases.tensors)

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        deltas = {
            shape.name: ModuleDelta(
                input_rotation=make_rotations(
                    tensors[f"{shape.name}.{_PART}"].float(),
                    self._spec.block_size_for(shape.num_inputs),
                    constraint=self._spec.constraint,
                    num_neumann_terms=self._spec.num_neumann_terms,
                )
            )
            for shape in self._targets
        }
        return AdapterChanges(modules=self._biases.add_to(deltas, tensors))

    def _plan_tensors(self) -> Iterator[PlannedTensor]:
        for shape in self._targets:
            yield PlannedTensor(shape.name, _PART, self._angles_shape(shape))

    def _angles_shape(self, shape: ModuleShape) -> tuple[int, int]:
        size = self._spec.block_size_for(shape.num_inputs)
        num_blocks = 1 if self._spec.is_block_shared else shape.num_inputs // size
        return num_blocks, size * (size - 1) // 2


def read_oft_spec(fields: ConfigFields) -> OftSpec:
    """Take OFT's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore(*_IGNORED)
    fields.flag("fan_in_fan_out")
    # Without it the file is of an OFT that PEFT itself no longer reads.
    if not fields.is_given("oft_block_size"):
        raise AdapterFaultError("its oft_block_size is not given: OFT of PEFT before 0.14")
    is_constrained = fields.flag("coft")
    constraint = fields.number("eps", default=6e-5)
    is_series = fields.flag("use_cayley_neumann", default=True)
    num_terms = fields.integer("num_cayley_neumann_terms", default=5)
    spec = OftSpec(
        base_name=fields.text("base_model_name_or_path"),
        targets=read_target_rules(fields),
        num_blocks=fields.integer("r", default=0),
        block_size=fields.integer("oft_block_size", default=32),
        is_block_shared=fields.flag("block_share"),
        constraint=constraint if is_constrained else None,
        num_neumann_terms=num_terms if is_series else None,
        trained_biases=read_trained_biases(fields, "oft"),
    )
    fields.finish()
    if num_terms > _MAX_NEUMANN_TERMS:
        raise AdapterFaultError(
            f"its num_cayley_neumann_terms of {num_terms} are over the limit of "
            f"{_MAX_NEUMANN_TERMS}"
        )
    if min(spec.num_blocks, spec.block_size) != 0 or max(spec.num_blocks, spec.block_size) < 1:
        raise AdapterFaultError(
            f"one of r and oft_block_size must be 0 and the other above, not {spec.num_blocks} and "
            f"{spec.block_size}"
        )
    return spec


def nearest_divisor(width: int, wanted: int) -> int:
    """Return the divisor of ``width`` nearest to ``wanted``; of two the smaller."""
    if wanted >= width:
        return width
    lower = next(divisor for divisor in range(wanted, 0, -1) if width % divisor == 0)
    higher = next(divisor for divisor in range(wanted, width + 1) if width % divisor == 0)
    return lower if wanted - lower <= higher - wanted else higher


def make_rotations(
    angles: Tensor, size: int, *, constraint: float | None, num_neumann_terms: int | None
) -> Tensor:
    """Return PEFT's rotations of blocks, [num_blocks, size, size] float32.

    A row of a block is multiplied from the left: ``block @ rotation``.

    Args:
        angles: [num_blocks, size (size - 1) / 2] float32, the upper triangles of skew-symmetric
            matrices row by row.
        size: width of a block.
        constraint: see ``OftSpec``.
        num_neumann_terms: see ``OftSpec``.
    """
    rows, columns = torch.triu_indices(size, size, 1)
    upper = angles.new_zeros(angles.shape[0], size, size)
    upper[:, rows, columns] = angles
    skew = upper - upper.transpose(1, 2)
    if constraint is not None:
        skew = _shorten(skew, constraint)
    if num_neumann_terms is not None:
        return _sum_series(skew, num_neumann_terms)
    identity = torch.eye(size).expand_as(skew)
    rotations: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
    return rotations


def _shorten(skew: Tensor, constraint: float) -> Tensor:
    """Bring matrices to the length that all of a module's blocks together allow each of them."""
    longest = constraint / torch.sqrt(torch.tensor(skew.shape[0]))
    lengths = torch.linalg.matrix_norm(skew, keepdim=True)
    return torch.where(lengths <= longest, skew, longest * (skew / lengths))


def _sum_series(skew: Tensor, num_terms: int) -> Tensor:
    """Return 1 + 2 Q + 2 Q^2 + ... with the last power taken once: PEFT's series."""
    total = torch.eye(skew.shape[1]).repeat(skew.shape[0], 1, 1)
    if num_terms > 1:
        total += 2 * skew
    if num_terms > 2:
        power = skew @ skew
        total += 2 * power
        for _ in range(3, num_terms - 1):
            power = power @ skew
            total += 2 * power
        total += power @ skew
    return total
