"""The requests of the HTTP API as pydantic models: which fields, which types, which bounds.

Values are typed strictly (no "5" for 5, no true for 1), bounded before anything is allocated for
them, and null is the same as absent. What a value means is ``deployments.translate``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PlainValidator, ValidationError, model_validator

from deployments.adapter_names import AdapterSelector, read_selectors
from deployments.agent_fields import AgentFields, read_agent_body
from deployments.answer_form import LogprobScope
from deployments.messages import ChatMessage
from deployments.unsupported import find_ignored, refuse_unsupported
from deployments.wire_model import WireModel
from deployments.wire_values import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_TEMPLATE_CHARACTERS,
    PromptItem,
    explain,
    read_logit_bias,
    read_metadata,
    read_prompts,
    read_stop,
    read_template_variables,
)
from models.errors import InvalidRequestError
from sampling.params import MAX_TOP_LOGPROBS

_INT32_MAX = 2**31 - 1
_MAX_TIMEOUT_S = 86_400
# OpenAI's and OctoAI's bound for completions; chats have 20.
_MAX_COMPLETION_LOGPROBS = 5

Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(read_logit_bias)]
Stop = Annotated[tuple[str, ...], PlainValidator(read_stop)]
Metadata = Annotated[Mapping[str, str], PlainValidator(read_metadata)]
Prompts = Annotated[tuple[PromptItem, ...], PlainValidator(read_prompts)]
TemplateVariables = Annotated[Mapping[str, Any], PlainValidator(read_template_variables)]


class StreamOptions(WireModel):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationFields(WireModel):
    """Fields that both operations have; an absent one is None and leaves the default alone.

    Ranges that ``sampling.params`` knows are checked there, when the parameters are built.

    ``timeout_s`` is an extension: seconds, above 0 and at most a day, that the request has from its
    arrival at a replica of the model until its last token (each prompt of several for itself);
    then it ends with DeadlineExceededError. The wait for a replica does not count. Absent, the
    model's ``request_timeout_s`` of the configuration applies.

    ``best_of`` generates that many choices and tells the ``n`` with the highest mean log
    probability per token, best first; the usage counts all of them. ``bad_words`` are texts that
    the output must not hold, directly behind other text or behind a space. An empty list of
    ``bad_words`` or ``allowed_token_ids`` asks for nothing.

    Log probabilities of the prompt come in three ways, with the same numbers: those of the raw
    distribution, none for the first token, -9999.0 for minus infinity. None goes with a stream.
    ``loglikelihood`` (OctoAI) puts them in each choice's ``logprobs``, which then has the prompt's
    tokens but the first and no drawn one; ``logprobs`` and ``top_logprobs`` say how many
    alternatives each has. ``prompt_logprobs`` (vLLM) is the number of alternatives in a list of
    its own. The third is ``echo`` with ``logprobs`` (see CompletionRequest).

    ``peft`` names an adapter; ``adapter_id`` (LoRAX) and ``lora_path`` (SGLang, here an id and no
    path) are other names of it, and "" names none. ``model`` may name one too, as
    ``<base>:<adapter>`` or by its id alone. Those that are given must agree.
    """

    # What the operation's prompt is called.
    prompt_param: ClassVar[str]

    model: Annotated[str, Field(max_length=512)]
    peft: str = ""
    adapter_id: str = ""
    lora_path: str = ""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=_INT32_MAX)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] = Field(
        default_factory=list
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool | None = None
    loglikelihood: bool = False
    prompt_logprobs: NumTopLogprobs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)] | None = None
    log_prompt: bool = False
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        read_selectors(self._selectors)
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only allowed with stream=true")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError("best_of", f"{self.best_of} is less than n ({self.n})")
        if self.stream and self.num_candidates > self.n:
            raise InvalidRequestError("best_of", "more than n is not allowed with stream=true")
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.loglikelihood and self.is_prompt_echoed and self.num_top_logprobs is not None:
            raise InvalidRequestError(
                "loglikelihood",
                "is not allowed with echo and logprobs: both say what the same list holds",
            )
        asking = {
            "loglikelihood": self.loglikelihood,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "echo": self.logprob_scope is LogprobScope.ALL,
        }
        for field, is_asking in asking.items():
            if is_asking and self.stream:
                raise InvalidRequestError(
                    field, "log probabilities of the prompt are not allowed with stream=true"
                )
        return self

    @property
    def adapter_selector(self) -> AdapterSelector | None:
        """The field beside ``model`` that names an adapter, if one does."""
        return read_selectors(self._selectors)

    @property
    def _selectors(self) -> Mapping[str, str]:
        return {
            "peft": self.peft,
            "adapter_id": self.adapter_id,
            "lora_path": self.lora_path,
        }

    @property
    def has_stream_usage(self) -> bool:
        """Whether the stream ends with a usage event."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_candidates(self) -> int:
        """How many choices are generated of each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        raise NotImplementedError

    @property
    def is_prompt_echoed(self) -> bool:
        """Whether each choice's text begins with its prompt."""
        return False

    @property
    def logprob_scope(self) -> LogprobScope:
        """Whose log probabilities stand in each choice."""
        if self.loglikelihood:
            return LogprobScope.PROMPT
        if self.num_top_logprobs is None:
            return LogprobScope.NONE
        return LogprobScope.ALL if self.is_prompt_echoed else LogprobScope.OUTPUT

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of fields of the request that have no effect, as they are told."""
        return find_ignored(self.model_extra or {})


class ChatRequest(GenerationFields, AgentFields):
    """Body of POST /v1/chat/completions.

    ``continue_final_message`` leaves the last message open for the model to go on with;
    ``add_generation_prompt`` (the default) opens a new turn; they exclude each other.
    ``chat_template_kwargs`` are further variables of the chat template; ``chat_template`` takes its
    place, where the operator allows it.

    ``logprobs`` is a boolean and nothing else: a client that sends 1 means the completions' number
    (OctoAI's evaluation client does so, and asks there), so it is refused rather than guessed.
    """

    prompt_param: ClassVar[str] = "messages"

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    logprobs: bool = False
    top_logprobs: NumTopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARACTERS)] = ""

    @model_validator(mode="after")
    def _check_final_message(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "is not allowed with add_generation_prompt=true"
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "is only allowed with logprobs=true")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def opens_new_turn(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of fields of the request that have no effect, as they are told."""
        return (*self.agent_fields_without_effect, *super().ignored_fields)


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions.

    ``logprobs`` is the number of alternatives, 0 to 5. With ``echo`` each choice's text begins with
    its prompt (a text as it was sent, token ids as the tokenizer spells them), and with
    ``logprobs`` besides, its log probabilities begin with the prompt's: in OpenAI's lists null for
    the first token, which ``content`` leaves out. With ``echo`` a limit of 0 new tokens is allowed.
    ``add_special_tokens`` puts what the tokenizer begins a text with (BOS) before a prompt of text.
    With ``suffix`` a model that has tokens for it fills in what is between prompt and suffix.
    """

    prompt_param: ClassVar[str] = "prompt"

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: str = ""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        num_choices = len(self.prompt) * self.num_candidates
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                "prompt",
                f"{len(self.prompt)} prompts with {self.num_candidates} choices each make "
                f"{num_choices}; at most {MAX_CHOICES} are allowed",
            )
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        if self.suffix and self.echo:
            raise InvalidRequestError("suffix", "is not allowed with echo=true")
        if self.suffix and not all(isinstance(item, str) for item in self.prompt):
            raise InvalidRequestError("suffix", "is only allowed with prompts of text")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        for field in ("max_tokens", "max_completion_tokens"):
            if getattr(self, field) == 0 and not self.echo:
                raise InvalidRequestError(field, "0 is only allowed with echo=true")
        return self

    @property
    def is_prompt_echoed(self) -> bool:
        """Whether each choice's text begins with its prompt."""
        return self.echo

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives are reported per token; None reports no log probabilities."""
        return self.logprobs


_Request = TypeVar("_Request", bound=GenerationFields)


def parse_chat_request(body: object, *, is_agent: bool = False) -> ChatRequest:
    """Validate the body of a chat request.

    Args:
        body: what JSON gave.
        is_agent: it is for an agent (DigitalOcean's ``agent=true``): some zeros count as absent,
            and ``model`` may be.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
    """
    if is_agent and isinstance(body, dict):
        body = read_agent_body(body)
    return _parse(ChatRequest, body)


def parse_completion_request(body: object) -> CompletionRequest:
    """Validate the body of a completion request.

    Args:
        body: what JSON gave.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
    """
    return _parse(CompletionRequest, body)


def _parse(kind: type[_Request], body: object) -> _Request:
    if not isinstance(body, dict):
        raise InvalidRequestError("", "the request body must be a JSON object")
    if len(body) > MAX_FIELDS:
        raise InvalidRequestError(
            "", f"the request body has {len(body)} fields; at most {MAX_FIELDS} are allowed"
        )
    fields = {name: value for name, value in body.items() if value is not None}
    if not all(isinstance(name, str) for name in fields):
        raise InvalidRequestError("", "the names of all fields must be strings")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from None
    refuse_unsupported({name: fields[name] for name in fields.keys() - kind.model_fields.keys()})
    return request
