"""Turns token ids into text piece by piece, exactly. Loads no tokenizer, knows no stop strings.

A token is a row of bytes. Byte-level vocabularies say so outright; in sentencepiece-like ones a
token is text, except for the byte-fallback tokens. So a table maps each id to its bytes and one
incremental UTF-8 decoder does the rest: constant work per token, nothing is decoded twice, half a
character is never emitted, and how the ids are cut into feeds cannot matter.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from models.errors import ConfigError

# The longest incomplete character is three bytes of four, and a lead byte always starts afresh:
# these many bytes before a position decide what is pending there.
_MAX_PENDING_BYTES = 3
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What a tokenizer must decode the same way in pieces as in one go before it is served.
_PROBES = (
    "Hello, world! It's 3.14 (or 22/7); isn't it?",
    " two  spaces,\ttabs\n\nand   lines \n",
    "def f(x):\n    return {'a': x[0] ** 2}  # ok",
    "Příliš žluťoučký kůň, naïve façade, Straße",
    "日本語のテキスト、中文字符、한국어",
    "👩‍👩‍👧‍👦 🇪🇺 👍🏽 e\u0301 \u200b\U0001d518",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes that one token adds to a text.

    Attributes:
        leading: where no text precedes it (sentencepiece drops the leading space there).
        following: behind other text.
        is_special: a control token, such as the end of a turn.
    """

    leading: bytes
    following: bytes
    is_special: bool


class SpellingTable:
    """Token id -> Spelling, filled as ids turn up.

    Owner: any thread. Entries are immutable and computed from the tokenizer alone, so two threads
    that fill the same one write the same value.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Find out how this tokenizer spells.

        Args:
            tokenizer: a transformers tokenizer; only read.

        Raises:
            ConfigError: its text is not the tokens' texts in a row, so it cannot be streamed.
        """
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._spellings: dict[int, Spelling] = {}
        self._byte_alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else {}
        self._has_byte_tokens = not self._byte_alphabet and _has_byte_fallback(tokenizer)
        self._anchor_ids = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor_ids)
        self._check()

    def __getitem__(self, token_id: int) -> Spelling:
        """Return the spelling of a token; an id that the tokenizer does not know adds nothing."""
        spelling = self._spellings.get(token_id)
        if spelling is None:
            spelling = self._spellings[token_id] = self._spell(token_id)
        return spelling

    def _spell(self, token_id: int) -> Spelling:
        is_special = token_id in self._special_ids
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return Spelling(b"", b"", is_special)
        if self._byte_alphabet:
            data = self._byte_level_bytes(token)
            return Spelling(data, data, is_special)
        leading = self._decode([token_id])
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            data = bytes.fromhex(match[1])
            # Where a leading space is dropped, a space byte is too.
            return Spelling(data if leading else b"", data, is_special)
        following = self._decode([*self._anchor_ids, token_id]).removeprefix(self._anchor_text)
        return Spelling(leading.encode(), following.encode(), is_special)

    def _byte_level_bytes(self, token: str) -> bytes:
        """Return what a byte-level token stands for; added tokens may be plain text instead."""
        try:
            return bytes(self._byte_alphabet[character] for character in token)
        except KeyError:
            return token.encode()

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _check(self) -> None:
        """Compare decoding in pieces with the tokenizer's own.

        Raises:
            ConfigError: they differ.
        """
        for probe in _PROBES:
            token_ids = self._tokenizer.encode(probe, add_special_tokens=True)
            for is_skipped in (False, True):
                detokenizer = IncrementalDetokenizer(self, is_special_token_skipped=is_skipped)
                text = detokenizer.feed(token_ids) + detokenizer.flush()
                whole = self._tokenizer.decode(
                    token_ids, skip_special_tokens=is_skipped, clean_up_tokenization_spaces=False
                )
                if text != whole:
                    raise ConfigError(
                        "model",
                        f"the tokenizer ({type(self._tokenizer).__name__}) joins tokens in a way "
                        f"that cannot be streamed: {whole!r} became {text!r}",
                    )


class IncrementalDetokenizer:
    """Ids in, final text out, for one sequence.

    The texts of all feeds and the flush join to what the tokenizer makes of context and ids
    together, less what it makes of the context. A character that the context left incomplete
    belongs to the output. Bytes that are no UTF-8 become U+FFFD, one for each invalid part, as
    soon as they cannot become a character any more; an incomplete character at the end becomes
    one U+FFFD.

    Owner: one thread at a time.
    """

    def __init__(
        self,
        table: SpellingTable,
        *,
        is_special_token_skipped: bool = True,
        context_token_ids: Sequence[int] = (),
    ) -> None:
        """Start behind a context.

        Args:
            table: of the tokenizer.
            is_special_token_skipped: leave special tokens out of the text.
            context_token_ids: what precedes, usually the prompt; only its end is decoded.
        """
        self._table = table
        self._is_special_token_skipped = is_special_token_skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_text = any(s.following for s in self._spellings(context_token_ids))
        tail = b""
        for spelling in self._spellings(reversed(context_token_ids)):
            tail = spelling.following + tail
            if len(tail) >= _MAX_PENDING_BYTES:
                break
        self._decoder.decode(tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        parts = []
        for spelling in self._spellings(token_ids):
            parts.append(spelling.following if self._has_text else spelling.leading)
            self._has_text = self._has_text or bool(spelling.following)
        return self._decoder.decode(b"".join(parts))

    def flush(self) -> str:
        """Return what is left at the end: nothing, or U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)

    def _spellings(self, token_ids: Iterator[int] | Sequence[int]) -> Iterator[Spelling]:
        """Yield the spellings of those tokens that are text."""
        for token_id in token_ids:
            spelling = self._table[token_id]
            if not (spelling.is_special and self._is_special_token_skipped):
                yield spelling


def _is_byte_level(tokenizer: Any) -> bool:
    """Return whether the tokenizer's decoder is byte-level and nothing else."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    description = json.loads(decoder.__getstate__())
    kinds = {part["type"] for part in description.get("decoders", [description])}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}


def _has_byte_fallback(tokenizer: Any) -> bool:
    """Return whether tokens such as <0xE2> stand for bytes, by trying."""
    token_ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "€".encode()])
    if None in token_ids or tokenizer.unk_token_id in token_ids:
        return False
    text: str = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    return text.strip() == "€"


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level vocabularies write for each byte.

    Printable Latin-1 stands for itself; the other bytes, in order, are written as U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet
