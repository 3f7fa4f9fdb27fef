"""Fields that other servers know and this one does not, with the values that ask for nothing.

A value that would change the answer is refused by name, never dropped. A field that stands in no
schema and not here is ignored, and reported as ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from models.errors import InvalidRequestError

_OFF: tuple[object, ...] = (False,)
_EMPTY: tuple[object, ...] = ("", [], {})
_ZERO: tuple[object, ...] = (0, 0.0)
_ONE: tuple[object, ...] = (1, 1.0)
_NEVER: tuple[object, ...] = ()

# Field -> its values that change nothing. Null counts as absent everywhere.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    # tools
    "tools": _EMPTY,
    "functions": _EMPTY,
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    # constrained output
    "response_format": ({"type": "text"},),
    "structured_outputs": _EMPTY,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "json_schema": _NEVER,
    "regex": _NEVER,
    "ebnf": _NEVER,
    "grammar": _EMPTY,
    "guideline": _NEVER,
    # adapters beyond a single id
    "merged_adapters": _NEVER,
    "adapter_source": _NEVER,
    "lora": _EMPTY,
    # OctoAI's nested object of before ``peft``: adapters, and fields that are now beside it
    "octoai": _EMPTY,
    # prompt and template; only completions echo
    "echo": _OFF,
    "suffix": _EMPTY,
    "input_ids": _NEVER,
    "chat_template": _EMPTY,
    "chat_template_kwargs": _EMPTY,
    "documents": _EMPTY,
    "tool_prompt": _EMPTY,
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "add_special_tokens": _OFF,
    "truncate_prompt_tokens": _NEVER,
    "truncate": _NEVER,
    # sampling
    "use_beam_search": _OFF,
    "stop_regex": _EMPTY,
    "repetition_detection": _NEVER,
    "repeat_penalty": _ONE,
    "mirostat": _ZERO,
    "dry_multiplier": _ZERO,
    "xtc_probability": _ZERO,
    "samplers": _NEVER,
    "watermark": _OFF,
    "do_sample": (True,),
    "ignore_eos_token": _OFF,
    # length under other names
    "n_predict": _NEVER,
    "max_new_tokens": _NEVER,
    "t_max_predict_ms": _ZERO,
    # reasoning: nothing is taken out of the text
    "reasoning_effort": ("none",),
    "thinking_token_budget": _NEVER,
    "include_reasoning": (True,),
    "separate_reasoning": _OFF,
    "stream_reasoning": (True,),
    "reasoning_format": ("none", "auto"),
    # form of the answer
    "n_probs": _ZERO,
    "logprob_token_ids": _EMPTY,
    "details": _OFF,
    "response_fields": _EMPTY,
    "no_stop_trim": _OFF,
    "verbosity": ("medium",),
    "moderation": _NEVER,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "return_full_text": _OFF,
    "spaces_between_special_tokens": (True,),
    "modalities": (["text"],),
    "audio": _NEVER,
    "web_search_options": _NEVER,
    "priority": _ZERO,
}

_MAX_IGNORED_FIELDS = 16
_MAX_FIELD_NAME_CHARACTERS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Exact:
    """A value that equals only values of its own type, so that False is not 0."""

    kind: type
    value: object


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Check the fields that no schema of ours has.

    Args:
        body: the request's fields that its schema lacks, without those that are null.

    Raises:
        InvalidRequestError: naming a field that would change the answer.
    """
    for field in sorted(_NEUTRAL_VALUES.keys() & body.keys()):
        if not _is_neutral(field, body[field]):
            raise InvalidRequestError(field, "this value is not supported by this server")


def find_ignored(names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of fields that have no effect here, sorted: few, and only harmless ones.

    They are told to the caller, also in a header, and never logged: a caller wrote them.

    Args:
        names: fields of a request that its schema does not have.
    """
    ignored = filter(_is_harmless, sorted(names.keys() - _NEUTRAL_VALUES.keys()))
    return tuple(itertools.islice(ignored, _MAX_IGNORED_FIELDS))


def _is_harmless(name: str) -> bool:
    """Whether a name may stand in a header."""
    is_short = len(name) <= _MAX_FIELD_NAME_CHARACTERS
    return is_short and name.isascii() and name.replace("-", "_").isidentifier()


def _is_neutral(field: str, value: object) -> bool:
    return _exact(value) in [_exact(neutral) for neutral in _NEUTRAL_VALUES[field]]


def _exact(value: object) -> _Exact:
    return _Exact(type(value), value)
