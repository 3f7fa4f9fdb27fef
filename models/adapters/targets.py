"""Which modules of a model an adapter changes: PEFT's own rules.

A module is meant by its full name, or by the end of it after a dot; a text instead of a list is a
regular expression for the full name, "all-linear" every linear layer but the output head.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.patterns import PatternMatcher
from models.adapters.weights import ModelFacts, ModuleShape

_ALL_LINEAR = "all-linear"
# PEFT takes the first numbered part of a name for the layer.
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")

_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetRules:
    """The part of a configuration that chooses modules.

    Attributes:
        targets: names, or one pattern.
        excluded: the same for modules to leave alone; goes before ``targets``.
        layers: indices of the layers to change, None for all. A module that is named in full is
            changed wherever it is.
        layers_patterns: what stands before the index in a module's name; empty for anything.
    """

    targets: frozenset[str] | str
    excluded: frozenset[str] | str = frozenset()
    layers: frozenset[int] | None = None
    layers_patterns: tuple[str, ...] = ()

    def select(self, model: ModelFacts, matcher: PatternMatcher) -> tuple[ModuleShape, ...]:
        """Return the modules that are changed, in the model's order.

        Raises:
            AdapterFaultError: there are none, or a pattern is bad.
        """
        shapes = [shape for shape in model.modules.values() if not shape.is_norm]
        if isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR:
            candidates = [
                shape
                for shape in shapes
                if not shape.is_embedding and shape.name != model.output_head
            ]
        else:
            candidates = [shape for shape in shapes if self._is_target(shape.name, matcher)]
        chosen = tuple(
            shape for shape in candidates if not names_module(self.excluded, shape.name, matcher)
        )
        if not chosen:
            raise AdapterFaultError("its target_modules match no module of this model")
        return chosen

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed names that mean no module of the model at all, sorted."""
        if isinstance(self.targets, str):
            return ()
        known = {end for name in model.modules for end in (name, *_ends(name))}
        return tuple(sorted(self.targets - known))

    def _is_target(self, name: str, matcher: PatternMatcher) -> bool:
        if isinstance(self.targets, str):
            return names_module(self.targets, name, matcher)
        if name in self.targets:
            return True
        if not names_module(self.targets, name, matcher):
            return False
        return self.layers is None or self._layer_index(name, matcher) in self.layers

    def _layer_index(self, name: str, matcher: PatternMatcher) -> int | None:
        if not self.layers_patterns:
            found = _FIRST_INDEX.match(name)
            return int(found["idx"]) if found else None
        for pattern in self.layers_patterns:
            indexed = matcher.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", name)
            if indexed:
                # A pattern with alternatives may end before the index.
                return int(indexed["idx"]) if indexed["idx"] else None
        return None


def read_targets(fields: ConfigFields) -> frozenset[str] | str:
    """Take the modules to change, as a list of names or one pattern.

    Raises:
        AdapterFaultError: none are given.
    """
    targets = fields.names_or_pattern("target_modules")
    if not targets:
        raise AdapterFaultError("its target_modules are not given")
    return targets


def read_target_rules(fields: ConfigFields) -> TargetRules:
    """Take all options that choose modules and layers.

    Raises:
        AdapterFaultError: one is wrong, or they do not go together.
    """
    layers = fields.indices("layers_to_transform")
    layers_patterns = fields.texts("layers_pattern")
    rules = TargetRules(
        targets=read_targets(fields),
        excluded=fields.names_or_pattern("exclude_modules"),
        layers=layers,
        layers_patterns=layers_patterns,
    )
    if isinstance(rules.targets, str) and (layers or layers_patterns):
        raise AdapterFaultError(
            "layers_to_transform and layers_pattern need target_modules as a list"
        )
    if layers_patterns and layers is None:
        raise AdapterFaultError("layers_pattern needs layers_to_transform")
    return rules


def check_rank(shape: ModuleShape, rank: int, max_rank: int, *, source: str = "") -> None:
    """Check the rank of what a module gets.

    Args:
        shape: the module.
        rank: of the product.
        max_rank: the largest that is served.
        source: what it comes from, for people, where the configuration does not name it.

    Raises:
        AdapterFaultError: it is over the limit.
    """
    if rank > max_rank:
        reason = f" (from {source})" if source else ""
        raise AdapterFaultError(
            f"its rank of {rank}{reason} at module '{shape.name}' is over the limit of {max_rank}"
        )


def check_supported(
    shapes: Iterable[ModuleShape], method: str, *, is_conv1d_supported: bool
) -> None:
    """Check that targets are linear layers, for methods that PEFT has for these only.

    Args:
        shapes: the targets.
        method: its name, for people.
        is_conv1d_supported: whether the transposed layers of GPT-2 will do.

    Raises:
        AdapterFaultError: one is something else.
    """
    for shape in shapes:
        if shape.is_embedding:
            raise AdapterFaultError(f"{method} cannot change the embedding '{shape.name}'")
        if shape.is_transposed and not is_conv1d_supported:
            raise AdapterFaultError(
                f"{method} cannot change '{shape.name}': PEFT has no {method} for its kind (Conv1D)"
            )


def names_module(names: frozenset[str] | str, module: str, matcher: PatternMatcher) -> bool:
    """Tell whether a list of names or a pattern means a module.

    Raises:
        AdapterFaultError: the pattern is bad.
    """
    if isinstance(names, str):
        return matcher.fullmatch(names, module) is not None
    return module in names or any(end in names for end in _ends(module))


def find_value(
    by_pattern: Mapping[str, _Value], module: str, default: _Value, matcher: PatternMatcher
) -> _Value:
    """Return the value of the first pattern that fits the end of a module's name.

    Raises:
        AdapterFaultError: a pattern is bad.
    """
    for pattern, value in by_pattern.items():
        if _fits_end(pattern, module, matcher):
            return value
    return default


def _fits_end(pattern: str, module: str, matcher: PatternMatcher) -> bool:
    if not _PLAIN_KEY.fullmatch(pattern):
        return matcher.match(rf"(.*\.)?({pattern})$", module) is not None
    # Such patterns come by the hundred, one a module. A dot in them is still a pattern's.
    end = module[-len(pattern) :]
    is_end = len(end) == len(pattern) and all(
        wanted in (".", char) for wanted, char in zip(pattern, end, strict=True)
    )
    return is_end and (len(end) == len(module) or module[-len(end) - 1] == ".")


def _ends(name: str) -> Iterable[str]:
    """Return what follows each dot of a name."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts)))


def describe_unmatched(names: tuple[str, ...], *, option: str) -> str:
    """Return the warning that some names in the list of an option mean nothing here."""
    listed = ", ".join(f"'{shown(name)}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{option} lists what this model does not have: {listed}{more}"
