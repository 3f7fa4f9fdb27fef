"""Bad words as token sequences: every way in which a tokenizer may write them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from models.errors import InvalidRequestError
from models.requests import Prompt, TextPrompt

Encode = Callable[[Prompt], tuple[int, ...]]

# Text that no tokenizer joins with what follows. Behind it a word is written as it is behind other
# text, without the space that sentencepiece puts before the first one.
_BREAK = "\n"


def encode_bad_words(words: Iterable[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, as ``SamplingParams.bad_words_token_ids`` has them.

    A word counts with and without a leading space, whether or not it is given with one. It is
    banned in the tokens that the tokenizer itself writes for it; a model may still put its letters
    together from other tokens.

    Args:
        words: texts that the output must not hold, none of them empty.
        encode: ``models.text.tokenizer.Text.encode``.

    Raises:
        InvalidRequestError: a word is not valid Unicode or makes no token.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        try:
            spellings = set(_spell(word, encode))
        except InvalidRequestError as error:
            raise InvalidRequestError("bad_words", error.reason) from error
        # One that ends with another is banned with that.
        sequences.update(
            dict.fromkeys(
                sorted(
                    ids
                    for ids in spellings
                    if not any(ids != end and ids[-len(end) :] == end for end in spellings)
                )
            )
        )
    return tuple(sequences)


def _spell(word: str, encode: Encode) -> Iterator[tuple[int, ...]]:
    bare = word.lstrip(" ") or word
    lead = _encode_plain(_BREAK, encode)
    for text in (bare, f" {bare}"):
        yield _encode_plain(text, encode)
        ids = _encode_plain(f"{_BREAK}{text}", encode)
        if len(ids) > len(lead) and ids[: len(lead)] == lead:
            yield ids[len(lead) :]


def _encode_plain(text: str, encode: Encode) -> tuple[int, ...]:
    return encode(TextPrompt(text=text, add_special_tokens=False))
