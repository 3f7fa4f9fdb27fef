"""A strict reading of PEFT's ``adapter_config.json``. Reads no weights, runs nothing.

PEFT itself drops keys that it does not know. Here every key is understood, ignored by name, or the
adapter is refused: an option that nobody applies gives plausible but wrong text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from models.adapters.adapter_plan import AdapterSpec
from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.ia3 import read_ia3_spec
from models.adapters.loha import read_loha_spec
from models.adapters.lokr import read_lokr_spec
from models.adapters.lora import read_lora_spec
from models.adapters.method import MethodSpec
from models.adapters.oft import read_oft_spec
from models.adapters.prefix_tuning import read_prefix_tuning_spec
from models.adapters.prompt_tuning import read_p_tuning_spec, read_prompt_tuning_spec
from models.adapters.saved_modules import SavedModules, read_saved_modules
from models.adapters.trainable_tokens import read_trainable_tokens_spec
from models.adapters.trained_tokens import TrainedTokens, read_trained_tokens
from models.adapters.vera import read_vera_spec

MAX_CONFIG_BYTES = 4 << 20

# What is of use at training, or tells of it only. "auto_mapping" names a class: never followed.
_IGNORED = ("auto_mapping", "inference_mode", "peft_version", "revision")
_METHODS: Mapping[str, Callable[[ConfigFields], MethodSpec]] = {
    "IA3": read_ia3_spec,
    "LOHA": read_loha_spec,
    "LOKR": read_lokr_spec,
    "LORA": read_lora_spec,
    "OFT": read_oft_spec,
    "PREFIX_TUNING": read_prefix_tuning_spec,
    "PROMPT_TUNING": read_prompt_tuning_spec,
    "P_TUNING": read_p_tuning_spec,
    "TRAINABLE_TOKENS": read_trainable_tokens_spec,
    "VERA": read_vera_spec,
}
# Those that may have modules trained whole besides.
_SAVE_MODULES = frozenset(("IA3", "LOHA", "LOKR", "LORA", "OFT", "VERA"))


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
    if not method:
        raise AdapterFaultError("its configuration names no peft_type")
    if method not in _METHODS:
        raise AdapterFaultError(
            f"the PEFT method '{shown(method)}' is not supported; {', '.join(sorted(_METHODS))} are"
        )
    saved = read_saved_modules(fields) if method in _SAVE_MODULES else SavedModules()
    tokens = read_trained_tokens(fields) if method == "LORA" else TrainedTokens()
    return AdapterSpec(method=_METHODS[method](fields), saved=saved, tokens=tokens)


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
