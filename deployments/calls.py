"""The call that crosses a handle from Ingress to ModelReplica: the one written schema.

A plain dict, so that both sides may run different versions. Built by ``deployments.translate``
after validation, read here into a ``GenerationRequest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

from models.requests import ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from sampling.params import SamplingParams


class ChatPromptRecord(TypedDict):
    """Messages for the chat template; the rest is ChatPrompt's."""

    kind: Literal["chat"]
    messages: list[dict[str, Any]]
    add_generation_prompt: NotRequired[bool]
    continue_final_message: NotRequired[bool]
    template_variables: NotRequired[dict[str, Any]]
    template: NotRequired[str]


class TextPromptRecord(TypedDict):
    """Plain text; see TextPrompt."""

    kind: Literal["text"]
    text: str
    add_special_tokens: NotRequired[bool]
    suffix: NotRequired[str]


class TokenPromptRecord(TypedDict):
    """Token ids."""

    kind: Literal["tokens"]
    token_ids: list[int]


PromptRecord = ChatPromptRecord | TextPromptRecord | TokenPromptRecord


class GenerationCall(TypedDict):
    """One prompt to continue.

    ``sampling`` holds the fields of SamplingParams that differ from their defaults;
    ``max_tokens`` counts only with ``is_max_tokens_explicit``. ``bad_words`` are texts, which the
    replica tokenises. ``timeout_s`` is None for a request that names no time limit of its own.
    ``num_prompt_logprobs`` and ``is_prompt_reported`` are GenerationRequest's. ``adapter_id``
    keeps the grammar; None, and none at all, is the base model.
    """

    request_id: str
    prompt: PromptRecord
    sampling: dict[str, Any]
    is_max_tokens_explicit: bool
    seed: int
    num_choices: int
    stop: list[str]
    is_stop_included: bool
    is_special_token_skipped: bool
    bad_words: list[str]
    cache_salt: str | None
    timeout_s: float | None
    num_prompt_logprobs: int | None
    is_prompt_reported: bool
    adapter_id: NotRequired[str | None]


def to_generation_request(
    call: GenerationCall,
    *,
    bad_words_token_ids: Sequence[tuple[int, ...]] = (),
    default_timeout_s: float | None = None,
) -> GenerationRequest:
    """Return the engine's form of a call.

    Args:
        call: as an ingress built it.
        bad_words_token_ids: the tokens of its ``bad_words``.
        default_timeout_s: the time limit of a call that names none; None sets no limit.

    Raises:
        InvalidSamplingParamsError: a parameter is out of range (an ingress refuses it before).
    """
    return GenerationRequest(
        request_id=call["request_id"],
        prompt=to_prompt(call["prompt"]),
        sampling=SamplingParams(
            **{name: _freeze(value) for name, value in call["sampling"].items()},
            bad_words_token_ids=tuple(bad_words_token_ids),
        ),
        seed=call["seed"],
        is_max_tokens_explicit=call["is_max_tokens_explicit"],
        num_choices=call["num_choices"],
        stop=tuple(call["stop"]),
        is_stop_included=call["is_stop_included"],
        is_special_token_skipped=call["is_special_token_skipped"],
        cache_salt=call["cache_salt"],
        timeout_s=default_timeout_s if call["timeout_s"] is None else call["timeout_s"],
        num_prompt_logprobs=call["num_prompt_logprobs"],
        is_prompt_reported=call["is_prompt_reported"],
        adapter_id=call.get("adapter_id"),
    )


def to_prompt(record: PromptRecord) -> Prompt:
    """Return the engine's form of a prompt."""
    if record["kind"] == "chat":
        return ChatPrompt(
            messages=tuple(record["messages"]),
            add_generation_prompt=record.get("add_generation_prompt", True),
            continue_final_message=record.get("continue_final_message", False),
            template_variables=record.get("template_variables", {}),
            template=record.get("template", ""),
        )
    if record["kind"] == "text":
        return TextPrompt(
            text=record["text"],
            add_special_tokens=record.get("add_special_tokens", True),
            suffix=record.get("suffix", ""),
        )
    return TokenPrompt(token_ids=tuple(record["token_ids"]))


def _freeze(value: Any) -> Any:
    """Return a value with tuples for lists, as SamplingParams holds them."""
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value
