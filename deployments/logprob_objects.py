"""Log probabilities in the shapes of three APIs: OctoAI's and OpenAI's, and vLLM's for prompts."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from deployments.records import LogprobRecord


@dataclasses.dataclass(slots=True, kw_only=True)
class PromptResult:
    """What is known of one prompt so far.

    Attributes:
        num_tokens: its length.
        text: what echoes it; "" if nobody asked for it.
        first_token: text of its first token, which has no log probability.
        logprobs: of its other tokens, if asked for.
    """

    num_tokens: int
    text: str = ""
    first_token: str = ""
    logprobs: list[LogprobRecord] = dataclasses.field(default_factory=list)

    @property
    def is_scored(self) -> bool:
        """Whether every token but the first has its log probability."""
        return len(self.logprobs) == self.num_tokens - 1


class TextOffsets:
    """Tells where in a text tokens begin, in characters.

    A token that begins inside of a character is told to begin with that character.
    """

    def __init__(self, start: int = 0) -> None:
        """Begin at a character; below 0, the first tokens have characters that the text lacks."""
        self._num_characters = start

    @classmethod
    def behind_first_token(cls, prompt: PromptResult) -> TextOffsets:
        """Begin where the second token of a prompt does.

        Counted from the end of the text: the first token may be one that stands in no text (BOS),
        and a tokenizer may have put a space before the text. It is taken to end with a whole
        character.
        """
        data = b"".join(bytes(record["bytes"]) for record in prompt.logprobs)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(data)
        unfinished, _ = decoder.getstate()
        # A character that the prompt leaves unfinished is not in its text.
        return cls(len(prompt.text) - _count_characters(data) + bool(unfinished))

    def take(self, record: LogprobRecord) -> int:
        """Return where the next token begins."""
        first = record["bytes"][:1]
        is_inside_character = bool(first) and _is_continuation(first[0])
        offset = max(0, self._num_characters - is_inside_character)
        self._num_characters += _count_characters(record["bytes"])
        return offset


def make_content(records: Sequence[LogprobRecord], num_top: int) -> list[dict[str, Any]]:
    """Return the list that chats of all APIs, and completions of OctoAI's, call ``content``.

    Args:
        records: of tokens that have a log probability.
        num_top: alternatives told of each.
    """
    return [
        {
            **_alternative(record),
            "top_logprobs": [_alternative(top) for top in record.get("top", ())[:num_top]],
        }
        for record in records
    ]


def make_completion_logprobs(
    records: Sequence[LogprobRecord],
    num_top: int,
    offsets: TextOffsets,
    first_token: str | None = None,
) -> dict[str, Any]:
    """Return one object that holds OctoAI's shape (``content``) and OpenAI's legacy one.

    Args:
        records: of tokens that have a log probability.
        num_top: alternatives told of each.
        offsets: where the first of them begins; left behind the last of them.
        first_token: the token before them, which has none: in the legacy shape its entries are
            null; ``content``, whose entries all have a number, does not name it.
    """
    untold: list[Any] = [] if first_token is None else [None]
    return {
        "content": make_content(records, num_top),
        "refusal": None,
        "tokens": [
            *([] if first_token is None else [first_token]),
            *(record["token"] for record in records),
        ],
        "token_logprobs": [*untold, *(record["logprob"] for record in records)],
        "top_logprobs": [
            *untold,
            *(
                {top["token"]: top["logprob"] for top in record.get("top", ())[:num_top]}
                for record in records
            ),
        ],
        "text_offset": [
            *([] if first_token is None else [0]),
            *(offsets.take(record) for record in records),
        ],
    }


def make_prompt_logprobs(
    records: Sequence[LogprobRecord], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's ``prompt_logprobs``: null for the first token, then an object per token.

    Its keys are token ids: the token's own, then those of the alternatives, best first.

    Args:
        records: of every prompt token but the first.
        num_top: alternatives told of each.
    """
    return [None, *(_make_ranked(record, num_top) for record in records)]


def _make_ranked(record: LogprobRecord, num_top: int) -> dict[str, dict[str, Any]]:
    entries = {str(record["token_id"]): _ranked_entry(record, record.get("rank"))}
    for rank, top in enumerate(record.get("top", ())[:num_top], start=1):
        entries.setdefault(str(top["token_id"]), _ranked_entry(top, rank))
    return entries


def _ranked_entry(record: LogprobRecord, rank: int | None) -> dict[str, Any]:
    return {"logprob": record["logprob"], "rank": rank, "decoded_token": record["token"]}


def _alternative(record: LogprobRecord) -> dict[str, Any]:
    return {"token": record["token"], "logprob": record["logprob"], "bytes": record["bytes"]}


def _count_characters(data: Sequence[int]) -> int:
    return sum(not _is_continuation(byte) for byte in data)


def _is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character that an earlier byte began."""
    return byte & 0xC0 == 0x80
