"""The one table from errors to HTTP: status, type, code, headers and body. Sends nothing.

The body is a superset that the clients of several APIs can read: OpenAI's ``error`` object, the
flat fields and ``detail`` of OctoAI, the ``id`` and ``request_id`` of DigitalOcean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import orjson

from models import errors as model_errors
from sampling import errors as sampling_errors


class HttpError(Exception):
    """A request that HTTP itself refuses, before anybody reads what it asks.

    Never crosses a handle.
    """


class BodyTooLargeError(HttpError):
    """The body is over the configured size."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(max_body_bytes)
        self.max_body_bytes = max_body_bytes

    def __str__(self) -> str:
        return f"the request body is larger than {self.max_body_bytes} bytes"


class UnsupportedMediaTypeError(HttpError):
    """The body is declared to be something other than JSON."""

    def __init__(self, content_type: str) -> None:
        super().__init__(content_type)
        self.content_type = content_type

    def __str__(self) -> str:
        return f"the content type must be application/json, not '{self.content_type}'"


class RouteNotFoundError(HttpError):
    """No route has this path."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"there is nothing at {self.path}"


class MethodNotAllowedError(HttpError):
    """The path exists, but not for this method."""

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(method, allowed)
        self.method = method
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.method} is not allowed here; allowed: {self.allowed}"


class InvalidKeyError(HttpError):
    """A route that wants a key got none, or a wrong one."""

    def __str__(self) -> str:
        return "this needs the right key, as the header 'Authorization: Bearer <key>'"


class ModelNotAllowedError(HttpError):
    """The caller's key does not allow the model."""

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id)
        self.model_id = model_id

    def __str__(self) -> str:
        return f"this key does not allow the model '{self.model_id}'"


class AdapterNotAllowedError(HttpError):
    """The caller's key does not allow the adapter, whether there is one or not.

    Attributes:
        adapter_id: keeps the grammar.
        param: the field that names it.
    """

    def __init__(self, adapter_id: str, param: str) -> None:
        super().__init__(adapter_id, param)
        self.adapter_id = adapter_id
        self.param = param

    def __str__(self) -> str:
        return f"this key does not allow the adapter '{self.adapter_id}'"


class BudgetSpentError(HttpError):
    """The caller's key has spent its budget.

    Attributes:
        unit: of what.
        limit: how much there is of it, in a minute or at the same time.
        retry_after_s: seconds until there may be enough.
    """

    def __init__(self, unit: str, limit: int, retry_after_s: float) -> None:
        super().__init__(unit, limit, retry_after_s)
        self.unit = unit
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"this key's limit of {self.limit} {self.unit} is reached; try again later"


