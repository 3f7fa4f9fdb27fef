"""From the engine's events to the records that cross a handle. Knows no Ray and no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

# Tokens (alternatives too) that one message tells log probabilities of prompts of: 0.2 MB and
# 10 ms (measured). Ray limits a message to 4 MiB by default, and the replica's event loop encodes.
MAX_PROMPT_TOKENS_PER_MESSAGE = 4096

_Reason = Literal["stop", "length", "error"]


class TokenFeed(Protocol):
    """What is used of a detokenizer."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        ...


class TokenSpeller(Protocol):
    """What is used of ``models.text.tokenizer.Text``."""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token's own text and its bytes."""
        ...

    def detokenizer(self, *, is_special_token_skipped: bool = True) -> TokenFeed:
        """Return a detokenizer for a whole text."""
        ...


def encode_messages(events: Sequence[GenerationEvent], speller: TokenSpeller) -> Iterator[Message]:
    """Yield the messages of a list of events: one, or more if it tells much of a prompt.

    Args:
        events: in order.
        speller: spells the prompt and the tokens of log probabilities.
    """
    message: Message = []
    num_told = 0
    for event in _split(events):
        if isinstance(event, PromptLogprobs):
            num_told += _count_told(event)
            if message and num_told > MAX_PROMPT_TOKENS_PER_MESSAGE:
                yield message
                message, num_told = [], _count_told(event)
        message.append(_encode(event, speller))
    if message:
        yield message


def _split(events: Sequence[GenerationEvent]) -> Iterator[GenerationEvent]:
    """Yield the events, long stretches of a prompt in parts of what a message may tell."""
    for event in events:
        if not isinstance(event, PromptLogprobs):
            yield event
            continue
        step = max(1, MAX_PROMPT_TOKENS_PER_MESSAGE * len(event.logprobs) // _count_told(event))
        for at in range(0, len(event.logprobs), step):
            yield PromptLogprobs(event.start + at, event.logprobs[at : at + step])


def _count_told(event: PromptLogprobs) -> int:
    return max(1, sum(1 + len(logprob.top) for logprob in event.logprobs))


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
        return _encode_admission(event, speller)
    if isinstance(event, PromptLogprobs):
        return PromptLogprobsRecord(
            kind="prompt_logprobs",
            start=event.start,
            logprobs=[_encode_logprob(logprob, speller) for logprob in event.logprobs],
        )
    return _encode_end(event)


def _encode_admission(admission: Admission, speller: TokenSpeller) -> AdmissionRecord:
    record = AdmissionRecord(
        kind="admission",
        seed=admission.seed,
        adapter_version=admission.adapter_version,
        numerics=admission.numerics,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_cached_tokens=admission.num_cached_tokens,
    )
    if token_ids := admission.prompt_token_ids:
        # A character that the prompt leaves unfinished belongs to the output, so nothing is
        # flushed.
        detokenizer = speller.detokenizer(is_special_token_skipped=False)
        record["prompt_text"] = detokenizer.feed(token_ids)
        record["first_prompt_token"] = speller.token_text(token_ids[0])[0]
    return record


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
