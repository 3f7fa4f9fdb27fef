"""Where tokens begin in a text, whatever the tokens are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.logprob_objects import PromptResult, TextOffsets, make_completion_logprobs

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def record(data):
    return {
        "token_id": 1,
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": -1.0,
    }


def cut(text, places):
    """The tokens of a text with the byte at which each begins; the first ends with a character."""
    data = text.encode()
    starts = {len(text[:index].encode()) for index in range(len(text))}
    inside = sorted({place % len(data) for place in places} - {0})
    inside = list(itertools.dropwhile(lambda at: at not in starts, inside))
    borders = [0, *inside, len(data)]
    return [(begin, data[begin:end]) for begin, end in itertools.pairwise(borders)]


def character_at(text, position):
    """The index of the character that holds a byte."""
    ends = itertools.accumulate(len(character.encode()) for character in text)
    return next(index for index, end in enumerate(ends) if position < end)


@given(
    text=texts,
    places=st.lists(st.integers(0, 100), max_size=8),
    share=st.floats(0, 1, allow_nan=False),
)
def test_a_token_begins_with_the_character_that_holds_its_first_byte(text, places, share):
    pieces = cut(text, places)
    # The prompt ends behind any token, also inside of a character, which the output then completes.
    num_prompt_tokens = 1 + round(share * (len(pieces) - 1))
    prompt_data = b"".join(piece for _, piece in pieces[:num_prompt_tokens])
    records = [record(piece) for _, piece in pieces[1:]]
    prompt = PromptResult(
        num_tokens=num_prompt_tokens,
        text=prompt_data.decode(errors="ignore"),
        logprobs=records[: num_prompt_tokens - 1],
    )

    offsets = TextOffsets.behind_first_token(prompt)
    told = make_completion_logprobs(records, 0, offsets, "first")["text_offset"]

    assert told == [character_at(text, begin) for begin, _ in pieces]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        # a BOS before them
        ("Hello world", [b"Hello", b" world"], [0, 0, 5]),
        # a BOS, and a space that sentencepiece puts before the text
        ("Hello world", [b" Hello", b" world"], [0, 0, 5]),
        # no token before the text's own
        ("Hello world", [b" world"], [0, 5]),
        ("Hello", [], [0]),
    ],
)
def test_tokens_that_stand_in_no_text_take_no_place(text, pieces, expected):
    scored = [record(piece) for piece in pieces]
    prompt = PromptResult(num_tokens=1 + len(scored), text=text, logprobs=scored)

    told = make_completion_logprobs(scored, 0, TextOffsets.behind_first_token(prompt), "first")

    assert told["text_offset"] == expected


def test_an_unknown_token_without_bytes_takes_no_place():
    told = make_completion_logprobs([record(b"a"), record(b""), record(b"b")], 0, TextOffsets())

    assert told["text_offset"] == [0, 1, 1]
