"""The records that cross a handle from ModelReplica to Ingress, the one written schema.

A stream is: one message ``[AdmissionRecord]``, then, if asked for, messages of
``PromptLogprobsRecord`` s, then messages of ``DeltaRecord`` s in the order they happened (the
choices of an n > 1 request interleave), the last message ending with one ``EndRecord``. Every
message is a list of plain dicts, so that both sides may run different versions; errors are raised
through the stream, never yielded.

Each choice has exactly one delta with ``finish_reason``, its last one. Token ids are emitted
exactly once; their texts join to the choice's whole text. To resume a stream elsewhere: the
request, the seed and adapter version of the admission, and the token ids per choice.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class AdmissionRecord(TypedDict):
    """The request is valid, fits, and has a place in the queue.

    ``prompt_text`` (of all prompt tokens, special ones too, without a character that they leave
    unfinished) and ``first_prompt_token`` (the text of the first one) are there if the call asked
    for the prompt to be reported.
    """

    kind: Literal["admission"]
    seed: int
    adapter_version: str | None
    numerics: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_text: NotRequired[str]
    first_prompt_token: NotRequired[str]


class LogprobRecord(TypedDict):
    """One token's log probability under the raw model distribution; -inf is sent as -9999.0.

    ``token`` is the token's own text (with U+FFFD where it is part of a character), ``bytes``
    its UTF-8 bytes.
    """

    token_id: int
    token: str
    bytes: list[int]
    logprob: float
    top: NotRequired[list[LogprobRecord]]
    rank: NotRequired[int]


class PromptLogprobsRecord(TypedDict):
    """Log probabilities of prompt tokens [start, start + len(logprobs)), the same for all choices.

    The records of a stream are adjacent and cover every prompt token but the first.
    """

    kind: Literal["prompt_logprobs"]
    start: int
    logprobs: list[LogprobRecord]


class DeltaRecord(TypedDict):
    """What was added to one choice."""

    kind: Literal["delta"]
    choice: int
    token_ids: list[int]
    text: str
    logprobs: list[LogprobRecord]
    finish_reason: Literal["stop", "length", "error"] | None
    stop_reason: str | int | None


class UsageRecord(TypedDict):
    """Token counts of the whole request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class EndRecord(TypedDict):
    """The stream is complete."""

    kind: Literal["end"]
    usage: UsageRecord


Record = AdmissionRecord | PromptLogprobsRecord | DeltaRecord | EndRecord
Message = list[Record]
