"""Details of the error table that no route shows."""

import http

import orjson
import pytest

from deployments.http_errors import PROMPT_PARAM, describe_error
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    AdapterSlotTimeoutError,
    ConfigError,
    InvalidAdapterIdError,
    InvalidRequestError,
    PromptTooLongError,
)
from sampling.errors import NonFiniteLogitsError, NoTokenLeftError


def test_detail_names_the_place_as_a_path():
    body = orjson.loads(
        describe_error(InvalidRequestError("messages.3.content", "is bad")).to_body("id")
    )

    assert body["detail"] == [
        {
            "loc": ["body", "messages", 3, "content"],
            "msg": "messages.3.content: is bad",
            "type": "invalid_value",
        }
    ]
    assert body["request_id"] == "id"


def test_only_errors_of_a_body_have_detail():
    assert b"detail" not in describe_error(NonFiniteLogitsError()).to_body("")


def test_an_error_of_a_field_without_a_name_has_no_param():
    assert describe_error(InvalidRequestError("", "is no JSON")).error["param"] is None


def test_a_field_is_called_as_the_request_calls_it():
    error = PromptTooLongError(9, 8)

    assert describe_error(error, {PROMPT_PARAM: "messages"}).error["param"] == "messages"
    assert describe_error(error).error["param"] == "prompt"
    choices = describe_error(InvalidRequestError("n", "9 is too many"), {"n": "best_of"})
    assert choices.error["param"] == "best_of"


def test_subclasses_are_told_as_what_they_are():
    class SpecialError(InvalidRequestError):
        pass

    assert describe_error(SpecialError("n", "x")).status == http.HTTPStatus.BAD_REQUEST


def test_a_caller_whose_constraints_leave_nothing_is_at_fault_and_nan_is_not():
    assert describe_error(NoTokenLeftError()).status == http.HTTPStatus.BAD_REQUEST
    assert describe_error(NonFiniteLogitsError()).is_fault_of_ours


def test_what_never_belongs_to_a_request_is_a_fault_of_ours():
    assert describe_error(ConfigError("model", "x")).is_fault_of_ours


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidAdapterIdError("../x"), 400, "invalid_value"),
        (AdapterNotFoundError("x"), 404, "adapter_not_found"),
        (AdapterIncompatibleError("x", "rank 99"), 400, "adapter_incompatible"),
    ],
)
def test_a_caller_who_names_the_wrong_adapter_is_told_the_field(error, status, code):
    problem = describe_error(error)

    assert problem.status == status
    assert problem.error["code"] == code
    assert problem.error["param"] == "peft"
    assert problem.headers == ()


@pytest.mark.parametrize(
    ("error", "code", "seconds"),
    [
        (AdapterLoadFailedError("x", "disk", 4.2), "adapter_load_failed", "5"),
        (AdapterSlotTimeoutError("x", 30.0), "adapter_slots_busy", "1"),
    ],
)
def test_an_adapter_that_may_work_later_is_a_503_that_tells_when(error, code, seconds):
    problem = describe_error(error)

    assert problem.status == http.HTTPStatus.SERVICE_UNAVAILABLE
    assert problem.error["code"] == code
    assert ("retry-after", seconds) in problem.headers


def test_an_id_that_is_no_id_is_shown_short_and_in_plain_characters():
    message = describe_error(InvalidAdapterIdError("a\0\n\ud800" + "x" * 5000)).error["message"]

    assert len(message) < 300
    assert message.isascii()
    assert message.isprintable()
