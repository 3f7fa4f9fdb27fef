"""From the engine's events to the records that cross a handle. Knows no Ray and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

from deployments.records import (
    AdmissionRecord,
    DeltaRecord,
    EndRecord,
    LogprobRecord,
    Message,
    PromptLogprobsRecord,
    Record,
    UsageRecord,
)
from models.requests import (
    Admission,
    GenerationEnd,
    GenerationEvent,
    PromptLogprobs,
    TokenDelta,
    TokenLogprob,
)

# JSON has no infinity; OpenAI documents this value for "very unlikely".
LOWEST_LOGPROB = -9999.0

_Reason = Literal["stop", "length", "error"]


class TokenSpeller(Protocol):
    """What is used of ``models.text.tokenizer.Text``."""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token's own text and its bytes."""
        ...


def encode_events(events: Sequence[GenerationEvent], speller: TokenSpeller) -> Message:
    """Return the message of a list of events.

    Args:
        events: in order.
        speller: spells the tokens of log probabilities.
    """
    return [_encode(event, speller) for event in events]


def _encode(event: GenerationEvent, speller: TokenSpeller) -> Record:
    if isinstance(event, TokenDelta):
        return DeltaRecord(
            kind="delta",
            choice=event.choice,
            token_ids=list(event.token_ids),
            text=event.text,
            logprobs=[_encode_logprob(logprob, speller) for logprob in event.logprobs],
            finish_reason=cast(_Reason | None, event.finish_reason and str(event.finish_reason)),
            stop_reason=event.stop_reason,
        )
    if isinstance(event, Admission):
        return AdmissionRecord(
            kind="admission",
            seed=event.seed,
            adapter_version=event.adapter_version,
            numerics=event.numerics,
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
        )
    if isinstance(event, PromptLogprobs):
        return PromptLogprobsRecord(
            kind="prompt_logprobs",
            start=event.start,
            logprobs=[_encode_logprob(logprob, speller) for logprob in event.logprobs],
        )
    return _encode_end(event)


def _encode_end(end: GenerationEnd) -> EndRecord:
    usage = end.usage
    return EndRecord(
        kind="end",
        usage=UsageRecord(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_completion_tokens=usage.num_completion_tokens,
            num_cached_tokens=usage.num_cached_tokens,
        ),
    )


def _encode_logprob(logprob: TokenLogprob, speller: TokenSpeller) -> LogprobRecord:
    record = _spell(logprob.token_id, logprob.logprob, speller)
    if logprob.rank is not None:
        record["rank"] = logprob.rank
    if logprob.top:
        record["top"] = [_spell(token_id, value, speller) for token_id, value in logprob.top]
    return record


def _spell(token_id: int, logprob: float, speller: TokenSpeller) -> LogprobRecord:
    text, data = speller.token_text(token_id)
    return LogprobRecord(
        token_id=token_id,
        token=text,
        bytes=list(data),
        logprob=max(logprob, LOWEST_LOGPROB),
    )
