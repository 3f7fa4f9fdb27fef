"""What becomes of request bodies of every form."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from models.errors import InvalidRequestError, RequestError
from tests.unit.deployments.fakes import chat_body, completion_body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "x"]), children)
    ),
    max_leaves=8,
)
all_fields = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "x"})


@given(st.dictionaries(st.sampled_from(all_fields), json_values))
def test_any_json_object_is_a_request_or_an_error_of_the_caller(fields):
    for parse, body in (
        (parse_chat_request, chat_body(**fields)),
        (parse_completion_request, completion_body(**fields)),
    ):
        # anything that is not an error of the caller fails here
        with contextlib.suppress(RequestError):
            assert parse(body).n >= 1


@given(json_values)
def test_any_json_value_is_a_request_or_an_error_of_the_caller(body):
    for parse in (parse_chat_request, parse_completion_request):
        with pytest.raises(RequestError):
            parse(body)


def test_text_parts_become_lines_of_one_text():
    content = [{"type": "text", "text": "one"}, {"text": "two"}, "three"]
    request = parse_chat_request(chat_body(messages=[{"role": "user", "content": content}]))

    assert request.messages[0].content == "one\ntwo\nthree"


def test_empty_content_is_content():
    request = parse_chat_request(chat_body(messages=[{"role": "assistant", "content": ""}]))

    assert request.messages[0].content == ""


@pytest.mark.parametrize(
    ("prompt", "items"),
    [
        ("text", ("text",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["one", [2, 3]], ("one", (2, 3))),
        ("", ("",)),
    ],
)
def test_a_prompt_may_have_every_form(prompt, items):
    assert parse_completion_request(completion_body(prompt=prompt)).prompt == items


@pytest.mark.parametrize(
    ("stop", "strings"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())]
)
def test_stop_is_a_string_or_a_list(stop, strings):
    assert parse_chat_request(chat_body(stop=stop)).stop == strings


def test_a_logit_bias_may_be_empty():
    assert parse_chat_request(chat_body(logit_bias={})).logit_bias == ()


def test_whole_numbers_are_numbers():
    request = parse_chat_request(chat_body(temperature=1, logit_bias={"7": 3}))

    assert request.temperature == 1.0
    assert request.logit_bias == ((7, 3.0),)


def test_metadata_counts_characters_and_not_bytes():
    metadata = {"ü" * 64: "ü" * 512}

    assert parse_chat_request(chat_body(metadata=metadata)).metadata == metadata


@pytest.mark.parametrize("value", [False, None])
def test_values_that_ask_for_nothing_are_accepted(value):
    fields = {"echo": value, "loglikelihood": value, "use_beam_search": value}

    assert parse_completion_request(completion_body(**fields)).ignored_fields == ()


def test_false_is_not_zero_and_one_is_not_true():
    for fields in ({"echo": 0}, {"priority": False}, {"add_generation_prompt": 1}):
        with pytest.raises(InvalidRequestError):
            parse_chat_request(chat_body(**fields))


def test_best_of_may_equal_n_also_in_a_stream():
    assert parse_chat_request(chat_body(n=3, best_of=3, stream=True)).num_candidates == 3


def test_an_echo_without_log_probabilities_may_be_streamed():
    assert parse_completion_request(completion_body(echo=True, stream=True)).is_prompt_echoed


@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids"])
def test_an_empty_list_asks_for_nothing(field):
    assert parse_chat_request(chat_body(**{field: []})).ignored_fields == ()


def test_many_wrong_messages_cost_no_more_than_one():
    messages = [{}] * 9_000

    with pytest.raises(InvalidRequestError) as caught:
        parse_chat_request(chat_body(messages=messages))

    assert caught.value.param.startswith("messages.0.")


def test_a_long_name_of_a_field_is_cut_in_its_error():
    fields = {"x" * 5_000: 1, "metadata": {"k" * 5_000: 1}}

    with pytest.raises(InvalidRequestError) as caught:
        parse_chat_request(chat_body(**fields))

    assert len(str(caught.value)) < 500


def test_names_of_fields_are_strings():
    with pytest.raises(InvalidRequestError):
        parse_chat_request({**chat_body(), 3: 4})
