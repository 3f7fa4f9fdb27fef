"""The requests of the HTTP API as pydantic models: which fields, which types, which bounds.

Values are typed strictly (no "5" for 5, no true for 1), bounded before anything is allocated for
them, and null is the same as absent. What a value means is ``deployments.translate``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.unsupported import find_ignored, refuse_unsupported
from deployments.wire_values import (
    MAX_CHOICES,
    MAX_MESSAGES,
    PromptItem,
    explain,
    read_content,
    read_logit_bias,
    read_metadata,
    read_prompts,
    read_stop,
    wire_error,
)
from models.errors import InvalidRequestError
from sampling.params import MAX_TOP_LOGPROBS

_INT32_MAX = 2**31 - 1
_MAX_TIMEOUT_S = 86_400

Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(read_logit_bias)]
Stop = Annotated[tuple[str, ...], PlainValidator(read_stop)]
Metadata = Annotated[Mapping[str, str], PlainValidator(read_metadata)]
Prompts = Annotated[tuple[PromptItem, ...], PlainValidator(read_prompts)]
Content = Annotated[str, PlainValidator(read_content)]


class WireModel(BaseModel):
    """What all parts of a request share."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class StreamOptions(WireModel):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class ChatMessage(WireModel):
    """One message; several text parts have become one text."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @field_validator("tool_calls")
    @classmethod
    def _refuse_tool_calls(cls, value: Any) -> None:
        if value:
            raise wire_error("tool calls are not supported by this server")


class GenerationFields(WireModel):
    """Fields that both operations have; an absent one is None and leaves the default alone.

    Ranges that ``sampling.params`` knows are checked there, when the parameters are built.

    ``timeout_s`` is an extension: seconds, above 0 and at most a day, that the request has from its
    arrival at a replica of the model until its last token (each prompt of several for itself);
    then it ends with DeadlineExceededError. The wait for a replica does not count. Absent, the
    model's ``request_timeout_s`` of the configuration applies.
    """

    # What the operation's prompt is called.
    prompt_param: ClassVar[str]

    model: Annotated[str, Field(max_length=512)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=_INT32_MAX)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)] | None = None
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only allowed with stream=true")
        return self

    @property
    def has_stream_usage(self) -> bool:
        """Whether the stream ends with a usage event."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        raise NotImplementedError

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of fields of the request that have no effect, as they are told."""
        return find_ignored(self.model_extra or {})


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    logprobs: bool = False
    top_logprobs: NumTopLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "is only allowed with logprobs=true")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    prompt_param: ClassVar[str] = "prompt"

    prompt: Prompts
    logprobs: NumTopLogprobs | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        num_choices = len(self.prompt) * self.n
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                "prompt",
                f"{len(self.prompt)} prompts with n={self.n} make {num_choices} choices; "
                f"at most {MAX_CHOICES} are allowed",
            )
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        return self.logprobs


_Request = TypeVar("_Request", bound=GenerationFields)


def parse_chat_request(body: object) -> ChatRequest:
    """Validate the body of a chat request.

    Args:
        body: what JSON gave.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
        AdapterNotFoundError: an adapter is named; none is served.
    """
    return _parse(ChatRequest, body)


def parse_completion_request(body: object) -> CompletionRequest:
    """Validate the body of a completion request.

    Args:
        body: what JSON gave.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
        AdapterNotFoundError: an adapter is named; none is served.
    """
    return _parse(CompletionRequest, body)


def _parse(kind: type[_Request], body: object) -> _Request:
    if not isinstance(body, dict):
        raise InvalidRequestError("", "the request body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    if not all(isinstance(name, str) for name in fields):
        raise InvalidRequestError("", "the names of all fields must be strings")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from None
    refuse_unsupported(fields)
    return request
