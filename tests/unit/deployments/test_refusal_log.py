"""Refusals are one line of the log, faults keep their traceback."""

import logging

import pytest

from deployments.refusal_log import quiet_refusals
from models.errors import ContextLengthExceededError, EngineDeadError, QueueFullError
from sampling.errors import InvalidSamplingParamsError

LOGGER = logging.getLogger("ray.serve")


@pytest.fixture
def records():
    """What a handler gets that Serve would have on its logger."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record)

    filters, level, handler = list(LOGGER.filters), LOGGER.level, Handler()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    quiet_refusals()
    quiet_refusals()
    yield found
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.filters[:] = filters


def log(error):
    LOGGER.error("Request failed.", exc_info=error)


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthExceededError(1, 2, 3),
        QueueFullError(1, 1),
        InvalidSamplingParamsError("top_p", "2 is too much"),
    ],
)
def test_a_refusal_is_one_informative_line(records, error):
    log(error)

    (record,) = records
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == f"refused: {type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [EngineDeadError("boom"), KeyError("x")])
def test_a_fault_keeps_its_traceback(records, error):
    log(error)

    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_other_lines_pass_as_they_are(records):
    LOGGER.info("progress: %s", "half")

    (record,) = records
    assert record.getMessage() == "progress: half"
