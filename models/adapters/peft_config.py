"""A strict reading of PEFT's ``adapter_config.json``. Reads no weights, runs nothing.

PEFT itself drops keys that it does not know. Here every key is understood, ignored by name, or the
adapter is refused: an option that nobody applies gives plausible but wrong text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.targets import TargetRules

MAX_CONFIG_BYTES = 4 << 20

# What is of use at training, or tells of it only. "auto_mapping" names a class: never followed.
_IGNORED = ("auto_mapping", "inference_mode", "peft_version", "revision")
_IGNORED_LORA = (
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
_REFUSED_LORA = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "layer_replication": "replication of layers",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trainable tokens",
    "modules_to_save": "fully trained modules",
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


class TrainedBiases(enum.StrEnum):
    """Whose biases a LoRA has trained besides."""

    NONE = "none"
    ALL = "all"
    TARGETS = "lora_only"


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


AdapterSpec = LoraSpec | Ia3Spec


def read_peft_config(encoded: bytes) -> AdapterSpec:
    """Read the contents of an ``adapter_config.json``.

    Raises:
        AdapterFaultError: it is damaged, or it asks for what is not supported.
    """
    fields = ConfigFields(_parse(encoded))
    method = fields.text("peft_type")
    task = fields.text("task_type")
    if task not in ("", "CAUSAL_LM"):
        raise AdapterFaultError(f"it is made for the task '{shown(task)}', not for CAUSAL_LM")
    fields.ignore(*_IGNORED)
    if method == "LORA":
        return _lora_spec(fields)
    if method == "IA3":
        return _ia3_spec(fields)
    if not method:
        raise AdapterFaultError("its configuration names no peft_type")
    raise AdapterFaultError(
        f"the PEFT method '{shown(method)}' is not supported yet; LoRA, DoRA and IA3 are"
    )


def _lora_spec(fields: ConfigFields) -> LoraSpec:
    _check_init(fields.raw("init_lora_weights", default=True))
    fields.refuse(_REFUSED_LORA)
    fields.ignore(*_IGNORED_LORA)
    fields.flag("fan_in_fan_out")
    layers = fields.indices("layers_to_transform")
    layers_patterns = fields.texts("layers_pattern")
    targets = TargetRules(
        targets=_targets(fields),
        excluded=fields.names_or_pattern("exclude_modules"),
        layers=layers,
        layers_patterns=layers_patterns,
    )
    if isinstance(targets.targets, str) and (layers or layers_patterns):
        raise AdapterFaultError(
            "layers_to_transform and layers_pattern need target_modules as a list"
        )
    if layers_patterns and layers is None:
        raise AdapterFaultError("layers_pattern needs layers_to_transform")
    spec = LoraSpec(
        base_name=fields.text("base_model_name_or_path"),
        targets=targets,
        rank=fields.count("r", default=8),
        alpha=fields.number("lora_alpha", default=8),
        rank_pattern=fields.counts("rank_pattern"),
        alpha_pattern=fields.numbers("alpha_pattern"),
        trained_biases=_trained_biases(fields.text("bias") or "none"),
        has_output_bias=fields.flag("lora_bias"),
        is_rank_stabilised=fields.flag("use_rslora"),
        has_magnitudes=fields.flag("use_dora"),
    )
    fields.finish()
    if spec.has_output_bias and spec.has_magnitudes:
        raise AdapterFaultError("lora_bias and use_dora exclude each other")
    return spec


def _ia3_spec(fields: ConfigFields) -> Ia3Spec:
    fields.refuse({"modules_to_save": _REFUSED_LORA["modules_to_save"]})
    fields.ignore("init_ia3_weights")
    fields.flag("fan_in_fan_out")
    # PEFT would take them from a table by architecture, but saves what it took.
    if not fields.is_given("feedforward_modules"):
        raise AdapterFaultError("its feedforward_modules are not given")
    spec = Ia3Spec(
        base_name=fields.text("base_model_name_or_path"),
        targets=TargetRules(
            targets=_targets(fields), excluded=fields.names_or_pattern("exclude_modules")
        ),
        feedforward=fields.names_or_pattern("feedforward_modules"),
    )
    fields.finish()
    return spec


def _targets(fields: ConfigFields) -> frozenset[str] | str:
    targets = fields.names_or_pattern("target_modules")
    if not targets:
        raise AdapterFaultError("its target_modules are not given")
    return targets


def _trained_biases(name: str) -> TrainedBiases:
    try:
        return TrainedBiases(name)
    except ValueError:
        raise AdapterFaultError(
            f"its bias must be none, all or lora_only, not '{shown(name)}'"
        ) from None


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


def _parse(encoded: bytes) -> Mapping[str, Any]:
    if len(encoded) > MAX_CONFIG_BYTES:
        raise AdapterFaultError(f"its configuration is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        values = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise AdapterFaultError("its configuration is no JSON") from error
    if not isinstance(values, dict):
        raise AdapterFaultError("its configuration is no JSON object")
    return values
