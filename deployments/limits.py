"""Limits of one request that an operator may lower. Counted before anything is allocated for it.

The schema has ceilings of its own (``wire_values``); these are checked on what it has let through.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from deployments.wire import ChatRequest, CompletionRequest
from deployments.wire_values import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_METADATA_PAIRS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    items_of,
)
from models.errors import InvalidRequestError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        max_json_depth: objects and lists inside of each other, the body itself included.
        max_messages: of a chat.
        max_stop_strings: entries of ``stop``.
        max_stop_characters: of each of them.
        max_logit_biases: entries of ``logit_bias``.
        max_metadata_pairs: of ``metadata``.
        is_template_allowed: ``chat_template`` may take the place of the model's.
        max_request_tokens: new tokens of all choices of all prompts together, as far as the
            request names them (choices times ``max_tokens``).
    """

    max_json_depth: int = 64
    max_messages: int = MAX_MESSAGES
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_characters: int = MAX_STOP_CHARACTERS
    max_logit_biases: int = MAX_LOGIT_BIASES
    max_metadata_pairs: int = MAX_METADATA_PAIRS
    max_request_tokens: int = 1 << 18
    is_template_allowed: bool = False

    def check_depth(self, body: object) -> None:
        """Check how deep a body is nested, unknown fields too.

        Goes through all of it: for bodies whose schema has been checked, which most of the
        hostile ones do not pass.

        Raises:
            InvalidRequestError: too deep.
        """
        level: list[Any] = [body]
        for _ in range(self.max_json_depth):
            level = [
                item
                for holder in level
                for item in items_of(holder)
                if isinstance(item, dict | list)
            ]
            if not level:
                return
        raise InvalidRequestError(
            "", f"the request body is nested more than {self.max_json_depth} levels deep"
        )

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Check a validated request.

        Raises:
            InvalidRequestError: naming the field that has too much.
        """
        counts = {
            "stop": (len(request.stop), self.max_stop_strings, "strings"),
            "logit_bias": (len(request.logit_bias or ()), self.max_logit_biases, "entries"),
            "metadata": (len(request.metadata or ()), self.max_metadata_pairs, "pairs"),
        }
        if isinstance(request, ChatRequest):
            counts["messages"] = (len(request.messages), self.max_messages, "messages")
            if request.chat_template and not self.is_template_allowed:
                raise InvalidRequestError("chat_template", "is not allowed by this server")
        for field, (count, limit, what) in counts.items():
            if count > limit:
                raise InvalidRequestError(field, f"has {count} {what}; at most {limit} are allowed")
        if any(len(string) > self.max_stop_characters for string in request.stop):
            raise InvalidRequestError(
                "stop", f"each string must have 1 to {self.max_stop_characters} characters"
            )
        self._check_tokens(request)

    def _check_tokens(self, request: ChatRequest | CompletionRequest) -> None:
        num_prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = getattr(request, field) or 0
        num_choices = request.num_candidates * num_prompts
        # One choice has the window's bound, whose error says more.
        if num_choices > 1 and max_tokens * num_choices > self.max_request_tokens:
            raise InvalidRequestError(
                field,
                f"{max_tokens} tokens for each of {num_choices} choices are "
                f"{max_tokens * num_choices}; at most {self.max_request_tokens} are allowed",
            )
