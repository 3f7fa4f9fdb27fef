"""Bad words in the tokens of several kinds of tokenizers."""

import pytest

from models.errors import InvalidRequestError
from models.requests import TextPrompt
from models.text.bad_words import encode_bad_words
from models.text.tokenizer import Text
from tests.unit.models.text.conftest import (
    make_byte_level_tokenizer,
    make_sentencepiece_like_tokenizer,
)


def is_banned(sequences, token_ids):
    """Whether an output holds one of the sequences."""
    return any(
        tuple(token_ids[at : at + len(banned)]) == banned
        for banned in sequences
        for at in range(len(token_ids))
    )


@pytest.fixture(scope="module", params=["byte_level", "llama", "metaspace"])
def text(request):
    if request.param == "byte_level":
        merges = [("h", "e"), ("Ġ", "he"), ("l", "o"), ("Ġhe", "l")]
        return Text(make_byte_level_tokenizer(merges=merges))
    return Text(make_sentencepiece_like_tokenizer(kind=request.param))


def encode(text, words):
    return text.encode(TextPrompt(text=words, add_special_tokens=False))


@pytest.mark.parametrize("word", ["hello", " hello", "world", "the"])
@pytest.mark.parametrize("before", ["", "\n", "(", " ", "12 ", "and\n "])
def test_a_word_is_banned_where_the_tokenizer_itself_would_write_it(text, word, before):
    sequences = encode_bad_words([word], text.encode)

    assert is_banned(sequences, encode(text, before + word.strip()))


def test_other_words_are_not_banned(text):
    sequences = encode_bad_words(["hello"], text.encode)

    for words in ("he", "lo", "hell", "and the world", "heLLo"):
        assert not is_banned(sequences, encode(text, words))


def test_a_leading_space_changes_nothing(text):
    assert encode_bad_words([" hello"], text.encode) == encode_bad_words(["hello"], text.encode)


def test_a_sequence_that_ends_with_another_is_left_out(text):
    sequences = encode_bad_words(["hello", "hello", "world"], text.encode)

    assert len(set(sequences)) == len(sequences)
    for one in encode_bad_words(["hello"], text.encode):
        for other in encode_bad_words(["hello"], text.encode):
            assert one == other or one[-len(other) :] != other


def test_spaces_and_line_breaks_are_words_too(text):
    for word in (" ", "\n"):
        assert is_banned(encode_bad_words([word], text.encode), encode(text, f"a{word}b"))


def test_a_word_of_the_bundled_model_is_one_token_with_and_one_without_a_space(bundled_text):
    sequences = encode_bad_words(["Paris"], bundled_text.encode)

    spelled = {
        b"".join(bundled_text.token_text(token_id)[1] for token_id in ids) for ids in sequences
    }
    assert spelled == {b"Paris", b" Paris"}
    assert is_banned(sequences, encode(bundled_text, "The capital of France is Paris."))


def test_a_word_that_cannot_be_written_is_refused_by_name(text):
    with pytest.raises(InvalidRequestError) as caught:
        encode_bad_words(["\ud800"], text.encode)

    assert caught.value.param == "bad_words"
