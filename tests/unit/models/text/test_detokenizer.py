"""Incremental detokenisation: exact, never half a character, however the ids are cut."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from models.errors import ConfigError
from models.text.detokenizer import IncrementalDetokenizer, SpellingTable
from tests.unit.models.text.conftest import (
    make_byte_level_tokenizer,
    make_sentencepiece_like_tokenizer,
    wrap,
)

FAMILY = "👩‍👩‍👧‍👦"
CUTS = st.lists(st.integers(1, 5), max_size=60)
# Characters of one to four bytes, those that join, and blanks.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(" \n\tabché日本👩👧\u200d\ufe0f🇪🇺"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def bundled_table(bundled_text):
    return SpellingTable(bundled_text._tokenizer)


@pytest.fixture(scope="module", params=["bundled", "llama", "metaspace"])
def any_case(request):
    """Every kind of tokenizer in turn, with its table."""
    if request.param == "bundled":
        tokenizer = request.getfixturevalue("bundled_text")._tokenizer
    else:
        tokenizer = make_sentencepiece_like_tokenizer(kind=request.param)
    return tokenizer, SpellingTable(tokenizer)


@pytest.fixture(scope="module", params=["llama", "metaspace"])
def sentencepiece_case(request):
    tokenizer = make_sentencepiece_like_tokenizer(kind=request.param)
    return tokenizer, SpellingTable(tokenizer)


def detokenize(table, token_ids, cuts=(), **options):
    """Feed ids in pieces of the given sizes, the rest at once; return text as it was emitted."""
    detokenizer = IncrementalDetokenizer(table, **options)
    deltas = []
    start = 0
    for size in cuts:
        deltas.append(detokenizer.feed(token_ids[start : start + size]))
        start += size
    deltas.append(detokenizer.feed(token_ids[start:]))
    deltas.append(detokenizer.flush())
    return deltas


def decode(tokenizer, token_ids, *, skip=True):
    return tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def byte_ids(table, tokenizer):
    """Return ids of tokens that are one byte each, those that are no characters by themselves."""
    return [
        token_id
        for token_id in range(len(tokenizer))
        if len(table[token_id].following) == 1 and table[token_id].following[0] >= 0x80
    ]


@given(data=st.data(), cuts=CUTS, is_skipped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_ids_of_a_byte_level_vocabulary_decode_as_in_one_go(
    data, cuts, is_skipped, bundled_text, bundled_table
):
    # Every byte pattern, valid or not: also halves of characters with special tokens in between.
    tokenizer = bundled_text._tokenizer
    ids = st.one_of(
        st.integers(0, len(tokenizer) - 1),
        st.sampled_from(byte_ids(bundled_table, tokenizer)),
        st.integers(0, 3),
    )
    token_ids = data.draw(st.lists(ids, max_size=40))

    deltas = detokenize(bundled_table, token_ids, cuts, is_special_token_skipped=is_skipped)

    assert "".join(deltas) == decode(tokenizer, token_ids, skip=is_skipped)


@given(data=st.data(), cuts=CUTS, is_skipped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_ids_of_a_byte_fallback_vocabulary_give_one_text_however_cut(
    data, cuts, is_skipped, sentencepiece_case
):
    tokenizer, table = sentencepiece_case
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))

    pieces = detokenize(table, token_ids, cuts, is_special_token_skipped=is_skipped)
    whole = detokenize(table, token_ids, is_special_token_skipped=is_skipped)

    assert "".join(pieces) == "".join(whole)


@given(data=st.data(), cuts=CUTS, is_skipped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_ids_of_pieces_and_special_tokens_decode_as_in_one_go(
    data, cuts, is_skipped, sentencepiece_case
):
    # Blanks at the start, before, behind and between special tokens.
    tokenizer, table = sentencepiece_case
    first_piece = tokenizer.convert_tokens_to_ids("▁")
    ids = st.one_of(st.integers(first_piece, len(tokenizer) - 1), st.integers(0, 4))
    token_ids = data.draw(st.lists(st.one_of(ids, st.just(first_piece)), max_size=20))

    deltas = detokenize(table, token_ids, cuts, is_special_token_skipped=is_skipped)

    assert "".join(deltas) == decode(tokenizer, token_ids, skip=is_skipped)


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=100, deadline=None)
def test_text_comes_back_as_the_tokenizer_decodes_it(text, cuts, any_case):
    tokenizer, table = any_case
    token_ids = encode(tokenizer, text)

    deltas = detokenize(table, token_ids, cuts)

    assert "".join(deltas) == decode(tokenizer, token_ids)


@given(text=TEXTS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_output_is_what_the_tokenizer_adds_to_the_context(text, data, any_case):
    tokenizer, table = any_case
    token_ids = encode(tokenizer, text)
    split = data.draw(st.integers(0, len(token_ids)))
    context, output = token_ids[:split], token_ids[split:]
    # A context that ends within a character has a test of its own.
    assume("\ufffd" not in decode(tokenizer, context))

    deltas = detokenize(table, output, [1] * len(output), context_token_ids=context)

    assert decode(tokenizer, context) + "".join(deltas) == decode(tokenizer, token_ids)


def test_an_emoji_of_several_tokens_is_emitted_whole(bundled_text, bundled_table):
    token_ids = encode(bundled_text._tokenizer, FAMILY)

    deltas = detokenize(bundled_table, token_ids, [1] * len(token_ids))

    assert len(token_ids) > len(FAMILY)
    assert [delta for delta in deltas if delta] == list(FAMILY)


def test_a_character_begun_in_the_context_is_finished_in_the_output(bundled_text, bundled_table):
    token_ids = encode(bundled_text._tokenizer, "a 👩")

    deltas = detokenize(bundled_table, token_ids[-1:], context_token_ids=token_ids[:-1])

    assert "".join(deltas) == "👩"


def test_an_incomplete_character_at_the_end_is_one_replacement_character(
    bundled_text, bundled_table
):
    token_ids = encode(bundled_text._tokenizer, "ab👩")[:-1]

    deltas = detokenize(bundled_table, token_ids, [1] * len(token_ids))

    assert "".join(deltas[:-1]) == "ab"
    assert deltas[-1] == "\ufffd"


def test_a_character_cut_off_by_other_text_is_replaced_before_that_text(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    half = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>"])
    word = tokenizer.convert_tokens_to_ids(["▁hello"])

    deltas = detokenize(table, [*half, *word], [1, 1])

    assert deltas == ["", "", "\ufffd hello", ""]


def test_a_leading_space_survives_behind_a_skipped_special_token(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "<|end|>", "▁world"])

    assert "".join(detokenize(table, ids, [1, 1])) == "hello world"


def test_a_leading_space_goes_behind_a_context_that_has_no_text(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁world"])

    deltas = detokenize(table, ids, context_token_ids=[tokenizer.bos_token_id])

    assert "".join(deltas) == "hello world"


def test_a_leading_space_goes_behind_an_id_that_the_tokenizer_does_not_know(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    word = tokenizer.convert_tokens_to_ids("▁hello")

    assert "".join(detokenize(table, [10**6, word])) == "hello"


def test_a_space_byte_at_the_start_is_treated_as_the_tokenizer_does(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    token_ids = tokenizer.convert_tokens_to_ids(["<0x20>", "▁hello"])

    assert "".join(detokenize(table, token_ids)) == decode(tokenizer, token_ids)


def test_a_leading_space_stays_behind_a_prompt(sentencepiece_case):
    tokenizer, table = sentencepiece_case
    hello, world = tokenizer.convert_tokens_to_ids(["▁hello", "▁world"])

    assert "".join(detokenize(table, [world], context_token_ids=[hello])) == " world"


def test_special_tokens_are_spelled_out_on_request(bundled_text, bundled_table):
    token_ids = encode(bundled_text._tokenizer, "yes<|im_end|>")

    skipped = detokenize(bundled_table, token_ids)
    spelled = detokenize(bundled_table, token_ids, is_special_token_skipped=False)

    assert "".join(skipped) == "yes"
    assert "".join(spelled) == "yes<|im_end|>"


def test_added_tokens_with_characters_outside_of_the_byte_alphabet_keep_their_text():
    added = ("<a tool call>", "«日本»")
    tokenizer = make_byte_level_tokenizer(added=added)
    token_ids = tokenizer.convert_tokens_to_ids(list(added))

    deltas = detokenize(SpellingTable(tokenizer), token_ids, [1])

    assert deltas == [*added, ""]


def test_an_id_beyond_the_tokenizer_adds_nothing(bundled_text, bundled_table):
    token_ids = encode(bundled_text._tokenizer, "ab")

    deltas = detokenize(bundled_table, [token_ids[0], 10**6, *token_ids[1:]], [1, 1])

    assert "".join(deltas) == "ab"


def test_a_tokenizer_whose_tokens_do_not_simply_join_is_refused():
    # A word's last token ends in a mark that is a space only if another word follows.
    vocabulary = {token: index for index, token in enumerate(("<unk>", "a", "b", "a</w>", "b</w>"))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder("</w>")

    with pytest.raises(ConfigError, match="cannot be streamed"):
        SpellingTable(wrap(backend))
