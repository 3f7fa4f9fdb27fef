"""The answer objects of the HTTP API, whole and as stream events. Knows no transport.

One superset that satisfies OpenAI's, DigitalOcean's and OctoAI's clients: every key that any of
them requires is always there, null where there is nothing to say.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from deployments.answer_form import AnswerForm, LogprobScope
from deployments.logprob_objects import (
    PromptResult,
    TextOffsets,
    make_completion_logprobs,
    make_content,
    make_prompt_logprobs,
)
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
        extras: further fields that the whole answer has, and of a stream the first event.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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

    def whole(
        self,
        choices: Iterable[ChoiceResult],
        prompts: Sequence[PromptResult],
        usage: UsageRecord,
    ) -> Event:
        """Return the answer of a request that does not stream.

        Args:
            choices: those that are told, prompt by prompt.
            prompts: what is known of each prompt.
            usage: of all that was generated.
        """
        ...


def make_fingerprint(numerics: str) -> str:
    """Return a short name of the arithmetic that a replica told at admission."""
    return f"fp_{hashlib.blake2b(numerics.encode(), digest_size=5).hexdigest()}"


def make_reply(head: ReplyHead, form: AnswerForm) -> Reply:
    """Return the builder of one answer.

    Args:
        head: its constant part.
        form: what it tells.
    """
    return _ChatReply(head, form) if form.is_chat else _CompletionReply(head, form)


class _ChatReply:
    def __init__(self, head: ReplyHead, form: AnswerForm) -> None:
        self._head = head
        self._form = form

    def opening(self, choice: int) -> Event | None:
        event = self._chunk(choice, {"role": "assistant", "content": ""})
        return {**event, **self._head.extras} if choice == 0 else event

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> Event:
        return self._chunk(choice, {"content": text}, self._logprobs(logprobs))

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> Event:
        event = self._chunk(choice, {})
        event["choices"][0].update(finish_reason=finish_reason, stop_reason=stop_reason)
        return event

    def usage(self, usage: UsageRecord) -> Event:
        return {**_head_fields(self._head, "chat.completion.chunk"), **_usage_end(usage)}

    def whole(
        self,
        choices: Iterable[ChoiceResult],
        prompts: Sequence[PromptResult],
        usage: UsageRecord,
    ) -> Event:
        (prompt,) = prompts
        is_prompt_told = self._form.logprobs is LogprobScope.PROMPT
        told = self._logprobs(prompt.logprobs) if is_prompt_told else None
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
                    "logprobs": told if is_prompt_told else self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": _usage_object(usage),
            **_prompt_fields(self._form, prompt),
            **self._head.extras,
        }

    def _chunk(self, choice: int, delta: Event, logprobs: Event | None = None) -> Event:
        event = _head_fields(self._head, "chat.completion.chunk")
        event["choices"] = [
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        ]
        if self._form.has_stream_usage:
            event["usage"] = None
        return event

    def _logprobs(self, logprobs: Sequence[LogprobRecord]) -> Event | None:
        if self._form.logprobs is LogprobScope.NONE:
            return None
        return {"content": make_content(logprobs, self._form.num_top_logprobs), "refusal": None}


class _CompletionReply:
    def __init__(self, head: ReplyHead, form: AnswerForm) -> None:
        self._head = head
        self._form = form
        # choice -> where in its text the next token of a stream begins
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self, choice: int) -> Event | None:
        # Only chats have one; here it is there if it has something to say.
        if choice > 0 or not self._head.extras:
            return None
        return {**self._chunk(choice, "", None), **self._head.extras}

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> Event:
        return self._chunk(choice, text, self._stream_logprobs(choice, logprobs))

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> Event:
        event = self._chunk(choice, "", None)
        event["choices"][0].update(finish_reason=finish_reason, stop_reason=stop_reason)
        return event

    def usage(self, usage: UsageRecord) -> Event:
        return {**_head_fields(self._head, "text_completion"), **_usage_end(usage)}

    def whole(
        self,
        choices: Iterable[ChoiceResult],
        prompts: Sequence[PromptResult],
        usage: UsageRecord,
    ) -> Event:
        own_fields = [_prompt_fields(self._form, prompt) for prompt in prompts]
        told = []
        for index, choice in enumerate(choices):
            prompt_index = index // self._form.num_choices
            prompt = prompts[prompt_index]
            told.append(
                {
                    "index": index,
                    "text": "".join((prompt.text * self._form.is_prompt_echoed, *choice.texts)),
                    "logprobs": self._logprobs(prompt, choice),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **own_fields[prompt_index],
                }
            )
        return {
            **_head_fields(self._head, "text_completion"),
            "choices": told,
            "usage": _usage_object(usage),
            **(own_fields[0] if len(prompts) == 1 else {}),
            **self._head.extras,
        }

    def _chunk(self, choice: int, text: str, logprobs: Event | None) -> Event:
        event = _head_fields(self._head, "text_completion")
        event["choices"] = [
            {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}
        ]
        if self._form.has_stream_usage:
            event["usage"] = None
        return event

    def _stream_logprobs(self, choice: int, logprobs: Sequence[LogprobRecord]) -> Event | None:
        if self._form.logprobs is LogprobScope.NONE:
            return None
        offsets = self._offsets.setdefault(choice, TextOffsets())
        return make_completion_logprobs(logprobs, self._form.num_top_logprobs, offsets)

    def _logprobs(self, prompt: PromptResult, choice: ChoiceResult) -> Event | None:
        scope, num_top = self._form.logprobs, self._form.num_top_logprobs
        if scope is LogprobScope.NONE:
            return None
        if scope is LogprobScope.OUTPUT:
            return make_completion_logprobs(choice.logprobs, num_top, TextOffsets())
        offsets = TextOffsets.behind_first_token(prompt)
        if scope is LogprobScope.PROMPT:
            return make_completion_logprobs(prompt.logprobs, num_top, offsets)
        records = [*prompt.logprobs, *choice.logprobs]
        return make_completion_logprobs(records, num_top, offsets, prompt.first_token)


def _prompt_fields(form: AnswerForm, prompt: PromptResult) -> Event:
    """Return vLLM's field.

    It stands at the top of an answer, unless there are several prompts; in completions, which may
    have several, in each choice too.
    """
    if form.num_prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": make_prompt_logprobs(prompt.logprobs, form.num_prompt_logprobs)}


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
        "completion_tokens_details": {"reasoning_tokens": 0},
        # DigitalOcean's names. Nothing is charged for what is kept, and it is kept for no set time.
        "cache_created_input_tokens": 0,
        "cache_read_input_tokens": usage["num_cached_tokens"],
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    }
