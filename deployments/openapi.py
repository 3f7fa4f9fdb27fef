"""/openapi.json: assembled from the table of operations, the types and the table of errors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from deployments.error_schemas import ErrorBody, ErrorEvent
from deployments.http_errors import ERROR_TABLE
from deployments.openapi_operations import (
    ADMIN_OPERATIONS,
    ADMIN_REQUEST_TYPES,
    AGENT_REQUEST_NAME,
    JSON,
    OPERATIONS,
    REQUEST_TYPES,
    Operation,
)
from deployments.openapi_schemas import make_agent_schema, make_schemas
from deployments.release import VERSION
from deployments.spending import Unit
from deployments.wire import ChatRequest

Document = dict[str, Any]

_DESCRIPTION = (
    "LLM serving on Ray Serve in which every request may name its own PEFT adapter. "
    "The chat completions of OctoAI and DigitalOcean, and what clients of OpenAI expect. "
    "Null counts as absent for every optional field of a body."
)
_KEY_SCHEME = "bearerKey"
_EVENT_STREAM = "text/event-stream"
_HEADERS: dict[str, Document] = {
    "x-request-id": {
        "description": "The caller's, or a new one; errors and the log name it.",
        "schema": {"type": "string"},
    },
    "openai-processing-ms": {
        "description": "Milliseconds until the headers went out.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "openai-version": {
        "description": "The version of OpenAI's API.",
        "schema": {"type": "string"},
    },
    "x-medley-ignored-fields": {
        "description": "Fields of the body that had no effect.",
        "schema": {"type": "string"},
    },
    "x-medley-adapter-version": {
        "description": "Version of the adapter's weights.",
        "schema": {"type": "string"},
    },
    "retry-after": {
        "description": "Seconds after which a repeat may succeed.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-should-retry": {
        "description": "`false` where a repeat cannot help.",
        "schema": {"type": "string", "enum": ["false"]},
    },
    "www-authenticate": {
        "description": "The scheme of the key.",
        "schema": {"type": "string"},
    },
    "allow": {
        "description": "The methods that the path has.",
        "schema": {"type": "string"},
    },
}
# Sent where the caller's key has a limit.
_BUDGET_HEADERS: dict[str, Document] = {
    **{
        f"x-ratelimit-{figure}-{unit}": {
            "description": f"Of the key's {unit} of a minute: {what}.",
            "schema": {"type": kind},
        }
        for unit in (Unit.REQUESTS, Unit.TOKENS)
        for figure, what, kind in (
            ("limit", "how many there are", "integer"),
            ("remaining", "how many are left", "integer"),
            ("reset", "the time until all are back, such as `1m2s`", "string"),
        )
    },
    "ratelimit-limit": {
        "description": "Requests of a minute that the key has.",
        "schema": {"type": "integer"},
    },
    "ratelimit-remaining": {
        "description": "How many of them are left.",
        "schema": {"type": "integer"},
    },
    "ratelimit-reset": {
        "description": "Unix time in seconds at which the first of them comes back.",
        "schema": {"type": "integer"},
    },
}
_ALWAYS_SENT = ("x-request-id", "openai-processing-ms", "openai-version")
_SENT_WITH_ANSWERS = ("x-medley-ignored-fields", "x-medley-adapter-version")
_SENT_WITH_ERRORS: dict[HTTPStatus, tuple[str, ...]] = {
    HTTPStatus.UNAUTHORIZED: ("www-authenticate",),
    HTTPStatus.METHOD_NOT_ALLOWED: ("allow",),
    HTTPStatus.REQUEST_TIMEOUT: ("x-should-retry",),
    HTTPStatus.TOO_MANY_REQUESTS: ("retry-after", "x-should-retry"),
    HTTPStatus.INTERNAL_SERVER_ERROR: ("x-should-retry",),
    HTTPStatus.SERVICE_UNAVAILABLE: ("retry-after",),
}


@functools.cache
def build_openapi(*, has_admin: bool) -> Document:
    """Return the document; equal arguments return the same one, which nobody changes.

    Takes tens of milliseconds the first time.

    Args:
        has_admin: tell of the admin routes too.
    """
    operations = (*OPERATIONS, *(ADMIN_OPERATIONS if has_admin else ()))
    requests = (*REQUEST_TYPES, *(ADMIN_REQUEST_TYPES if has_admin else ()))
    paths: dict[str, Document] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    statuses = sorted({status for operation in operations for status in operation.errors})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Medley", "version": VERSION, "description": _DESCRIPTION},
        "tags": [{"name": name} for name in dict.fromkeys(o.tag for o in operations)],
        "paths": paths,
        "components": {
            "schemas": _make_components(operations, requests),
            "responses": {_response_name(status): _describe_error(status) for status in statuses},
            "headers": {**_HEADERS, **_BUDGET_HEADERS},
            "securitySchemes": {_KEY_SCHEME: {"type": "http", "scheme": "bearer"}},
        },
    }


def _make_components(operations: Iterable[Operation], requests: Iterable[type]) -> Document:
    types = [kind for o in operations for kind in (o.answer, o.event) if kind is not None]
    schemas = make_schemas(requests, [*dict.fromkeys(types), ErrorBody, ErrorEvent])
    schemas[AGENT_REQUEST_NAME] = make_agent_schema(schemas[ChatRequest.__name__])
    return schemas


def _describe(operation: Operation) -> Document:
    key: Document = {_KEY_SCHEME: []}
    described: Document = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        # Whether others want a key is the server's configuration.
        "security": [key] if operation.is_admins else [{}, key],
        "responses": {
            "200": _describe_answer(operation),
            **{
                str(status.value): {"$ref": f"#/components/responses/{_response_name(status)}"}
                for status in sorted(operation.errors)
            },
        },
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _ref(operation.body)}},
        }
    return described


def _describe_answer(operation: Operation) -> Document:
    is_object = operation.media_type == JSON
    shape: Document = {"type": "object" if is_object else "string"}
    if operation.answer is not None:
        shape = _ref(operation.answer.__name__)
    content: Document = {operation.media_type: {"schema": shape}}
    if operation.event is not None:
        content[_EVENT_STREAM] = {
            # Without a type: to some readers it is the whole text, to others an event.
            "schema": {
                "description": (
                    f"Server-sent events, if `stream` is true: each is `data: ` and one "
                    f"{operation.event.__name__}; the last one is `data: [DONE]`. A stream that "
                    f"fails ends with one {ErrorEvent.__name__} instead."
                ),
            },
            "x-event-schema": _ref(operation.event.__name__),
            "x-error-event-schema": _ref(ErrorEvent.__name__),
        }
    names = _ALWAYS_SENT + (_SENT_WITH_ANSWERS if operation.event is not None else ())
    return {"description": "The answer.", "headers": _header_refs(names), "content": content}


def _describe_error(status: HTTPStatus) -> Document:
    codes = dict.fromkeys(row.code for row in ERROR_TABLE.values() if row.status == status)
    return {
        "description": f"{status.phrase}. Codes: {', '.join(f'`{code}`' for code in codes)}.",
        "headers": _header_refs(_ALWAYS_SENT + _SENT_WITH_ERRORS.get(status, ())),
        "content": {JSON: {"schema": _ref(ErrorBody.__name__)}},
    }


def _header_refs(names: Iterable[str]) -> Document:
    told = (*names, *_BUDGET_HEADERS)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in told}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _response_name(status: HTTPStatus) -> str:
    return f"Error{status.value}"
