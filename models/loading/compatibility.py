"""Which transformers models the engine can serve exactly; the others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.errors import ConfigError

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a configuration whose results would be wrong or depend on the batch.

    Raises:
        ConfigError: naming the property.
    """
    name = config.model_type
    if config.get_text_config() is not config:
        raise ConfigError(
            "model", f"'{name}' is made of several models; only pure text models can be served"
        )
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        raise ConfigError("model", f"'{name}' attends in both directions; only causal models work")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("model", f"'{name}' is an encoder-decoder model, not a decoder alone")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - SERVED_LAYER_TYPES):
        raise ConfigError(
            "model", f"'{name}' has layers of type {', '.join(unknown)}, which cannot be served"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(
            "model", f"'{name}' shares keys and values between layers, which cannot be served"
        )
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope" and rope is not config.rope_parameters:
            raise ConfigError(
                "model", f"'{name}' has longrope in some of its layers only, which cannot be fixed"
            )
        if rope.get("rope_type") == "dynamic":
            raise ConfigError(
                "model",
                f"'{name}' has dynamic rope scaling, which depends on the longest row of the batch",
            )


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse a model class that cannot be plugged into.

    Raises:
        ConfigError: naming the property.
    """
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise ConfigError(
            "model", f"{name} keeps a state besides keys and values, which cannot be served"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(
            "model", f"{name} computes attention in a way of its own, which cannot be served"
        )


def fix_longrope(model: PreTrainedModel, max_model_len_tokens: int) -> None:
    """Fix the factors of ``longrope`` for the life of the model, in place.

    transformers chooses between the short and the long factors by the longest row of each batch,
    so that one request would change another one's result. Here the long factors hold if the
    configured window exceeds the original length, the short ones if not.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(module, "rope_type", None) != "longrope" or config is None:
            continue
        original = config.rope_parameters["original_max_position_embeddings"]
        is_long = max_model_len_tokens > original
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](
            config, module.inv_freq.device, seq_len=original + 1 if is_long else original
        )
        with torch.no_grad():
            module.inv_freq.copy_(inv_freq)
        module.attention_scaling = scaling
        # Any other name than "longrope" keeps the update hook of transformers away.
        module.rope_type = "longrope-fixed"


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters of every layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
        return
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield value
