"""Tests of one choice's text and end."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.engine.choice import ChoiceOutput
from models.errors import InvalidRequestError
from models.requests import FinishReason, TokenLogprob
from tests.unit.models.engine.fakes import (
    EOS,
    PIECES,
    SPECIAL,
    ByteText,
    make_request,
)


def make_output(sampling=None, **fields):
    request = make_request(sampling=sampling, **fields)
    text = ByteText()
    detokenizer = text.detokenizer(is_special_token_skipped=request.is_special_token_skipped)
    return ChoiceOutput(0, request, request.sampling, text.eos_token_ids, detokenizer)


def advance_all(output, token_ids):
    deltas = []
    for index, token_id in enumerate(token_ids, start=1):
        deltas.append(output.advance(token_id, index))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def ids(text):
    return tuple(text.encode())


def test_eos_ends_the_choice_and_is_no_text_even_if_special_tokens_are_shown():
    deltas = advance_all(make_output(is_special_token_skipped=False), (*ids("hi"), EOS, 65))

    assert text_of(deltas) == "hi"
    assert deltas[-1].token_ids == (EOS,)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason is None


def test_eos_is_no_text_even_if_stops_are_included():
    output = make_output(is_special_token_skipped=False, is_stop_included=True)

    assert text_of(advance_all(output, (*ids("hi"), EOS))) == "hi"


def test_under_ignore_eos_the_token_is_like_any_other():
    output = make_output({"ignore_eos": True}, is_special_token_skipped=False)

    deltas = advance_all(output, (*ids("a"), EOS, *ids("b")))

    assert text_of(deltas) == "a<eos>b"
    assert deltas[-1].finish_reason is None


def test_a_stop_token_ends_the_choice_without_being_text():
    deltas = advance_all(make_output({"stop_token_ids": (ord("c"),)}), ids("abcd"))

    assert text_of(deltas) == "ab"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == ord("c")


def test_a_stop_token_is_text_if_stops_are_included():
    output = make_output({"stop_token_ids": (ord("c"),)}, is_stop_included=True)

    assert text_of(advance_all(output, ids("abcd"))) == "abc"


def test_the_last_token_of_the_limit_is_text():
    deltas = advance_all(make_output({"max_tokens": 3}), ids("abcd"))

    assert text_of(deltas) == "abc"
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].stop_reason is None


def test_a_stop_string_that_spans_tokens_is_never_seen():
    deltas = advance_all(make_output(stop=("DEFGHIJ",)), (*ids("ABCDEFG"), *ids("HIJKL")))

    assert text_of(deltas) == "ABC"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == "DEFGHIJ"
    assert deltas[-1].token_ids == (ord("J"),)


def test_a_stop_string_that_begins_and_ends_inside_of_tokens_cuts_the_text_exactly():
    # "abc" "DEF" "GHIJK" with the stop string cDEFGH
    deltas = advance_all(make_output(stop=("cDEFGH",)), (258, 259, 260))

    assert text_of(deltas) == "ab"


def test_an_included_stop_string_is_the_end_of_the_text():
    output = make_output(stop=("cDEFGH",), is_stop_included=True)

    assert text_of(advance_all(output, (258, 259, 260))) == "abcDEFGH"


def test_a_near_miss_is_released_once_it_cannot_be_a_stop_string():
    deltas = advance_all(make_output(stop=("DEFX",)), ids("DEFGH"))

    assert [delta.text for delta in deltas] == ["", "", "", "DEFG", "H"]


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    output = make_output({"max_tokens": 3}, stop=("DEFX",))

    deltas = advance_all(output, ids("DEF"))

    assert [delta.text for delta in deltas] == ["", "", "DEF"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_outweighs_the_limit_at_the_same_token():
    deltas = advance_all(make_output({"max_tokens": 3}, stop=("bc",)), ids("abc"))

    assert text_of(deltas) == "a"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == "bc"


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end():
    deltas = advance_all(make_output({"max_tokens": 3}), ids("a€"))

    assert [delta.text for delta in deltas] == ["a", "", "\ufffd"]


def test_a_stop_string_in_the_text_of_the_flush_is_found():
    deltas = advance_all(make_output({"max_tokens": 3}, stop=("\ufffd",)), ids("a€"))

    assert text_of(deltas) == "a"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == "\ufffd"


def test_special_tokens_are_left_out_of_the_text_only_if_skipped():
    token_ids = (*ids("a"), SPECIAL, *ids("b"))

    assert text_of(advance_all(make_output(), token_ids)) == "ab"
    shown = make_output(is_special_token_skipped=False)
    assert text_of(advance_all(shown, token_ids)) == "a<special>b"


def test_stop_strings_count_only_behind_the_first_min_tokens():
    output = make_output({"min_tokens": 4}, stop=("b",))

    deltas = advance_all(output, ids("abababab"))

    assert text_of(deltas) == "ababa"
    assert len(deltas) == 6


def test_a_stop_string_cannot_begin_within_the_first_min_tokens():
    output = make_output({"min_tokens": 2}, stop=("bc",))

    deltas = advance_all(output, ids("abcabcabc"))

    assert text_of(deltas) == "abca"


def test_log_probabilities_travel_with_their_token():
    logprob = TokenLogprob(65, -0.5)

    assert make_output().advance(65, 1, logprob).logprobs == (logprob,)
    assert make_output().advance(65, 1).logprobs == ()


def test_replayed_tokens_count_and_say_nothing():
    output = make_output({"max_tokens": 4})

    assert output.replay(ids("ab")) is None
    deltas = [output.advance(ord("c"), 3), output.advance(ord("d"), 4)]

    assert text_of(deltas) == "cd"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_what_replayed_tokens_held_back_is_said_later():
    output = make_output(stop=("abX",))
    output.replay(ids("zab"))

    assert output.advance(ord("c"), 4).text == "abc"


def test_a_stop_string_may_begin_in_replayed_tokens():
    output = make_output(stop=("bcd",))
    output.replay(ids("abc"))

    delta = output.advance(ord("d"), 4)

    assert delta.text == ""
    assert delta.stop_reason == "bcd"


def test_replaying_a_finished_choice_tells_its_end_without_tokens():
    output = make_output({"stop_token_ids": (ord("c"),)})

    end = output.replay(ids("abc"))

    assert end.token_ids == ()
    assert end.text == ""
    assert end.finish_reason is FinishReason.STOP
    assert end.stop_reason == ord("c")


def test_tokens_behind_an_end_cannot_be_replayed():
    with pytest.raises(InvalidRequestError) as raised:
        make_output().replay((*ids("ab"), EOS, 65))

    assert raised.value.param == "emitted_token_ids"


def expected_text(token_ids, stops, max_tokens):
    """The text that ends before whatever stop string is complete first, the obvious way."""
    detokenizer = ByteText().detokenizer()
    text = ""
    for index, token_id in enumerate(token_ids[:max_tokens], start=1):
        is_last = index == max_tokens or token_id == EOS
        text += "" if token_id == EOS else detokenizer.feed((token_id,))
        if is_last:
            text += detokenizer.flush()
        ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(stops)]
        if stops and ends:
            complete = text[: ends[0]]
            return min((complete[: -len(s)] for s in stops if complete.endswith(s)), key=len)
        if is_last:
            break
    return text


characters = st.one_of(
    st.sampled_from("abcDEé€😀").map(ids), st.sampled_from(sorted(PIECES)).map(lambda t: (t,))
)


@given(
    st.lists(characters, min_size=1, max_size=12).map(lambda parts: sum(parts, ())),
    st.lists(st.text("abcDEé€\ufffd", min_size=1, max_size=4), max_size=3, unique=True),
    st.integers(0, 30),
)
@example(ids("ab€"), ["b\ufffd"], 4)
def test_the_joined_text_equals_the_obvious_way_for_every_cut(token_ids, stops, extra):
    for max_tokens in range(1, len(token_ids) + 2):
        output = make_output({"max_tokens": max_tokens}, stop=tuple(stops))
        drawn = (*token_ids, EOS, 65, 65)

        deltas = advance_all(output, drawn)

        assert deltas[-1].finish_reason is not None
        assert text_of(deltas) == expected_text(drawn, tuple(stops), max_tokens)


@given(
    st.lists(characters, min_size=2, max_size=12).map(lambda parts: sum(parts, ())),
    st.lists(st.text("abcDEé€", min_size=1, max_size=4), max_size=3, unique=True),
    st.data(),
)
def test_a_resumed_choice_goes_on_exactly_where_it_was_left(token_ids, stops, data):
    drawn = (*token_ids, EOS)
    whole = advance_all(make_output(stop=tuple(stops)), drawn)
    num_emitted = data.draw(st.integers(0, len(whole)))
    output = make_output(stop=tuple(stops))

    end = output.replay(drawn[:num_emitted])
    rest = [] if end else [output.advance(drawn[i], i + 1) for i in range(num_emitted, len(whole))]

    assert (end is not None) == (num_emitted == len(whole))
    assert rest == whole[num_emitted:]
