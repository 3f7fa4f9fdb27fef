"""Builds answers out of records: a whole object, or the events of a stream. Knows no transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from deployments.answer_form import AnswerForm
from deployments.logprob_objects import PromptResult
from deployments.records import DeltaRecord, LogprobRecord, Message, UsageRecord
from deployments.responses import ChoiceResult, Reply
from models.errors import SequenceFailedError

# None: the choice goes on.
_COMPLETE_REASONS = (None, "stop", "length")

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


class EventFormat(Protocol[EventT_co]):
    """A reply's events in one form: dicts (``Reply``) or bytes (``sse.EventEncoder``)."""

    def opening(self, choice: int) -> EventT_co | None:
        """Return what the stream says before a choice's first text."""
        ...

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> EventT_co:
        """Return the event of one more piece of text."""
        ...

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> EventT_co:
        """Return the event that ends a choice."""
        ...

    def usage(self, usage: UsageRecord) -> EventT_co:
        """Return the event of the token counts."""
        ...


class _Progress:
    """Which choices and prompts of a request are complete, and what they have used.

    Invariants: a choice ends once; nothing comes after a prompt's end.
    """

    def __init__(self, num_prompts: int, num_choices: int) -> None:
        self.num_total_choices = num_prompts * num_choices
        self._num_choices = num_choices
        self._num_open_choices = self.num_total_choices
        self._num_open_prompts = num_prompts
        self.usage = UsageRecord(num_prompt_tokens=0, num_completion_tokens=0, num_cached_tokens=0)

    def read(self, prompt_index: int, message: Message) -> list[tuple[int, DeltaRecord]]:
        """Record a message; return its deltas with the index of each one's choice."""
        deltas = []
        for record in message:
            if record["kind"] == "delta":
                if record["finish_reason"] not in _COMPLETE_REASONS:
                    raise SequenceFailedError("a choice could not go on")
                self._num_open_choices -= record["finish_reason"] is not None
                deltas.append((prompt_index * self._num_choices + record["choice"], record))
            elif record["kind"] == "end":
                self._num_open_prompts -= 1
                self._add(record["usage"])
        return deltas

    def check_complete(self) -> None:
        """Check that nothing is missing.

        Raises:
            SequenceFailedError: a stream ended before its choices did.
        """
        if self._num_open_choices or self._num_open_prompts:
            raise SequenceFailedError("the stream ended before it was complete")

    def _add(self, usage: UsageRecord) -> None:
        self.usage = UsageRecord(
            num_prompt_tokens=self.usage["num_prompt_tokens"] + usage["num_prompt_tokens"],
            num_completion_tokens=(
                self.usage["num_completion_tokens"] + usage["num_completion_tokens"]
            ),
            num_cached_tokens=self.usage["num_cached_tokens"] + usage["num_cached_tokens"],
        )


class AnswerCollector:
    """Gathers a whole answer."""

    def __init__(self, reply: Reply, form: AnswerForm, prompts: Sequence[PromptResult]) -> None:
        """Begin with nothing.

        Args:
            reply: builds the object.
            form: what it tells.
            prompts: of the streams that will be added, without log probabilities yet.
        """
        self._reply = reply
        self._form = form
        self._prompts = prompts
        self._progress = _Progress(len(prompts), form.num_candidates)
        self._choices = [ChoiceResult() for _ in range(self._progress.num_total_choices)]

    def add(self, prompt_index: int, message: Message) -> None:
        """Add one message.

        Raises:
            SequenceFailedError: a choice could not go on.
        """
        for record in message:
            if record["kind"] == "prompt_logprobs":
                self._prompts[prompt_index].logprobs.extend(record["logprobs"])
        for index, delta in self._progress.read(prompt_index, message):
            choice = self._choices[index]
            choice.texts.append(delta["text"])
            choice.logprobs.extend(delta["logprobs"])
            if delta["finish_reason"] is not None:
                choice.finish_reason = delta["finish_reason"]
                choice.stop_reason = delta["stop_reason"]

    def finish(self) -> dict[str, Any]:
        """Return the answer. Takes a while if it has many log probabilities.

        Raises:
            SequenceFailedError: it is not complete.
        """
        self._progress.check_complete()
        if self._form.num_prompt_alternatives is not None:
            _check_scored(self._prompts)
        return self._reply.whole(self._told_choices(), self._prompts, self._progress.usage)

    def _told_choices(self) -> list[ChoiceResult]:
        if not self._form.is_best_chosen:
            return self._choices
        step = self._form.num_candidates
        groups = (self._choices[at : at + step] for at in range(0, len(self._choices), step))
        # sorted() keeps the order of equals, so that the lower index goes first.
        return [
            choice
            for group in groups
            for choice in sorted(group, key=_mean_logprob, reverse=True)[: self._form.num_choices]
        ]


def _mean_logprob(choice: ChoiceResult) -> float:
    """Return the mean log probability per token; a choice without tokens is as good as certain."""
    values = [record["logprob"] for record in choice.logprobs]
    return math.fsum(values) / len(values) if values else 0.0


def _check_scored(prompts: Sequence[PromptResult]) -> None:
    if not all(prompt.is_scored for prompt in prompts):
        raise SequenceFailedError("log probabilities of the prompt are missing")


class AnswerEvents(Generic[EventT]):
    """Turns messages into the events of a stream, in the order that clients expect.

    Each choice opens once, with the prompt's text if that is echoed, then come its pieces, then
    one event with its finish reason; at last the usage, if asked for. Choices interleave.
    """

    def __init__(
        self, events: EventFormat[EventT], form: AnswerForm, prompts: Sequence[PromptResult]
    ) -> None:
        """Begin with nothing.

        Args:
            events: makes the events.
            form: what they tell.
            prompts: of the streams that will be added.
        """
        self._events = events
        self._form = form
        self._prompts = prompts
        self._progress = _Progress(len(prompts), form.num_choices)

    def open(self) -> list[EventT]:
        """Return the events before any generated text."""
        events = []
        for choice in range(self._progress.num_total_choices):
            if (opening := self._events.opening(choice)) is not None:
                events.append(opening)
            prompt = self._prompts[choice // self._form.num_choices]
            if self._form.is_prompt_echoed and prompt.text:
                events.append(self._events.delta(choice, prompt.text, ()))
        return events

    def add(self, prompt_index: int, message: Message) -> list[EventT]:
        """Return the events of one message; there may be none.

        Raises:
            SequenceFailedError: a choice could not go on.
        """
        events = []
        for choice, delta in self._progress.read(prompt_index, message):
            if delta["text"] or delta["logprobs"]:
                events.append(self._events.delta(choice, delta["text"], delta["logprobs"]))
            if delta["finish_reason"] is not None:
                events.append(
                    self._events.finish(choice, delta["finish_reason"], delta["stop_reason"])
                )
        return events

    def finish(self) -> list[EventT]:
        """Return the events behind the last message.

        Raises:
            SequenceFailedError: the answer is not complete.
        """
        self._progress.check_complete()
        has_usage = self._form.has_stream_usage
        return [self._events.usage(self._progress.usage)] if has_usage else []
