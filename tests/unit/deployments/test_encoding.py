"""From the engine's events to records."""

import math
import pickle

from deployments.encoding import encode_events
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    TokenDelta,
    TokenLogprob,
    Usage,
)


class Speller:
    def token_text(self, token_id):
        data = bytes([token_id])
        return data.decode(errors="replace"), data


def encode(*events):
    message = encode_events(events, Speller())
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
