"""The component schemas of /openapi.json: pydantic's, with what it cannot know of added."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from deployments.wire_values import (
    MAX_LOGIT_BIASES,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_VARIABLES,
)
from models.adapters.ids import MAX_SEGMENT_CHARACTERS

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_TOKEN_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["text"],
}

# Fields that a function reads and not a type: what that function takes.
_READ_FIELDS: Mapping[str, Schema] = {
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIASES,
    },
    "stop": {
        "anyOf": [
            _STOP_STRING,
            {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
        ]
    },
    "metadata": {
        "type": "object",
        "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARACTERS},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARACTERS},
        "maxProperties": MAX_METADATA_PAIRS,
    },
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _TOKEN_IDS,
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
        ]
    },
    "chat_template_kwargs": {"type": "object", "maxProperties": MAX_TEMPLATE_VARIABLES},
    "content": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_PART]}},
            _NULL,
        ]
    },
    # Anything else is refused.
    "function_call": _NULL,
    "audio": _NULL,
}
# What ``models.adapters.ids`` takes, or nothing, which names no adapter.
_SEGMENT = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_SEGMENT_CHARACTERS - 1}}}"
ADAPTER_ID_PATTERN = f"^({_SEGMENT}(/{_SEGMENT})?)?$"
_ADAPTER_FIELDS = frozenset({"peft", "adapter_id", "lora_path", "lora_name"})
# Ranges that ``sampling.params`` checks, where the types have none.
SAMPLING_RANGES: Mapping[str, Schema] = {
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "typical_p": {"exclusiveMinimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "top_k": {"minimum": -1},
}
_NOTES = frozenset({"title", "description", "default"})


def make_schemas(requests: Iterable[type], answers: Iterable[type]) -> dict[str, Schema]:
    """Return name -> schema of these types and of all that they consist of.

    Args:
        requests: types of bodies. Null stands for every field that may be left out.
        answers: types of answers.
    """
    requests = tuple(requests)
    adapters = [
        *((kind, "validation", TypeAdapter[Any](kind)) for kind in requests),
        *((kind, "serialization", TypeAdapter[Any](kind)) for kind in answers),
    ]
    _, document = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Schema] = document["$defs"]
    for schema in schemas.values():
        properties = schema.get("properties", {})
        for name in properties.keys() & _READ_FIELDS.keys():
            properties[name] = _filled(properties[name], _READ_FIELDS[name])
        for name in properties.keys() & _ADAPTER_FIELDS:
            properties[name]["pattern"] = ADAPTER_ID_PATTERN
        for name in properties.keys() & SAMPLING_RANGES.keys():
            for option in properties[name]["anyOf"]:
                if option != _NULL:
                    option.update(SAMPLING_RANGES[name])
    for kind in requests:
        _allow_null(schemas[kind.__name__])
    return schemas


def make_agent_schema(chat: Schema) -> Schema:
    """Return the schema of an agent's chat: without ``model`` it is the agent's, zeros are absent.

    Args:
        chat: of other chat requests.
    """
    schema = copy.deepcopy(chat)
    schema["title"] = "AgentChatRequest"
    schema["required"].remove("model")
    for name in ("max_tokens", "max_completion_tokens"):
        for option in schema["properties"][name]["anyOf"]:
            if "minimum" in option:
                option["minimum"] = 0
    _allow_null(schema)
    return schema


def _filled(schema: Schema, content: Schema) -> Schema:
    """Return a schema with what is said nowhere in it, if it says nothing."""
    if not schema.keys() - _NOTES:
        return {**schema, **content}
    options = schema.get("anyOf", [])
    if {} not in options:
        return schema
    return {**schema, "anyOf": [option or content for option in options]}


def _allow_null(body: Schema) -> None:
    required = body.get("required", [])
    for name, schema in body["properties"].items():
        options = schema.get("anyOf", [])
        if name in required or _NULL in options or schema.get("type") == "null":
            continue
        notes = {key: value for key, value in schema.items() if key in _NOTES}
        rest = {key: value for key, value in schema.items() if key not in _NOTES}
        body["properties"][name] = {
            **notes,
            "anyOf": [*(options if rest.keys() == {"anyOf"} else [rest]), _NULL],
        }
