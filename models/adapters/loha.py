"""LoHa: the elementwise product of two low-rank products, which is one product of rank squared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.lycoris import LycorisOptions, LycorisTarget, read_lycoris_options
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import check_rank
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.weights import ModelFacts, ModuleDelta


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LohaSpec:
    """What a configuration of LoHa says.

    Attributes:
        options: modules, ranks and scales.
    """

    options: LycorisOptions

    @property
    def base_name(self) -> str:
        """The base model it was trained on, "" if the file does not tell."""
        return self.options.base_name

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.options.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> LohaPlan:
        """Apply it to a base model; raises as ``LohaPlan`` does."""
        return LohaPlan(self, model, matcher)


class LohaPlan:
    """A configuration of LoHa, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    def __init__(self, spec: LohaSpec, model: ModelFacts, matcher: PatternMatcher) -> None:
        """Find the modules and their ranks.

        Raises:
            AdapterFaultError: no module is meant, one is no plain linear layer, a rank squared is
                over the limit, or a pattern is bad.
        """
        self._targets = spec.options.select(model, matcher, "LoHa")
        for target in self._targets:
            check_rank(
                target.shape, target.rank**2, model.max_rank, source=f"LoHa's r {target.rank}"
            )
        self.tensors = tuple(tensor for target in self._targets for tensor in _plan_tensors(target))

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return what happens to each module.

        Args:
            tensors: by key, as planned.
        """
        return AdapterChanges(
            modules={target.shape.name: _build_target(target, tensors) for target in self._targets}
        )


def read_loha_spec(fields: ConfigFields) -> LohaSpec:
    """Take LoHa's options.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    spec = LohaSpec(options=read_lycoris_options(fields))
    fields.finish()
    return spec


def _plan_tensors(target: LycorisTarget) -> Iterator[PlannedTensor]:
    shape, rank = target.shape, target.rank
    for number in (1, 2):
        yield PlannedTensor(shape.name, f"hada_w{number}_a", (shape.num_outputs, rank))
        yield PlannedTensor(shape.name, f"hada_w{number}_b", (rank, shape.num_inputs))


def _build_target(target: LycorisTarget, tensors: Mapping[str, Tensor]) -> ModuleDelta:
    """Multiply every column of the one with every column of the other, and so the rows."""
    w1_a, w1_b, w2_a, w2_b = (
        tensors[f"{target.shape.name}.hada_{part}"].float()
        for part in ("w1_a", "w1_b", "w2_a", "w2_b")
    )
    return ModuleDelta(
        lora_a=(w1_b[:, None, :] * w2_b[None, :, :]).flatten(0, 1),
        lora_b=(w1_a[:, :, None] * w2_a[:, None, :]).flatten(1) * target.scale,
    )
