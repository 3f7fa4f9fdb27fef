"""The fast way of encoding events tells the same as the plain one."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.answer_form import AnswerForm, LogprobScope
from deployments.responses import ReplyHead, make_reply
from deployments.sse import EventEncoder, frame
from tests.unit.deployments.fakes import logprob

HEAD = ReplyHead(id="chatcmpl-1", created=7, model='odd "name"', system_fingerprint="fp_x")

# What JSON cannot hold never leaves the tokenizer.
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


def make_pair(**options):
    form = AnswerForm(**{"is_chat": True, "num_top_logprobs": 1, **options})
    return make_reply(HEAD, form), EventEncoder(make_reply(HEAD, form))


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), texts), min_size=1, max_size=6),
    is_chat=st.booleans(),
    logprobs=st.sampled_from([LogprobScope.NONE, LogprobScope.OUTPUT]),
    has_usage=st.booleans(),
)
def test_encoded_pieces_equal_the_encoded_objects(pieces, is_chat, logprobs, has_usage):
    reply, encoder = make_pair(is_chat=is_chat, logprobs=logprobs, has_stream_usage=has_usage)

    for choice, text in pieces:
        encoded = encoder.delta(choice, text, [])
        assert encoded == frame(orjson.dumps(reply.delta(choice, text, [])))


@given(texts)
def test_an_event_is_one_line_whatever_the_text(text):
    _, encoder = make_pair()

    encoded = encoder.delta(0, text, [])

    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert encoded.count(b"\n") == 2
    assert json.loads(encoded.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("is_chat", [True, False])
def test_pieces_with_log_probabilities_equal_the_encoded_objects(is_chat):
    reply, encoder = make_pair(is_chat=is_chat, logprobs=LogprobScope.OUTPUT)

    for token in ("a", "é", "b"):
        records = [logprob(token, top=[(token, -0.5)])]
        expected = frame(orjson.dumps(reply.delta(0, token, records)))
        assert encoder.delta(0, token, records) == expected


def test_every_other_event_equals_the_encoded_object():
    reply, encoder = make_pair(has_stream_usage=True)
    usage = {"num_prompt_tokens": 3, "num_completion_tokens": 4, "num_cached_tokens": 1}

    assert encoder.opening(1) == frame(orjson.dumps(reply.opening(1)))
    assert encoder.finish(1, "stop", 7) == frame(orjson.dumps(reply.finish(1, "stop", 7)))
    assert encoder.usage(usage) == frame(orjson.dumps(reply.usage(usage)))


def test_a_completion_has_no_opening():
    _, encoder = make_pair(is_chat=False)

    assert encoder.opening(0) is None
