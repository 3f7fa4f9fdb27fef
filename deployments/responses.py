"""The answer objects of the HTTP API, whole and as stream events. Knows no transport.

One superset that satisfies OpenAI's, DigitalOcean's and OctoAI's clients: every key that any of
them requires is always there, null where there is nothing to say.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from deployments.records import LogprobRecord, UsageRecord

# A JSON object as Python has it.
Event = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What all parts of one answer repeat.

    Attributes:
        id: of the answer.
        created: Unix time in seconds.
        model: the model's id.
        system_fingerprint: equal strings come from equal arithmetic.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclasses.dataclass(slots=True)
class ChoiceResult:
    """One choice as it has grown so far.

    Attributes:
        texts: pieces of its text.
        logprobs: of its tokens, if asked for.
        finish_reason: why it ended.
        stop_reason: the stop string or token that ended it.
    """

    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[LogprobRecord] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Reply(Protocol):
    """One answer's objects. Stateful for completions: pieces of a choice come in order."""

    def opening(self, choice: int) -> Event | None:
        """Return what a stream says before a choice's first text."""
        ...

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> Event:
        """Return the event of one more piece of text."""
        ...

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> Event:
        """Return the event that ends a choice."""
        ...

    def usage(self, usage: UsageRecord) -> Event:
        """Return the event of the token counts."""
        ...

    def whole(self, choices: Iterable[ChoiceResult], usage: UsageRecord) -> Event:
        """Return the answer of a request that does not stream."""
        ...


def make_fingerprint(numerics: str) -> str:
    """Return a short name of the arithmetic that a replica told at admission."""
    return f"fp_{hashlib.blake2b(numerics.encode(), digest_size=5).hexdigest()}"


def make_reply(head: ReplyHead, *, is_chat: bool, has_logprobs: bool, has_usage: bool) -> Reply:
    """Return the builder of one answer.

    Args:
        head: its constant part.
        is_chat: a chat completion, else a text completion.
        has_logprobs: log probabilities were asked for.
        has_usage: a stream ends with its usage, so its other events say null there.
    """
    kind = _ChatReply if is_chat else _CompletionReply
    return kind(head, has_logprobs, has_usage)


class _ChatReply:
    def __init__(self, head: ReplyHead, has_logprobs: bool, has_usage: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage

    def opening(self, choice: int) -> Event | None:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> Event:
        return self._chunk(choice, {"content": text}, self._logprobs(logprobs))

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> Event:
        event = self._chunk(choice, {})
        event["choices"][0].update(finish_reason=finish_reason, stop_reason=stop_reason)
        return event

    def usage(self, usage: UsageRecord) -> Event:
        return {**_head_fields(self._head, "chat.completion.chunk"), **_usage_end(usage)}

    def whole(self, choices: Iterable[ChoiceResult], usage: UsageRecord) -> Event:
        return {
            **_head_fields(self._head, "chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(choice.texts),
                        "refusal": None,
                        "reasoning_content": None,
                    },
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": _usage_object(usage),
        }

    def _chunk(self, choice: int, delta: Event, logprobs: Event | None = None) -> Event:
        event = _head_fields(self._head, "chat.completion.chunk")
        event["choices"] = [
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        ]
        if self._has_usage:
            event["usage"] = None
        return event

    def _logprobs(self, logprobs: Sequence[LogprobRecord]) -> Event | None:
        if not self._has_logprobs:
            return None
        return {"content": [_token_object(record) for record in logprobs], "refusal": None}


class _CompletionReply:
    def __init__(self, head: ReplyHead, has_logprobs: bool, has_usage: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        # choice -> characters of its text that its log probabilities have covered
        self._num_characters: dict[int, int] = {}

    def opening(self, choice: int) -> Event | None:  # noqa: ARG002 - chats have one
        return None

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> Event:
        return self._chunk(choice, text, self._logprobs(choice, logprobs))

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> Event:
        event = self._chunk(choice, "", None)
        event["choices"][0].update(finish_reason=finish_reason, stop_reason=stop_reason)
        return event

    def usage(self, usage: UsageRecord) -> Event:
        return {**_head_fields(self._head, "text_completion"), **_usage_end(usage)}

    def whole(self, choices: Iterable[ChoiceResult], usage: UsageRecord) -> Event:
        return {
            **_head_fields(self._head, "text_completion"),
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.texts),
                    "logprobs": self._logprobs(index, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": _usage_object(usage),
        }

    def _chunk(self, choice: int, text: str, logprobs: Event | None) -> Event:
        event = _head_fields(self._head, "text_completion")
        event["choices"] = [
            {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}
        ]
        if self._has_usage:
            event["usage"] = None
        return event

    def _logprobs(self, choice: int, logprobs: Sequence[LogprobRecord]) -> Event | None:
        """Return one object that holds OctoAI's shape (``content``) and OpenAI's legacy one."""
        if not self._has_logprobs:
            return None
        offsets = []
        num_characters = self._num_characters.get(choice, 0)
        for record in logprobs:
            first = record["bytes"][:1]
            is_inside_character = bool(first) and _is_continuation(first[0])
            offsets.append(max(0, num_characters - is_inside_character))
            num_characters += sum(not _is_continuation(byte) for byte in record["bytes"])
        self._num_characters[choice] = num_characters
        return {
            "content": [_token_object(record) for record in logprobs],
            "refusal": None,
            "tokens": [record["token"] for record in logprobs],
            "token_logprobs": [record["logprob"] for record in logprobs],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in record.get("top", ())}
                for record in logprobs
            ],
            "text_offset": offsets,
        }


def _head_fields(head: ReplyHead, kind: str) -> Event:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


def _usage_end(usage: UsageRecord) -> Event:
    return {"choices": [], "usage": _usage_object(usage)}


def _usage_object(usage: UsageRecord) -> Mapping[str, Any]:
    num_prompt_tokens = usage["num_prompt_tokens"]
    num_completion_tokens = usage["num_completion_tokens"]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage["num_cached_tokens"]},
    }


def _token_object(record: LogprobRecord) -> Event:
    return {
        **_alternative(record),
        "top_logprobs": [_alternative(top) for top in record.get("top", ())],
    }


def _alternative(record: LogprobRecord) -> Event:
    return {"token": record["token"], "logprob": record["logprob"], "bytes": record["bytes"]}


def _is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character that an earlier byte began."""
    return byte & 0xC0 == 0x80
