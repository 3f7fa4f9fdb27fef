"""Readers of the request values that may have several forms, and of pydantic's complaints.

Each reader takes what JSON gave and returns one form, or raises a sentence for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from models.errors import InvalidRequestError

# One request may ask for this many choices, over all of its prompts.
MAX_CHOICES = 128
# Of a request body, known or not: all APIs together have fewer.
MAX_FIELDS = 256
MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_METADATA_PAIRS = 16
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_CHARACTERS = 65_536
MAX_TEMPLATE_VARIABLES = 64
MAX_TEMPLATE_VARIABLE_DEPTH = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

_TOKEN_ID_KEY = re.compile(r"\d{1,10}", re.ASCII)

# One prompt of a completion: text, or token ids.
PromptItem = str | tuple[int, ...]


def wire_error(reason: str, path: str = "") -> PydanticCustomError:
    """Return the error to raise for a value that cannot be read; pydantic adds where it stands.

    Args:
        reason: a sentence without the field's name.
        path: where inside of the field, such as "1.type".
    """
    return PydanticCustomError("medley", "{reason}", {"reason": reason, "path": path})


def read_stop(value: Any) -> tuple[str, ...]:
    """Read ``stop``: one string or a list of them.

    Raises:
        PydanticCustomError: the wrong type, too many, too long, or an empty string.
    """
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise wire_error("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise wire_error(f"has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for string in strings:
        if not isinstance(string, str):
            raise wire_error("must be a string or a list of strings")
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise wire_error(f"each string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(strings)


def read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Read ``logit_bias``: an object from token ids (as strings) to numbers.

    Raises:
        PydanticCustomError: the wrong type, too many entries, or a key that is no token id.
    """
    if not isinstance(value, dict):
        raise wire_error("must be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise wire_error(f"has {len(value)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    biases = []
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID_KEY.fullmatch(key):
            raise wire_error(f"the key {_quote(key)} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wire_error(f"the bias of token {key} must be a number in [-100, 100]")
        biases.append((int(key), float(bias)))
    return tuple(biases)


def read_metadata(value: Any) -> Mapping[str, str]:
    """Read ``metadata``: a few short strings by name.

    Raises:
        PydanticCustomError: the wrong type, too many pairs, or one that is too long.
    """
    if not isinstance(value, dict):
        raise wire_error("must be an object of strings")
    if len(value) > MAX_METADATA_PAIRS:
        raise wire_error(f"has {len(value)} pairs; at most {MAX_METADATA_PAIRS} are allowed")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise wire_error("must be an object of strings")
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise wire_error(f"keys have at most {MAX_METADATA_KEY_CHARACTERS} characters")
        if len(text) > MAX_METADATA_VALUE_CHARACTERS:
            raise wire_error(f"values have at most {MAX_METADATA_VALUE_CHARACTERS} characters")
    return value


def read_prompts(value: Any) -> tuple[PromptItem, ...]:
    """Read ``prompt``: a text, token ids, or a list of either.

    Raises:
        PydanticCustomError: another type, no prompt, too many, or a prompt without tokens.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wire_error("must be a string, a list of token ids, or a list of these")
    if not value:
        raise wire_error("must not be empty")
    if type(value[0]) is int:
        return (_read_token_ids(value, ""),)
    if len(value) > MAX_CHOICES:
        raise wire_error(f"has {len(value)} prompts; at most {MAX_CHOICES} are allowed")
    return tuple(_read_prompt(item, str(index)) for index, item in enumerate(value))


def _read_prompt(item: Any, path: str) -> PromptItem:
    if isinstance(item, str):
        return item
    if not isinstance(item, list):
        raise wire_error("must be a string or a list of token ids", path)
    if not item:
        raise wire_error("must have at least one token id", path)
    return _read_token_ids(item, path)


def _read_token_ids(items: Sequence[Any], path: str) -> tuple[int, ...]:
    if not all(type(item) is int for item in items):
        raise wire_error("token ids must be integers", path)
    if min(items) < 0:
        raise wire_error("token ids must not be negative", path)
    return tuple(items)


def read_content(value: Any) -> str | None:
    """Read the content of a message: a text, or a list of text parts, which become lines.

    Raises:
        PydanticCustomError: another type, or a part that is not text.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wire_error("must be a string or a list of text parts")
    return "\n".join(_read_part(part, str(index)) for index, part in enumerate(value))


def _read_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wire_error("must be a text part", path)
    kind = part.get("type", "text")
    if kind != "text":
        raise wire_error(f"{_quote(kind)} is not supported; only text", f"{path}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise wire_error("must be a string", f"{path}.text")
    return text


def read_template_variables(value: Any) -> Mapping[str, Any]:
    """Read ``chat_template_kwargs``: few variables, not nested deeply.

    Which names are reserved the template knows.

    Raises:
        PydanticCustomError: the wrong type, too many, or nested too deeply.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise wire_error("must be an object of variables")
    if len(value) > MAX_TEMPLATE_VARIABLES:
        raise wire_error(
            f"has {len(value)} variables; at most {MAX_TEMPLATE_VARIABLES} are allowed"
        )
    level: list[Any] = [value]
    for _ in range(MAX_TEMPLATE_VARIABLE_DEPTH):
        level = [item for holder in level for item in items_of(holder)]
    if level:
        raise wire_error(f"is nested more than {MAX_TEMPLATE_VARIABLE_DEPTH} levels deep")
    return value


def items_of(value: Any) -> Iterable[Any]:
    """Return what an object or a list of JSON holds; nothing of any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def explain(error: ValidationError) -> InvalidRequestError:
    """Return the first complaint as an error that names its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    path = [str(part) for part in first["loc"]]
    if first["type"] == "medley":
        path += [context["path"]] if context["path"] else []
        reason = context["reason"]
    else:
        reason = _REASONS.get(first["type"], first["msg"]).format_map(context)
    return InvalidRequestError(".".join(path)[:256], reason)


_REASONS: Mapping[str, str] = {
    "missing": "is required",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "model_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "extra_forbidden": "is not known here",
}


def _quote(value: object) -> str:
    text = repr(value) if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."
