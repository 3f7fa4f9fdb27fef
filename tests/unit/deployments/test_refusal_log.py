"""Refusals are one line of the log, faults keep their traceback, nobody's words are in either."""

import contextlib
import logging

import pytest
from ray.exceptions import RayTaskError

from deployments.refusal_log import quiet_refusals
from models.errors import (
    AdapterNotFoundError,
    ChatTemplateError,
    ConfigError,
    ContextLengthExceededError,
    EngineDeadError,
    InvalidRequestError,
    ModelServiceError,
    QueueFullError,
    SequenceFailedError,
)
from sampling.errors import InvalidSamplingParamsError, SamplingError
from tests.unit.deployments.fakes import (
    chat_body,
    completion_body,
    fail_with,
    make_ingress,
    open_client,
    refuse_with,
)

LOGGER = logging.getLogger("ray.serve")
CANARY = "canary7391"


@pytest.fixture
def records():
    """What a handler gets of Serve's logger and of every other one, down to the last detail."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record)

    root, handler = logging.getLogger(), Handler()
    filters, is_propagating = list(LOGGER.filters), LOGGER.propagate
    levels = {logger: logger.level for logger in (LOGGER, root)}
    LOGGER.propagate = False
    for logger in levels:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    quiet_refusals()
    quiet_refusals()
    yield found
    for logger, level in levels.items():
        logger.removeHandler(handler)
        logger.setLevel(level)
    LOGGER.filters[:], LOGGER.propagate = filters, is_propagating


def log(error):
    LOGGER.error("Request failed.", exc_info=error)


def tell(record):
    """All that any formatter could make of a record."""
    return logging.Formatter().format(record) + repr(vars(record))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ContextLengthExceededError(1, 2, 3),
            "ContextLengthExceededError, code context_length_exceeded, param max_tokens",
        ),
        (QueueFullError(1, 1), "QueueFullError, code queue_full, param None"),
        (
            InvalidSamplingParamsError("top_p", CANARY),
            "InvalidSamplingParamsError, code invalid_value, param top_p",
        ),
        (
            InvalidRequestError("messages.0.role", CANARY),
            "InvalidRequestError, code invalid_value, param messages.0.role",
        ),
    ],
)
def test_a_refusal_is_one_informative_line_without_its_words(records, error, line):
    log(error)

    (record,) = records
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == f"refused: {line}"


def raise_it(error, cause=None):
    if cause is None:
        raise error
    try:
        raise_it(cause)
    except Exception as caught:
        raise error from caught


def raise_fault(error, cause=None):
    try:
        raise_it(error, cause)
    except Exception as caught:  # noqa: BLE001 - logged as it was raised
        log(caught)


@pytest.mark.parametrize("error", [EngineDeadError("boom"), KeyError("x")])
def test_a_fault_keeps_its_traceback(records, error):
    raise_fault(error)

    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("Request failed.\n")
    assert "in raise_fault" in record.getMessage()
    assert type(error).__name__ in record.getMessage()


def test_a_fault_keeps_the_traceback_of_what_led_to_it(records):
    raise_fault(KeyError("outer"), ValueError("inner"))

    text = records[0].getMessage()
    assert text.index("ValueError: inner") < text.index("KeyError: 'outer'")
    assert text.index("in raise_it") < text.index("ValueError") < text.index("in raise_fault")


def test_a_fault_keeps_every_part_of_a_group(records):
    raise_fault(ExceptionGroup("several", [KeyError("one"), SequenceFailedError(CANARY)]))

    text = records[0].getMessage()
    assert "KeyError: 'one'" in text
    assert "SequenceFailedError" in text
    assert CANARY not in text


def test_errors_that_led_to_each_other_in_a_circle_are_told(records):
    error = KeyError("x")
    error.__cause__ = ValueError("y")
    error.__cause__.__cause__ = error

    log(error)

    assert "ValueError: y" in records[0].getMessage()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SequenceFailedError(CANARY), None),
        (EngineDeadError(CANARY), None),
        (KeyError("x"), ChatTemplateError(CANARY)),
        (EngineDeadError("x"), InvalidRequestError("stop", CANARY)),
        (RayTaskError("generate", CANARY, KeyError("x")), None),
        (RayTaskError("generate", CANARY, KeyError("x")).as_instanceof_cause(), None),
    ],
)
def test_a_traceback_holds_no_text_of_our_own_errors(records, error, cause):
    raise_fault(error, cause)

    assert "in raise_fault" in records[0].getMessage()
    assert CANARY not in tell(records[0])


def test_the_operator_reads_what_is_wrong_with_the_configuration(records):
    raise_fault(ConfigError("dtype", "'int3' is not one of them"))

    assert "dtype: 'int3' is not one of them" in records[0].getMessage()


def test_the_message_of_an_error_that_nobody_foresaw_is_told(records):
    raise_fault(KeyError("why"))

    assert "KeyError: 'why'" in records[0].getMessage()


def test_other_lines_pass_as_they_are(records):
    LOGGER.info("progress: %s", "half")

    (record,) = records
    assert record.getMessage() == "progress: half"


WORDS = {
    "user": CANARY,
    "metadata": {CANARY: CANARY},
    "stop": [CANARY],
    "cache_salt": CANARY,
    CANARY: CANARY,
}
CHAT_WORDS = chat_body(messages=[{"role": "user", "content": CANARY, "name": CANARY}], **WORDS)
COMPLETION_WORDS = completion_body(prompt=[CANARY, CANARY], **WORDS)
# what is added to a request that is full of words -> the status of the answer
ENDINGS = {
    "answered": ({}, None, 200),
    "bad value": ({"logit_bias": {CANARY: 1}}, None, 400),
    "bad kind of part": ({"response_format": {"type": CANARY}}, None, 400),
    "too many": ({"stop": [CANARY] * 17}, None, 400),
    "bad message": ({"messages": [{"role": CANARY, "content": CANARY}]}, None, 400),
    "unknown model": ({"model": CANARY}, None, 404),
    "adapter that is no id": ({"peft": f"{CANARY}/.."}, None, 400),
    "two adapters": ({"peft": CANARY, "adapter_id": "other"}, None, 400),
    "unknown adapter": ({"peft": CANARY}, refuse_with(AdapterNotFoundError(CANARY)), 404),
    "refused": ({}, refuse_with(ChatTemplateError(CANARY)), 400),
    "failed": ({}, refuse_with(SequenceFailedError(CANARY)), 500),
    "fault": ({}, refuse_with(KeyError("unforeseen")), 500),
    "refused in the stream": ({}, fail_with(InvalidRequestError("stop", CANARY)), 400),
    "failed in the stream": ({}, fail_with(SequenceFailedError(CANARY)), 500),
    "fault in the stream": ({}, fail_with(KeyError("unforeseen")), 500),
}
PATHS = {"/v1/chat/completions": CHAT_WORDS, "/v1/completions": COMPLETION_WORDS}


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "script", "status"), ENDINGS.values(), ids=ENDINGS)
async def test_no_word_of_a_request_over_http_is_logged(
    records, fields, script, status, path, is_stream
):
    if "messages" in fields and path != "/v1/chat/completions":
        status = 200
    ingress, _ = make_ingress(script) if script else make_ingress()
    async with open_client(ingress) as client:
        response = await client.post(path, json={**PATHS[path], **fields, "stream": is_stream})

    is_told_as_event = is_stream and '"error"' in response.text and response.status_code == 200
    assert response.status_code == status or is_told_as_event
    # also shows that the log is heard
    assert any("failed" in record.getMessage() for record in records) == (status == 500)
    assert not any(CANARY in tell(record) for record in of_the_service(records))


@pytest.mark.anyio
@pytest.mark.parametrize(("fields", "script", "status"), ENDINGS.values(), ids=ENDINGS)
async def test_no_word_of_a_call_over_a_handle_is_logged(records, fields, script, status):
    ingress, _ = make_ingress(script) if script else make_ingress()

    async def stream():
        async with contextlib.aclosing(ingress.stream_chat({**CHAT_WORDS, **fields})) as events:
            return [event async for event in events]

    for answer in (ingress.chat({**CHAT_WORDS, **fields}), stream()):
        try:
            await answer
        except (ModelServiceError, SamplingError, KeyError):
            # as Serve does
            LOGGER.exception("Request failed.")

    assert [record.name for record in records].count(LOGGER.name) == (0 if status == 200 else 2)
    assert not any(CANARY in tell(record) for record in of_the_service(records))


def of_the_service(records):
    """The records without those of the client that the test itself uses."""
    return [record for record in records if not record.name.startswith(("httpx", "httpcore"))]
