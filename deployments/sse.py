"""Server-sent events: a reply's events as bytes, framed cheaply. Sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from deployments.records import LogprobRecord, UsageRecord
from deployments.responses import Reply

CONTENT_TYPE = "text/event-stream; charset=utf-8"
# Means that the stream is complete.
DONE = b"data: [DONE]\n\n"
# A comment; clients skip it, idle connections stay open.
PING = b": ping\n\n"

# Stands where the text goes; no reply has these characters elsewhere (ids and models are known
# words, and everything else that surrounds a text is constant).
_TEXT_MARK = "\x00text\x00"
_TEXT_MARK_JSON = orjson.dumps(_TEXT_MARK)


def frame(data: bytes) -> bytes:
    """Return one event."""
    return b"data: %b\n\n" % data


class EventEncoder:
    """A reply whose events are bytes.

    A plain piece of text, which is nearly every event, costs one JSON string: what surrounds it
    is the same for a whole choice and encoded once.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        # choice -> what comes before and after the text
        self._surroundings: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: int) -> bytes | None:
        """Return what the stream says before a choice's first text."""
        event = self._reply.opening(choice)
        return None if event is None else _encode(event)

    def delta(self, choice: int, text: str, logprobs: Sequence[LogprobRecord]) -> bytes:
        """Return the event of one more piece of text."""
        if logprobs:
            return _encode(self._reply.delta(choice, text, logprobs))
        surroundings = self._surroundings.get(choice)
        if surroundings is None:
            surroundings = self._surroundings[choice] = self._surround(choice)
        head, tail = surroundings
        return head + orjson.dumps(text) + tail

    def finish(self, choice: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """Return the event that ends a choice."""
        return _encode(self._reply.finish(choice, finish_reason, stop_reason))

    def usage(self, usage: UsageRecord) -> bytes:
        """Return the event of the token counts."""
        return _encode(self._reply.usage(usage))

    def _surround(self, choice: int) -> tuple[bytes, bytes]:
        whole = _encode(self._reply.delta(choice, _TEXT_MARK, ()))
        head, _, tail = whole.partition(_TEXT_MARK_JSON)
        return head, tail


def _encode(event: dict[str, Any]) -> bytes:
    return frame(orjson.dumps(event))
