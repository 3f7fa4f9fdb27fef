"""From the engine's events to records."""

import codecs
import math
import pickle
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from deployments import encoding
from deployments.encoding import encode_messages
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    PromptLogprobs,
    TokenDelta,
    TokenLogprob,
    Usage,
)


class Speller:
    def token_text(self, token_id):
        data = bytes([token_id])
        return data.decode(errors="replace"), data

    def detokenizer(self, *, is_special_token_skipped=True):
        assert not is_special_token_skipped
        return ByteFeed()


class ByteFeed:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids):
        return self._decoder.decode(bytes(token_ids))


def encode(*events):
    (message,) = encode_messages(events, Speller())
    # plain values only: both sides may run different versions
    assert pickle.loads(pickle.dumps(message)) == message
    for record in message:
        assert type(record) is dict
    return message


def test_an_admission_keeps_all_of_its_fields():
    assert encode(Admission(5, None, "cpu/bf16", 7, 4)) == [
        {
            "kind": "admission",
            "seed": 5,
            "adapter_version": None,
            "numerics": "cpu/bf16",
            "num_prompt_tokens": 7,
            "num_cached_tokens": 4,
        }
    ]


def test_deltas_and_the_end_come_in_their_order():
    message = encode(
        TokenDelta(1, (65, 66), "AB"),
        TokenDelta(0, (67,), "C", (), FinishReason.STOP, "END"),
        GenerationEnd(Usage(7, 3, 4)),
    )

    assert [record["kind"] for record in message] == ["delta", "delta", "end"]
    assert message[0]["finish_reason"] is None
    assert message[0]["token_ids"] == [65, 66]
    assert message[1]["finish_reason"] == "stop"
    assert type(message[1]["finish_reason"]) is str
    assert message[1]["stop_reason"] == "END"
    assert message[2]["usage"] == {
        "num_prompt_tokens": 7,
        "num_completion_tokens": 3,
        "num_cached_tokens": 4,
    }


def test_log_probabilities_are_spelled_and_bounded_below():
    logprobs = (
        TokenLogprob(65, -0.5, ((65, -0.5), (66, -math.inf))),
        TokenLogprob(0xC3, -1e300),
    )

    (delta,) = encode(TokenDelta(0, (65, 0xC3), "A", logprobs))

    first, second = delta["logprobs"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("A", [65], -0.5)
    assert [top["logprob"] for top in first["top"]] == [-0.5, -9999.0]
    assert (second["token"], second["bytes"]) == ("�", [0xC3])
    assert second["logprob"] == -9999.0
    assert "top" not in second


def test_a_prompt_that_is_reported_is_spelled_without_an_unfinished_character():
    token_ids = (*"né".encode(), 0xE2)

    (record,) = encode(Admission(5, None, "cpu/bf16", 4, 0, token_ids))

    assert record["prompt_text"] == "né"
    assert record["first_prompt_token"] == "n"


def test_log_probabilities_of_a_prompt_have_their_rank():
    (record,) = encode(
        PromptLogprobs(3, (TokenLogprob(65, -math.inf, ((66, -0.1),), 9), TokenLogprob(67, -1.0)))
    )

    assert (record["kind"], record["start"]) == ("prompt_logprobs", 3)
    first, second = record["logprobs"]
    assert (first["token"], first["logprob"], first["rank"]) == ("A", -9999.0, 9)
    assert [top["token"] for top in first["top"]] == ["B"]
    assert "rank" not in second


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    num_top=st.integers(0, 20),
)
def test_stretches_of_a_prompt_fill_messages_of_bounded_size(lengths, num_top):
    events, start = [], 1
    for length in lengths:
        logprobs = [
            TokenLogprob(65, -float(position), ((66, -0.1),) * num_top, 1)
            for position in range(start, start + length)
        ]
        events.append(PromptLogprobs(start, tuple(logprobs)))
        start += length
    events.append(GenerationEnd(Usage(start, 0, 0)))

    with mock.patch.object(encoding, "MAX_PROMPT_TOKENS_PER_MESSAGE", 40):
        messages = list(encode_messages(events, Speller()))

    told = []
    for message in messages:
        records = [record for record in message if record["kind"] == "prompt_logprobs"]
        logprobs = [each for record in records for each in record["logprobs"]]
        assert len(logprobs) * (1 + num_top) <= 40
        for record in records:
            assert record["start"] == 1 + len(told)
            told.extend(each["logprob"] for each in record["logprobs"])
    assert told == [max(-float(position), -9999.0) for position in range(1, start)]
    assert [record["kind"] for record in messages[-1]][-1] == "end"
    assert all(messages)
