"""Keeps refused requests from looking like faults in Serve's log.

Serve logs whatever a deployment raises as an error with its traceback. Under overload, or with
one careless client, that is thousands of tracebacks of things that went as they should.
"""

from __future__ import annotations

import logging

from models.errors import CapacityError, RequestError
from sampling.errors import InvalidSamplingParamsError

_REFUSALS = (RequestError, CapacityError, InvalidSamplingParamsError)
_LOGGER_NAME = "ray.serve"


def quiet_refusals() -> None:
    """From now on, tell refusals of this process in one line each. Idempotent."""
    logger = logging.getLogger(_LOGGER_NAME)
    if not any(isinstance(filter_, _RefusalFilter) for filter_ in logger.filters):
        logger.addFilter(_RefusalFilter())


class _RefusalFilter(logging.Filter):
    """Turns the record of a refusal into an informative line; leaves others alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _REFUSALS):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = "refused: %s", (f"{type(error).__name__}: {error}",)
            record.exc_info = None
        return True
