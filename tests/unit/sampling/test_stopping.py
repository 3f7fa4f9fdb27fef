import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sampling.errors import InvalidSamplingParamsError
from sampling.params import SamplingParams
from sampling.stopping import StopChecker, StopReason, StopStringMatcher, StopVerdict

EOS = 2


@pytest.mark.parametrize(
    ("params", "token_id", "num_output_tokens", "reason"),
    [
        ({}, EOS, 1, "eos"),
        ({}, 5, 1, None),
        ({"stop_token_ids": (5,)}, 5, 1, "stop_token"),
        ({"stop_token_ids": (EOS,)}, EOS, 1, "eos"),
        ({"ignore_eos": True}, EOS, 1, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, 1, "stop_token"),
        ({"max_tokens": 3}, 5, 2, None),
        ({"max_tokens": 3}, 5, 3, "length"),
        ({"max_tokens": 3}, EOS, 3, "eos"),
        ({"max_tokens": 3, "ignore_eos": True}, EOS, 3, "length"),
        ({"min_tokens": 2}, EOS, 2, None),
        ({"min_tokens": 2}, EOS, 3, "eos"),
        ({"min_tokens": 2, "stop_token_ids": (5,)}, 5, 2, None),
        ({"min_tokens": 2, "max_tokens": 2}, EOS, 2, "length"),
    ],
)
def test_the_newest_token_ends_the_sequence_or_not(params, token_id, num_output_tokens, reason):
    checker = StopChecker(SamplingParams(**params), frozenset({EOS, 3}))

    verdict = checker.check(token_id, num_output_tokens)

    expected = None if reason is None else StopVerdict(StopReason(reason), token_id)
    assert verdict == expected


def test_every_id_of_the_eos_set_ends_the_sequence():
    checker = StopChecker(SamplingParams(), frozenset({EOS, 3}))

    assert [checker.check(token_id, 1) is not None for token_id in (2, 3, 4)] == [True, True, False]


def reference_end(text, stop):
    """Return (end, stop string) of the first match: it ends first, then starts first."""
    matches = [
        (start + len(each), start, each)
        for each in stop
        for start in range(len(text))
        if text.startswith(each, start)
    ]
    if not matches:
        return None
    end, _, each = min(matches)
    return end, each


def streamed(matcher, chunks):
    """Return all text that a reader of the stream gets, and the stop string."""
    text, found = "", None
    for chunk in chunks:
        match = matcher.feed(chunk)
        text += match.text
        found = match.stop
        if found is not None:
            break
    return text + matcher.flush(), found


stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
texts = st.text("abc", max_size=30)


@given(text=texts, stop=stops, is_stop_included=st.booleans(), data=st.data())
@example(text="xABCDy", stop=["ABC", "ABCD"], is_stop_included=False, data=None)
def test_any_cut_of_the_text_gives_the_reference_result(text, stop, is_stop_included, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text))))) if data else [2, 3]
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    result = streamed(StopStringMatcher(stop, is_stop_included), chunks)

    end = reference_end(text, stop)
    if end is None:
        assert result == (text, None)
    else:
        cut = end[0] if is_stop_included else end[0] - len(end[1])
        assert result == (text[:cut], end[1])


@given(text=texts, stop=stops)
def test_exactly_the_longest_beginning_of_a_stop_is_held_back(text, stop):
    matcher = StopStringMatcher(stop)
    emitted = ""
    for length, character in enumerate(text, start=1):
        match = matcher.feed(character)
        if match.stop is not None:
            return
        emitted += match.text
        seen = text[:length]
        longest = max(
            (k for each in stop for k in range(len(each)) if seen.endswith(each[:k])), default=0
        )
        assert emitted == seen[: length - longest]


@pytest.mark.parametrize(
    ("stop", "chunks", "expected"),
    [
        (
            ["DEFGHIJ"],
            ["AB", "CD", "EF", "GHIJ", "K"],
            [("AB", None), ("C", None), ("", None), ("", "DEFGHIJ"), ("", "DEFGHIJ")],
        ),
        (["STOP"], ["a ST", "AR"], [("a ", None), ("STAR", None)]),
        (["STOP"], ["one STOP two"], [("one ", "STOP")]),
        (["ab", "abc"], ["xabc"], [("x", "ab")]),
        (["abcd", "bc"], ["abcd"], [("a", "bc")]),
        (["bc", "abc"], ["xabcy"], [("x", "abc")]),
        (["aab"], ["aa", "ab"], [("", None), ("a", "aab")]),
        (["\n\n"], ["x\n", "y\n", "\n"], [("x", None), ("\ny", None), ("", "\n\n")]),
        (["é🙂"], ["caf", "é", "🙂"], [("caf", None), ("", None), ("", "é🙂")]),
        ([], ["abc", ""], [("abc", None), ("", None)]),
        (["x", "x"], ["ax"], [("a", "x")]),
    ],
)
def test_text_is_emitted_as_soon_as_no_stop_can_begin_in_it(stop, chunks, expected):
    matcher = StopStringMatcher(stop)

    matches = [matcher.feed(chunk) for chunk in chunks]

    assert [(match.text, match.stop) for match in matches] == expected


def test_text_held_back_at_the_end_is_flushed_once():
    matcher = StopStringMatcher(["STOP"])
    matcher.feed("go ST")

    assert matcher.flush() == "ST"
    assert matcher.flush() == ""


def test_nothing_is_flushed_after_a_stop():
    matcher = StopStringMatcher(["STOP"])
    matcher.feed("go STOP and on")

    assert matcher.flush() == ""


def test_an_included_stop_is_emitted_with_the_text_before_it():
    matcher = StopStringMatcher(["STOP"], is_stop_included=True)

    assert matcher.feed("go ST").text == "go "
    assert matcher.feed("OP on").text == "STOP"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidSamplingParamsError, match="empty"):
        StopStringMatcher(["a", ""])