class RequestOverBudgetError(HttpError):
    """The request may need more tokens than its key has in a whole minute."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(num_tokens, limit)
        self.num_tokens = num_tokens
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the prompt and max_tokens may take {self.num_tokens} tokens; this key has "
            f"{self.limit} a minute"
        )


class BudgetsUnavailableError(HttpError):
    """What the caller's key has left cannot be known now, and the last lease is spent."""

    def __str__(self) -> str:
        return "the budgets of keys cannot be reached for a moment; try again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """How one class of errors looks over HTTP.

    Attributes:
        status: HTTP status.
        type: OpenAI's coarse kind.
        code: machine-readable cause.
        param: the field at fault, where the error itself does not name one.
        retry_after_s: seconds after which a repeat may succeed; an error's own
            ``retry_after_s`` goes before it. None sends no header.
        is_retry_useless: tells clients that repeat by themselves not to.
    """

    status: HTTPStatus
    type: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    is_retry_useless: bool = False


# Stands for "prompt" or "messages", whichever the route has.
PROMPT_PARAM = "{prompt}"
DEFAULT_PARAM_NAMES: Mapping[str, str] = MappingProxyType({PROMPT_PARAM: "prompt"})

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNAVAILABLE = "service_unavailable"


def _row(status: HTTPStatus, kind: str, code: str, **rest: Any) -> ErrorRow:
    return ErrorRow(status=status, type=kind, code=code, **rest)


_INTERNAL = _row(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER, "internal_error")
_CONTEXT = _row(HTTPStatus.BAD_REQUEST, _INVALID, "context_length_exceeded", param=PROMPT_PARAM)
_FAILED = _row(
    HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER, "generation_failed", is_retry_useless=True
)
_INVALID_VALUE = _row(HTTPStatus.BAD_REQUEST, _INVALID, "invalid_value")

ERROR_TABLE: Mapping[type[Exception], ErrorRow] = {
    model_errors.InvalidRequestError: _INVALID_VALUE,
    model_errors.PromptTooLongError: _CONTEXT,
    model_errors.ContextLengthExceededError: dataclasses.replace(_CONTEXT, param="max_tokens"),
    model_errors.ChatTemplateError: _row(
        HTTPStatus.BAD_REQUEST, _INVALID, "chat_template_error", param="messages"
    ),
    model_errors.ModelNotFoundError: _row(
        HTTPStatus.NOT_FOUND, _INVALID, "model_not_found", param="model"
    ),
    model_errors.InvalidAdapterIdError: dataclasses.replace(_INVALID_VALUE, param="peft"),
    model_errors.AdapterNotFoundError: _row(
        HTTPStatus.NOT_FOUND, _INVALID, "adapter_not_found", param="peft"
    ),
    model_errors.AdapterIncompatibleError: _row(
        HTTPStatus.BAD_REQUEST, _INVALID, "adapter_incompatible", param="peft"
    ),
    model_errors.DeadlineExceededError: _row(
        HTTPStatus.REQUEST_TIMEOUT, "timeout_error", "deadline_exceeded", is_retry_useless=True
    ),
    model_errors.QueueFullError: _row(
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", retry_after_s=1.0
    ),
    model_errors.DrainingError: _row(
        HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, "draining", retry_after_s=5.0
    ),
    model_errors.AdapterLoadFailedError: _row(
        HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, "adapter_load_failed"
    ),
    model_errors.AdapterSlotTimeoutError: _row(
        HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, "adapter_slots_busy", retry_after_s=1.0
    ),
    model_errors.SequenceFailedError: _FAILED,
    model_errors.EngineDeadError: _row(
        HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, "engine_unavailable", retry_after_s=5.0
    ),
    # These two never belong to a request; if one escapes, it is a fault of ours.
    model_errors.ConfigError: _INTERNAL,
    model_errors.OutOfBlocksError: _INTERNAL,
    sampling_errors.InvalidSamplingParamsError: _INVALID_VALUE,
    sampling_errors.NonFiniteLogitsError: _FAILED,
    sampling_errors.NoTokenLeftError: _row(HTTPStatus.BAD_REQUEST, _INVALID, "no_token_left"),
    BodyTooLargeError: _row(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _INVALID, "body_too_large"),
    UnsupportedMediaTypeError: _row(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE, _INVALID, "unsupported_media_type"
    ),
    RouteNotFoundError: _row(HTTPStatus.NOT_FOUND, _INVALID, "not_found"),
    MethodNotAllowedError: _row(HTTPStatus.METHOD_NOT_ALLOWED, _INVALID, "method_not_allowed"),
    InvalidKeyError: _row(HTTPStatus.UNAUTHORIZED, "authentication_error", "invalid_api_key"),
    ModelNotAllowedError: _row(
        HTTPStatus.FORBIDDEN, "permission_error", "model_not_allowed", param="model"
    ),
    AdapterNotAllowedError: _row(
        HTTPStatus.FORBIDDEN, "permission_error", "adapter_not_allowed", param="peft"
    ),
    BudgetSpentError: _row(
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded", retry_after_s=1.0
    ),
    RequestOverBudgetError: _row(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limit_error",
        "request_over_budget",
        param="max_tokens",
        is_retry_useless=True,
    ),
    BudgetsUnavailableError: _row(
        HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, "budgets_unavailable", retry_after_s=1.0
    ),
}

_STATUS_SLUGS: Mapping[HTTPStatus, str] = {
    HTTPStatus.BAD_REQUEST: "bad_request",
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_TIMEOUT: "request_timeout",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "payload_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_media_type",
    HTTPStatus.UNPROCESSABLE_ENTITY: "unprocessable_entity",
    HTTPStatus.TOO_MANY_REQUESTS: "too_many_requests",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error, ready to be sent.

    Attributes:
        status: HTTP status.
        error: OpenAI's error object: message, type, param, code.
        headers: headers beyond content type and length.
    """

    status: HTTPStatus
    error: Mapping[str, str | None]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_fault_of_ours(self) -> bool:
        """Whether somebody should look into the log."""
        return self.status == HTTPStatus.INTERNAL_SERVER_ERROR

    def to_body(self, request_id: str) -> bytes:
        """Return the JSON body of a plain HTTP reply."""
        body: dict[str, Any] = {
            "error": self.error,
            "object": "error",
            **self.error,
            "id": _STATUS_SLUGS[self.status],
            "request_id": request_id,
        }
        param = self.error["param"]
        if self.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            location = ["body", *_split_param(param)]
            body["detail"] = [
                {"loc": location, "msg": self.error["message"], "type": self.error["code"]}
            ]
        return orjson.dumps(body)

    def with_validation_status(self, status: int) -> Problem:
        """Return the problem with another status if it is that of a wrong value (OctoAI's 422)."""
        is_validation = self.error["code"] == _INVALID_VALUE.code
        if not is_validation or self.status != HTTPStatus.BAD_REQUEST:
            return self
        return dataclasses.replace(self, status=HTTPStatus(status))

    def to_event(self) -> bytes:
        """Return the JSON of the event that ends a stream."""
        return orjson.dumps({"error": self.error})


def describe_error(
    error: Exception, param_names: Mapping[str, str] = DEFAULT_PARAM_NAMES
) -> Problem:
    """Look an error up in the table.

    Args:
        error: ours, already unwrapped from Ray's. One that is not in the table becomes a 500
            that tells nothing of its cause.
        param_names: what the request calls a field that the engine knows by another name.
    """
    row = next((ERROR_TABLE[kind] for kind in type(error).__mro__ if kind in ERROR_TABLE), None)
    if row is None:
        row, message = _INTERNAL, "the server met an internal error; its log has the cause"
    else:
        message = str(error)
    param = getattr(error, "param", row.param) or None
    return Problem(
        status=row.status,
        error={
            "message": message,
            "type": row.type,
            "param": None if param is None else param_names.get(param, param),
            "code": row.code,
        },
        headers=tuple(_headers(row, error)),
    )


def _headers(row: ErrorRow, error: Exception) -> list[tuple[str, str]]:
    headers = []
    retry_after_s = getattr(error, "retry_after_s", row.retry_after_s)
    if retry_after_s is not None:
        headers.append(("retry-after", str(max(1, math.ceil(retry_after_s)))))
    if row.is_retry_useless:
        headers.append(("x-should-retry", "false"))
    if isinstance(error, MethodNotAllowedError):
        headers.append(("allow", error.allowed))
    if isinstance(error, InvalidKeyError):
        headers.append(("www-authenticate", "Bearer"))
    return headers


def _split_param(param: str | None) -> list[str | int]:
    if param is None:
        return []
    return [int(part) if part.isdecimal() else part for part in param.split(".")]
