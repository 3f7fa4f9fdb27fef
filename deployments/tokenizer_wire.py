"""The requests of /tokenize and /detokenize as pydantic models, in the forms that vLLM has."""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from deployments.adapter_names import AdapterSelector, read_selectors
from deployments.messages import ChatMessage
from deployments.unsupported import refuse_unsupported
from deployments.wire import TemplateVariables, TokenId
from deployments.wire_model import WireModel
from deployments.wire_values import MAX_MESSAGES, explain
from models.errors import InvalidRequestError

# As many as a body of the default size has room for.
_MAX_TOKEN_IDS = 1 << 20


class TokenizerFields(WireModel):
    """Whose tokenizer is meant: that of a model, or what an adapter of it brings.

    Without ``model`` it is the first one's. Adapters are named as in requests that generate.
    """

    model: Annotated[str, Field(max_length=512)] = ""
    peft: str = ""
    adapter_id: str = ""
    lora_path: str = ""

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        _ = self.adapter_selector
        return self

    @property
    def adapter_selector(self) -> AdapterSelector | None:
        """The field beside ``model`` that names an adapter, if one does."""
        return read_selectors(
            {"peft": self.peft, "adapter_id": self.adapter_id, "lora_path": self.lora_path}
        )


class TokenizeRequest(TokenizerFields):
    """Body of POST /tokenize: a text (``prompt``) or a chat (``messages``).

    ``add_special_tokens`` (true unless given) puts what the tokenizer begins a text with (BOS)
    before a text; of a chat the template says all. The fields of the template are those of chat
    requests. With ``return_token_strs`` the answer has the text of each token.
    """

    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "give either prompt or messages")
        if self.messages is None:
            given = self.add_generation_prompt, self.continue_final_message
            if any(given) or self.chat_template_kwargs:
                raise InvalidRequestError("prompt", "has no chat template; give messages instead")
        elif self.add_special_tokens:
            raise InvalidRequestError("add_special_tokens", "is only allowed with prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "is not allowed with add_generation_prompt=true"
            )
        return self

    @property
    def opens_new_turn(self) -> bool:
        """Whether the tokens end with the opening of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class DetokenizeRequest(TokenizerFields):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=_MAX_TOKEN_IDS, fail_fast=True)]


_Request = TypeVar("_Request", bound=TokenizerFields)


def parse_tokenizer_request(kind: type[_Request], body: object) -> _Request:
    """Validate a body; null means absent.

    Args:
        kind: which of the two requests it is.
        body: what JSON gave.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("", "the request body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from None
    refuse_unsupported({name: fields[name] for name in fields.keys() - kind.model_fields.keys()})
    return request
