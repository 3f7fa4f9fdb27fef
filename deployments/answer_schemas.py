"""The answers of the HTTP API as types: what /openapi.json says of them, and tests check.

``deployments.responses`` and its like build them; nothing here is called on the way of a request.
A key that may be missing is NotRequired; every other one is always there.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config

# The one of typing is not enough for pydantic in Python 3.11.
from typing_extensions import TypedDict


def _leave_open(schema: dict[str, Any]) -> None:
    """Promise callers no closed objects: a later release may tell more."""
    schema.pop("additionalProperties", None)


# Of an answer's type: a test that validates an answer finds keys that are described nowhere.
object_type = with_config(ConfigDict(extra="forbid", json_schema_extra=_leave_open))


@object_type
class Alternative(TypedDict):
    """A token and its log probability; -9999.0 stands for minus infinity."""

    token: str
    logprob: float
    bytes: list[int]


@object_type
class TokenLogprob(Alternative):
    """A token of a text, with the most probable ones at its place, best first."""

    top_logprobs: list[Alternative]


@object_type
class ChatLogprobs(TypedDict):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprob]
    refusal: None


@object_type
class CompletionLogprobs(ChatLogprobs):
    """The same in the shape of chats and in that of OpenAI's completions.

    With an echoed prompt the first entries of the last three lists are null and 0: a first token
    has no log probability, and ``content`` leaves it out.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@object_type
class RankedToken(TypedDict):
    """A prompt token as vLLM tells it; ``rank`` counts from 1."""

    logprob: float
    rank: int | None
    decoded_token: str


# Null for the first token, then token id -> what is told of it.
PromptLogprobs = list[dict[str, RankedToken] | None]


@object_type
class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens, those that were found in the prefix cache."""

    cached_tokens: int


@object_type
class CompletionTokensDetails(TypedDict):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int


@object_type
class CacheCreation(TypedDict):
    """DigitalOcean's; always 0."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


@object_type
class Usage(TypedDict):
    """Token counts: the prompt once, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cache_created_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation


FinishReason = Literal["stop", "length", "error"]


@object_type
class AnswerMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: None


@object_type
class ChatChoice(TypedDict):
    """One answer to a chat; ``stop_reason`` is the stop string or token that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@object_type
class Retrieval(TypedDict):
    """An agent's report; there are no knowledge bases here."""

    retrieved_data: list[Any]


@object_type
class Functions(TypedDict):
    """An agent's report; there are no functions of agents here."""

    called_functions: list[Any]


@object_type
class Guardrails(TypedDict):
    """An agent's report; there are no guardrails here."""

    triggered_guardrails: list[Any]


@object_type
class _Extras(TypedDict):
    """What a request brought or asked for."""

    metadata: NotRequired[dict[str, str]]


@object_type
class _ChatExtras(_Extras):
    """What a chat request may ask for besides."""

    retrieval: NotRequired[Retrieval]
    functions: NotRequired[Functions]
    guardrails: NotRequired[Guardrails]


@object_type
class ChatCompletion(_ChatExtras):
    """The answer to a chat request; ``created`` is Unix time in seconds."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


@object_type
class ChatDelta(TypedDict):
    """What is added to a choice: first the role, then pieces of text, at last nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


@object_type
class ChatChunkChoice(TypedDict):
    """One step of a choice; the last one of each has ``finish_reason``."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]


@object_type
class ChatChunk(_ChatExtras):
    """An event of a chat's stream.

    With ``include_usage`` the last event has no choices and the usage, which is null before.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


@object_type
class CompletionChoice(TypedDict):
    """One continuation; ``stop_reason`` is the stop string or token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptLogprobs]


@object_type
class Completion(_Extras):
    """The answer to a completion request; ``created`` is Unix time in seconds."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


@object_type
class CompletionChunkChoice(TypedDict):
    """One step of a continuation; the last one of each has ``finish_reason``."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]


@object_type
class CompletionChunk(_Extras):
    """An event of a completion's stream; usage as in ChatChunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


@object_type
class Model(TypedDict):
    """A base model (``parent`` is null), or an adapter of the one that ``parent`` names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None


@object_type
class ModelList(TypedDict):
    """All that can be named."""

    object: Literal["list"]
    data: list[Model]


@object_type
class Tokens(TypedDict):
    """Token ids; ``token_strs`` are their texts, null unless asked for."""

    count: int
    tokens: list[int]
    token_strs: list[str] | None


@object_type
class DetokenizedText(TypedDict):
    """The text of token ids, special tokens spelled out."""

    prompt: str


@object_type
class Health(TypedDict):
    """Requests would be served."""

    status: Literal["ok"]


@object_type
class Version(TypedDict):
    """The release of Medley that answers."""

    version: str
