"""The messages of a chat request: roles, contents, and calls of tools that were made before."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from deployments.wire_model import WireModel
from deployments.wire_values import MAX_TOOL_CALLS, read_content, wire_error

_MAX_NAME_CHARACTERS = 64

Content = Annotated[str | None, PlainValidator(read_content)]


class CalledFunction(WireModel):
    """What a tool call calls; ``arguments`` is JSON as the model wrote it."""

    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARACTERS)]
    arguments: str = "{}"


class ToolCall(WireModel):
    """A call that an assistant's message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: arguments that are an object as an object.

        Models have been known to write arguments that are no JSON; those stay the text they are.
        """
        arguments: Any = self.function.arguments
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        return {
            **({} if self.id is None else {"id": self.id}),
            "type": self.type,
            "function": {
                "name": self.function.name,
                "arguments": parsed if isinstance(parsed, dict) else arguments,
            },
        }


class ChatMessage(WireModel):
    """One message; several text parts have become one text.

    Only an assistant's message that calls tools or refuses may be without content; a refusal's text
    then takes its place. ``reasoning`` is vLLM's name of ``reasoning_content``.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    function_call: Any = None
    audio: Any = None

    @field_validator("function_call", "audio")
    @classmethod
    def _refuse(cls, value: Any) -> None:
        if value is not None:
            raise wire_error("is not supported by this server")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise wire_error("only an assistant's message may have it", "tool_calls")
        is_refusal = self.role == "assistant" and self.refusal is not None
        if self.content is None and not self.tool_calls and not is_refusal:
            raise wire_error("is required", "content")
        if None not in (self.reasoning, self.reasoning_content) and (
            self.reasoning != self.reasoning_content
        ):
            raise wire_error("differs from reasoning_content", "reasoning")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, without what is absent."""
        fields = {
            "role": self.role,
            "content": self.content or self.refusal or "",
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message: dict[str, Any] = {
            name: value for name, value in fields.items() if value is not None
        }
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message
