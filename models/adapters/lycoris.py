"""What LoHa and LoKr have in common: ranks and scales by module, and where PEFT applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from models.adapters.config_fields import ConfigFields
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import (
    TargetRules,
    check_supported,
    find_value,
    read_target_rules,
)
from models.adapters.weights import ModelFacts, ModuleShape

# Dropouts are of training; the last is about convolutions.
_IGNORED = ("rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d")


@dataclasses.dataclass(frozen=True, slots=True)
class LycorisTarget:
    """One changed module.

    Attributes:
        shape: of the module.
        rank: of its decomposed matrices.
        scale: factor on what is added to its weight.
    """

    shape: ModuleShape
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LycorisOptions:
    """The options of both methods.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the modules it changes.
        rank: of modules that ``rank_pattern`` does not name.
        alpha: the same for the scale, which is alpha / rank.
        rank_pattern: ranks by pattern for the end of a module's name; the first that fits counts.
        alpha_pattern: the same for alpha.
    """

    base_name: str
    targets: TargetRules
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def select(
        self, model: ModelFacts, matcher: PatternMatcher, method: str
    ) -> tuple[LycorisTarget, ...]:
        """Find the modules, their ranks and scales.

        Args:
            model: the base model.
            matcher: runs the patterns.
            method: the name of the method, for people.

        Raises:
            AdapterFaultError: no module is meant, one is no plain linear layer, or a pattern is
                bad.
        """
        shapes = self.targets.select(model, matcher)
        check_supported(shapes, method, is_conv1d_supported=False)
        return tuple(self._target(shape, matcher) for shape in shapes)

    def _target(self, shape: ModuleShape, matcher: PatternMatcher) -> LycorisTarget:
        rank = find_value(self.rank_pattern, shape.name, self.rank, matcher)
        alpha = find_value(self.alpha_pattern, shape.name, self.alpha, matcher)
        return LycorisTarget(shape, rank, alpha / rank)


def read_lycoris_options(fields: ConfigFields) -> LycorisOptions:
    """Take the options of both methods, and refuse or drop those that both must not have.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore(*_IGNORED)
    return LycorisOptions(
        base_name=fields.text("base_model_name_or_path"),
        targets=read_target_rules(fields),
        rank=fields.count("r", default=8),
        alpha=fields.number("alpha", default=8),
        rank_pattern=fields.counts("rank_pattern"),
        alpha_pattern=fields.numbers("alpha_pattern"),
    )
