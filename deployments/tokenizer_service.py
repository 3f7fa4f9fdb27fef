"""What /tokenize and /detokenize do: from a body to an answer, by the models' replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from deployments.api_keys import EVERYTHING, Grants
from deployments.calls import ChatPromptRecord, TextPromptRecord
from deployments.limits import RequestLimits
from deployments.model_directory import ModelDirectory, Selection
from deployments.ray_errors import unwrap_ray_error
from deployments.tokenizer_calls import DetokenizeCall, TokenizeCall
from deployments.tokenizer_wire import (
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerFields,
    parse_tokenizer_request,
)
from models.errors import InvalidRequestError

_Request = TypeVar("_Request", bound=TokenizerFields)


class OptionsHandle(Protocol):
    """What is used of a Serve handle."""

    def options(self, **options: Any) -> Any:
        """Return the handle with other options."""
        ...


class TokenizerService:
    """Validates requests and asks one replica of the model, which has the tokenizer.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self,
        handles: Mapping[str, OptionsHandle],
        directory: ModelDirectory,
        limits: RequestLimits,
    ) -> None:
        """Prepare the handles.

        Args:
            handles: model id -> handle of its deployment.
            directory: looks up what a request means.
            limits: of requests.
        """
        self._tokenize = _bind(handles, "tokenize")
        self._detokenize = _bind(handles, "detokenize")
        self._directory = directory
        self._limits = limits

    async def tokenize(self, body: object, grants: Grants = EVERYTHING) -> dict[str, Any]:
        """Return the tokens of a text or a chat.

        Args:
            body: of POST /tokenize.
            grants: what the caller may name.

        Raises:
            ModelServiceError: what HTTP tells as an error.
        """
        request = self._read(TokenizeRequest, body)
        if len(request.messages or ()) > self._limits.max_messages:
            raise InvalidRequestError(
                "messages", f"at most {self._limits.max_messages} messages are allowed"
            )
        selection = await self._select(request, grants)
        record = await _call(
            self._tokenize[selection.model_id],
            TokenizeCall(
                prompt=_to_prompt_record(request),
                adapter_id=selection.adapter_id,
                has_texts=request.return_token_strs,
            ),
        )
        token_ids = record["token_ids"]
        return {"count": len(token_ids), "tokens": token_ids, "token_strs": record["texts"]}

    async def detokenize(self, body: object, grants: Grants = EVERYTHING) -> dict[str, Any]:
        """Return the text of token ids.

        Args:
            body: of POST /detokenize.
            grants: what the caller may name.

        Raises:
            ModelServiceError: what HTTP tells as an error.
        """
        request = self._read(DetokenizeRequest, body)
        selection = await self._select(request, grants)
        call = DetokenizeCall(token_ids=request.tokens, adapter_id=selection.adapter_id)
        try:
            text = await _call(self._detokenize[selection.model_id], call)
        except InvalidRequestError as error:
            # The tokenizer knows no other name for what it is given.
            param = "tokens" if error.param == "prompt" else error.param
            raise InvalidRequestError(param, error.reason) from None
        return {"prompt": text}

    def _read(self, kind: type[_Request], body: object) -> _Request:
        request = parse_tokenizer_request(kind, body)
        self._limits.check_depth(body)
        return request

    async def _select(self, request: TokenizerFields, grants: Grants) -> Selection:
        # Without a name it is the first model, as an agent's is.
        return await self._directory.select(
            request.model, request.adapter_selector, is_agent=not request.model, grants=grants
        )


def _bind(handles: Mapping[str, OptionsHandle], method: str) -> dict[str, Any]:
    return {name: handle.options(method_name=method) for name, handle in handles.items()}


async def _call(handle: Any, call: TokenizeCall | DetokenizeCall) -> Any:
    try:
        return await handle.remote(call)
    except Exception as error:  # noqa: BLE001 - raised again, as what it means
        raise unwrap_ray_error(error) from None


def _to_prompt_record(request: TokenizeRequest) -> ChatPromptRecord | TextPromptRecord:
    if request.messages is None:
        return {
            "kind": "text",
            "text": request.prompt or "",
            "add_special_tokens": request.add_special_tokens is not False,
        }
    return {
        "kind": "chat",
        "messages": [message.to_template() for message in request.messages],
        "add_generation_prompt": request.opens_new_turn,
        "continue_final_message": request.continue_final_message,
        "template_variables": dict(request.chat_template_kwargs),
    }
