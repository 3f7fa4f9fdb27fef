"""Messages: which forms are read, and as what the chat template gets them."""

import pytest

from deployments.limits import RequestLimits
from deployments.model_directory import Selection
from deployments.translate import make_chat_job
from deployments.wire import parse_chat_request
from models.errors import InvalidRequestError
from tests.unit.deployments.fakes import MODEL_ID, chat_body

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "Hi"}


def prompt_of(*messages, **fields):
    request = parse_chat_request(chat_body(messages=list(messages), **fields))
    job = make_chat_job(request, Selection(model_id=MODEL_ID, adapter_id=None), "k", lambda: 1)
    return job.calls[0]["prompt"]


def refusal(*messages, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat_request(chat_body(messages=list(messages), **fields))
    return caught.value


def test_tool_calls_reach_the_template_with_their_arguments_as_an_object():
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]

    told = prompt_of(*messages)["messages"]

    function = {"name": "add", "arguments": {"a": 1}}
    assert told[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert told[2] == {"role": "tool", "content": "3", "tool_call_id": "call_1"}


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", "7", '{"a": ' * 5000])
def test_arguments_that_are_no_object_stay_the_text_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}

    told = prompt_of(USER, {"role": "assistant", "tool_calls": [call]})["messages"]

    assert told[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "function"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_only_an_assistant_that_calls_tools_may_be_without_content(role, content):
    assert refusal({"role": role, **content}).param == "messages.0.content"
    assert refusal({"role": "assistant", **content}).param == "messages.0.content"
    assert refusal({"role": role, "tool_calls": [CALL], **content}).param == (
        "messages.0.tool_calls"
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "foo", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": "x", "function_call": {}}, "messages.0.function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages.0.audio"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages.0.tool_calls.0.function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "messages.0.tool_calls.0.type",
        ),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "messages.0.tool_calls"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(message, param):
    assert refusal(message).param == param


def test_the_last_message_can_be_left_open():
    plain = prompt_of(USER)
    going_on = prompt_of(USER, {"role": "assistant", "content": "A"}, continue_final_message=True)
    closed = prompt_of(USER, add_generation_prompt=False)

    assert (plain["add_generation_prompt"], plain["continue_final_message"]) == (True, False)
    assert (going_on["add_generation_prompt"], going_on["continue_final_message"]) == (False, True)
    assert (closed["add_generation_prompt"], closed["continue_final_message"]) == (False, False)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(USER, **both).param == "continue_final_message"


def nested(depth):
    return {"x": nested(depth - 1)} if depth > 1 else {"x": 1}


def test_template_variables_are_passed_on_within_bounds():
    assert prompt_of(USER, chat_template_kwargs={"enable_thinking": False})[
        "template_variables"
    ] == {"enable_thinking": False}
    assert prompt_of(USER, chat_template_kwargs=nested(15))["template_variables"] == nested(15)
    for value in ([], "x", {str(index): 1 for index in range(65)}, nested(17), {"a": [[[[]]]] * 2}):
        if value == {"a": [[[[]]]] * 2}:
            prompt_of(USER, chat_template_kwargs=value)
        else:
            assert refusal(USER, chat_template_kwargs=value).param == "chat_template_kwargs"


def test_a_template_of_the_callers_own_is_passed_on_where_the_operator_allows_it():
    request = parse_chat_request(chat_body(chat_template="{{ messages }}"))

    RequestLimits(is_template_allowed=True).check(request)
    assert prompt_of(USER, chat_template="{{ messages }}")["template"] == "{{ messages }}"
    with pytest.raises(InvalidRequestError) as caught:
        RequestLimits().check(request)
    assert caught.value.param == "chat_template"
    assert refusal(USER, chat_template="x" * 65_537).param == "chat_template"
