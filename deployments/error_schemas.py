"""The errors of the HTTP API as types, beside ``answer_schemas``."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from deployments.answer_schemas import object_type


@object_type
class ErrorObject(TypedDict):
    """OpenAI's error; ``param`` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


@object_type
class ErrorDetail(TypedDict):
    """OctoAI's; ``loc`` is the way to the field."""

    loc: list[str | int]
    msg: str
    type: str


@object_type
class ErrorBody(ErrorObject):
    """The one body of all errors: OpenAI's ``error``, the same flat, and what others expect.

    ``id`` is DigitalOcean's name of the status. ``detail`` is there where a field is wrong.
    """

    error: ErrorObject
    object: Literal["error"]
    id: str
    request_id: str
    detail: NotRequired[list[ErrorDetail]]


@object_type
class ErrorEvent(TypedDict):
    """The event that ends a stream which fails; no ``[DONE]`` follows it."""

    error: ErrorObject
