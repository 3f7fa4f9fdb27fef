"""What /openapi.json tells of each operation: the table that a new route gets a row in."""

from __future__ import annotations

import dataclasses
from http import HTTPStatus
from typing import Any

from deployments import answer_schemas as answers
from deployments.admin_routes import ActionBody, LoadLoraBody, UnloadLoraBody
from deployments.admin_service import AdapterAction
from deployments.paths import (
    AGENT_PATHS,
    CHAT_PATH,
    COMPLETION_PATH,
    DETOKENIZE_PATH,
    DOCS_PATH,
    HEALTH_PATH,
    MODELS_PATH,
    OPENAPI_PATH,
    TOKENIZE_PATH,
    VERSION_PATH,
)
from deployments.tokenizer_wire import DetokenizeRequest, TokenizeRequest
from deployments.wire import ChatRequest, CompletionRequest

AGENT_REQUEST_NAME = "AgentChatRequest"
JSON = "application/json"

_ALWAYS = (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.INTERNAL_SERVER_ERROR)
_KEYED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, *_ALWAYS)
_LOOKED_UP = (*_KEYED, HTTPStatus.SERVICE_UNAVAILABLE)
_WITH_BODY = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    *_LOOKED_UP,
)
_GENERATING = (*_WITH_BODY, HTTPStatus.REQUEST_TIMEOUT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        method: in small letters.
        path: as the document writes it.
        name: unique; client generators make method names of it.
        summary: one sentence.
        tag: the section of the page that it stands in.
        errors: statuses that it may have besides 200.
        body: name of the schema of its body; "" if it has none.
        answer: type of its answer; None if that is no JSON, or of no fixed shape.
        media_type: of its answer.
        event: type of the events of its stream; None if it never streams.
        parameters: of path and query.
        is_admins: it wants the admin's key.
    """

    method: str
    path: str
    name: str
    summary: str
    tag: str
    errors: tuple[HTTPStatus, ...]
    body: str = ""
    answer: type | None = None
    media_type: str = JSON
    event: type | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    is_admins: bool = False


def _agent_parameter(*, default: bool) -> dict[str, Any]:
    return {
        "name": "agent",
        "in": "query",
        "description": "The request is for an agent, which has one model whatever `model` says.",
        "schema": {"type": "boolean", "default": default},
    }


def _chat(path: str, name: str, *, is_agents: bool) -> Operation:
    return Operation(
        method="post",
        path=path,
        name=name,
        summary="Continue a conversation" + (", as an agent of DigitalOcean." * is_agents or "."),
        tag="Generation",
        errors=_GENERATING,
        body=AGENT_REQUEST_NAME if is_agents else ChatRequest.__name__,
        answer=answers.ChatCompletion,
        event=answers.ChatChunk,
        parameters=(_agent_parameter(default=is_agents),),
    )


OPERATIONS: tuple[Operation, ...] = (
    _chat(CHAT_PATH, "createChatCompletion", is_agents=False),
    *(
        _chat(path, f"createAgentChatCompletion{index}", is_agents=True)
        for index, path in enumerate(AGENT_PATHS, start=1)
    ),
    Operation(
        method="post",
        path=COMPLETION_PATH,
        name="createCompletion",
        summary="Continue texts.",
        tag="Generation",
        errors=_GENERATING,
        body=CompletionRequest.__name__,
        answer=answers.Completion,
        event=answers.CompletionChunk,
    ),
    Operation(
        method="get",
        path=MODELS_PATH,
        name="listModels",
        summary="List base models and adapters.",
        tag="Models",
        errors=_LOOKED_UP,
        answer=answers.ModelList,
    ),
    Operation(
        method="get",
        path=f"{MODELS_PATH}/{{model_id}}",
        name="getModel",
        summary="Look up a base model or an adapter.",
        tag="Models",
        errors=(HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, *_LOOKED_UP),
        answer=answers.Model,
        parameters=(
            {
                "name": "model_id",
                "in": "path",
                "required": True,
                "description": "As in the field `model`. Slashes need not be escaped.",
                "schema": {"type": "string", "minLength": 1},
            },
        ),
    ),
    Operation(
        method="post",
        path=TOKENIZE_PATH,
        name="tokenize",
        summary="Make tokens of a text or a chat.",
        tag="Tokens",
        errors=_WITH_BODY,
        body=TokenizeRequest.__name__,
        answer=answers.Tokens,
    ),
    Operation(
        method="post",
        path=DETOKENIZE_PATH,
        name="detokenize",
        summary="Make text of tokens.",
        tag="Tokens",
        errors=_WITH_BODY,
        body=DetokenizeRequest.__name__,
        answer=answers.DetokenizedText,
    ),
    Operation(
        method="get",
        path=HEALTH_PATH,
        name="getHealth",
        summary="Tell whether requests would be served.",
        tag="Service",
        errors=(*_ALWAYS, HTTPStatus.SERVICE_UNAVAILABLE),
        answer=answers.Health,
    ),
    Operation(
        method="get",
        path=VERSION_PATH,
        name="getVersion",
        summary="Tell which release answers.",
        tag="Service",
        errors=_ALWAYS,
        answer=answers.Version,
    ),
    Operation(
        method="get",
        path=OPENAPI_PATH,
        name="getOpenapi",
        summary="Describe this API.",
        tag="Service",
        errors=_ALWAYS,
    ),
    Operation(
        method="get",
        path=DOCS_PATH,
        name="getDocs",
        summary="Show this description as a page.",
        tag="Service",
        errors=_ALWAYS,
        media_type="text/html",
    ),
)


def _admin(method: str, path: str, name: str, summary: str, **rest: Any) -> Operation:
    return Operation(
        method=method,
        path=path,
        name=name,
        summary=summary,
        tag="Administration",
        is_admins=True,
        **rest,
    )


ADMIN_OPERATIONS: tuple[Operation, ...] = (
    _admin(
        "get",
        "/admin/adapters",
        "listResidentAdapters",
        "Tell what every replica holds.",
        errors=_LOOKED_UP,
    ),
    *(
        _admin(
            "post",
            f"/admin/adapters/{action}",
            f"{action}Adapter",
            f"{action.capitalize()} an adapter in every replica of its model.",
            errors=_WITH_BODY,
            body=ActionBody.__name__,
        )
        for action in AdapterAction
    ),
    _admin(
        "post",
        "/v1/load_lora_adapter",
        "loadLoraAdapter",
        "Load an adapter, as vLLM has it.",
        errors=_WITH_BODY,
        body=LoadLoraBody.__name__,
        media_type="text/plain",
    ),
    _admin(
        "post",
        "/v1/unload_lora_adapter",
        "unloadLoraAdapter",
        "Unload an adapter, as vLLM has it.",
        errors=_WITH_BODY,
        body=UnloadLoraBody.__name__,
        media_type="text/plain",
    ),
)

REQUEST_TYPES: tuple[type, ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
ADMIN_REQUEST_TYPES: tuple[type, ...] = (ActionBody, LoadLoraBody, UnloadLoraBody)
