"""Checks answers against what /openapi.json says of them."""

import functools
import re

import jsonschema
from pydantic import TypeAdapter

from deployments.error_schemas import ErrorBody, ErrorEvent
from deployments.openapi import build_openapi
from deployments.openapi_operations import ADMIN_OPERATIONS, OPERATIONS
from tests.unit.deployments.fakes import read_json_events

DOCUMENT = build_openapi(has_admin=True)


def find_operation(method, path):
    """The row of the table that a request belongs to."""
    for operation in (*OPERATIONS, *ADMIN_OPERATIONS):
        pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(operation.path))
        if operation.method == method.lower() and re.fullmatch(pattern, path):
            return operation
    raise AssertionError(f"{method} {path} is not described")


def resolve(value):
    """What a reference stands for."""
    if "$ref" not in value:
        return value
    return functools.reduce(lambda part, key: part[key], value["$ref"][2:].split("/"), DOCUMENT)


def assert_described(method, path, response):
    """Check status, media type, headers and body of an answer; that of a stream event by event."""
    operation = find_operation(method, path)
    described = DOCUMENT["paths"][operation.path][operation.method]["responses"]
    assert str(response.status_code) in described, response.text
    answer = resolve(described[str(response.status_code)])
    media_type = response.headers["content-type"].partition(";")[0]
    assert media_type in answer["content"]
    _check_headers(answer["headers"], response.headers)
    media = answer["content"][media_type]
    if media_type == "text/event-stream":
        events, is_complete = read_json_events(response.text)
        for event in events:
            is_error = event.keys() == {"error"}
            assert not (is_error and is_complete)
            _check(media["x-event-schema"], operation.event, event, is_error)
    elif media_type == "application/json":
        is_error = response.status_code != 200
        kind = ErrorBody if is_error else operation.answer
        _check(media["schema"], kind, response.json(), is_event_error=False)


def _check(schema, kind, value, is_event_error):
    if is_event_error:
        schema, kind = {"$ref": "#/components/schemas/ErrorEvent"}, ErrorEvent
    validator = jsonschema.Draft202012Validator(
        {**schema, "components": DOCUMENT["components"]}  # where its references lead
    )
    validator.validate(value)
    if kind is not None:
        # The types are closed: a key that nothing describes fails here.
        TypeAdapter(kind).validate_python(value, strict=True)


def _check_headers(described, headers):
    for name in ("x-request-id", "openai-processing-ms", "openai-version"):
        assert name in headers
    own = {"content-type", "content-length", "cache-control", "x-accel-buffering"}
    own |= {"content-security-policy", "x-content-type-options"}
    assert set(headers) - own <= set(described)
    for name in set(headers) & set(described):
        schema = resolve(described[name])["schema"]
        value = int(headers[name]) if schema["type"] == "integer" else headers[name]
        jsonschema.validate(value, schema)
