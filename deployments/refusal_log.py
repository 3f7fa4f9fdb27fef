"""Keeps Serve's log small, and free of what users wrote.

Serve logs whatever a deployment raises as an error with its traceback. Under overload, or with
one careless client, that is thousands of tracebacks of things that went as they should. And the
texts of errors may repeat what a request said: the name of a model, words of a template.

What still may hold words of a user: the message of an exception that nobody foresaw (a KeyError
names its key), which is logged because the fault could not be found without it; the request id
that Serve writes to every line, where the caller chose it by a header.
"""

from __future__ import annotations

import logging
import traceback

from ray.exceptions import RayTaskError

from deployments.http_errors import HttpError, describe_error
from models.errors import CapacityError, ConfigError, ModelServiceError, RequestError
from sampling.errors import InvalidSamplingParamsError, SamplingError

_REFUSALS = (RequestError, CapacityError, InvalidSamplingParamsError)
# The text of Ray's error is a whole traceback of another process, with every message in it; that
# process has logged its own.
_UNTOLD = (ModelServiceError, SamplingError, HttpError, RayTaskError)
_LOGGER_NAME = "ray.serve"
# More errors that led to each other help nobody, and they might do so in a circle.
_MAX_LINKS = 16


def quiet_refusals() -> None:
    """From now on, log errors of this process without the words of requests. Idempotent.

    A refusal becomes one informative line: its class, its code and the field at fault. A fault
    keeps its traceback, in which errors of ours show their class alone.
    """
    logger = logging.getLogger(_LOGGER_NAME)
    if not any(isinstance(filter_, _ErrorFilter) for filter_ in logger.filters):
        logger.addFilter(_ErrorFilter())


class _ErrorFilter(logging.Filter):
    """Rewrites the records that carry an error; leaves others alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if isinstance(error, _REFUSALS):
            told = describe_error(error).error
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg = "refused: %s, code %s, param %s"
            record.args = (type(error).__name__, told["code"], told["param"])
        else:
            record.msg, record.args = "%s\n%s", (record.getMessage(), _format_fault(error))
        # No handler is left an error to format in its own way.
        record.exc_info = record.exc_text = None
        return True


def _format_fault(error: BaseException) -> str:
    """Return the traceback of an error and of what led to it, oldest first, as Python does."""
    blocks: list[str] = []
    link: BaseException | None = error
    while link is not None and len(blocks) < _MAX_LINKS:
        blocks.append("".join([*traceback.format_tb(link.__traceback__), _name(link)]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nwhich led to:\n\n".join(reversed(blocks))


def _name(error: BaseException) -> str:
    """Return the last lines of a traceback: an error's class, and what may be told beside it."""
    # A ConfigError is for the operator, in the operator's own words, and never about a request.
    if isinstance(error, _UNTOLD) and type(error) is not ConfigError:
        return f"{type(error).__name__}\n"
    lines = traceback.format_exception_only(error)
    if isinstance(error, BaseExceptionGroup):
        lines += [f"\nof which one is:\n\n{_format_fault(part)}" for part in error.exceptions]
    return "".join(lines)
