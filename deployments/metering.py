"""Charges one generation to its caller's key: reserves before it, counts along, settles after it.

The rule: before the first call a request reserves its answer's longest form (choices times
``max_tokens``) and a guess of its prompt's length; once the prompt is tokenised that guess becomes
the number; at the end what was not used is given back. All of it counts for the minute in which the
request began. A request that no engine admitted has never been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_keys import ApiKey
from deployments.budget_client import BudgetClient
from deployments.budget_shares import Seat
from deployments.calls import GenerationCall
from deployments.http_io import make_error_response
from deployments.records import AdmissionRecord, Message
from deployments.translate import Job

# Of common tokenizers and English text.
_CHARACTERS_PER_TOKEN = 4


class Meter:
    """What one request takes of its key's budgets.

    Lifetime: ``begin`` once; if that raises nothing, ``end`` in any case.

    Owner: the request's task.
    """

    def __init__(
        self, budgets: BudgetClient, key: ApiKey, job: Job, default_max_tokens: Mapping[str, int]
    ) -> None:
        """Take nothing yet.

        Args:
            budgets: of this ingress.
            key: of the caller, with limits.
            job: of the request.
            default_max_tokens: model id -> new tokens of a request that names no limit.
        """
        self._budgets = budgets
        self._key = key
        self._job = job
        self._max_answer_tokens = sum(
            count_answer_tokens(call, default_max_tokens[job.model_id]) for call in job.calls
        )
        self._num_prompt_tokens = sum(guess_prompt_tokens(call) for call in job.calls)
        # prompt index -> tokens of its choices
        self._num_answer_tokens = dict.fromkeys(range(len(job.calls)), 0)
        self._is_admitted = False
        self._seat: Seat | None = None

    async def begin(self) -> None:
        """Take what the request may use.

        Raises:
            BudgetSpentError, RequestOverBudgetError, BudgetsUnavailableError: there is too little.
        """
        self._seat = await self._budgets.take(
            self._key, self._num_prompt_tokens + self._max_answer_tokens
        )

    def end(self) -> None:
        """Give back what was not used. Idempotent."""
        if self._seat is None:
            return
        self._charge(self._num_prompt_tokens + sum(self._num_answer_tokens.values()))
        self._budgets.end(self._seat, is_counted=self._is_admitted)
        self._seat = None

    def note_admissions(self, admissions: Sequence[AdmissionRecord]) -> None:
        """Take the prompts' real length."""
        self._is_admitted = True
        self._num_prompt_tokens = sum(admission["num_prompt_tokens"] for admission in admissions)
        self._charge(self._num_prompt_tokens + self._max_answer_tokens)

    def note_message(self, prompt_index: int, message: Message) -> None:
        """Count the tokens of the answer to a prompt."""
        for record in message:
            if record["kind"] == "delta":
                self._num_answer_tokens[prompt_index] += len(record["token_ids"])
            elif record["kind"] == "end":
                self._num_answer_tokens[prompt_index] = record["usage"]["num_completion_tokens"]

    def _charge(self, num_tokens: int) -> None:
        if self._seat is not None:
            self._budgets.charge_tokens(self._seat, num_tokens)


class MeteredExchange:
    """An answer that begins once its meter has, as an ASGI application of its own."""

    def __init__(self, meter: Meter, exchange: ASGIApp, request_id: str) -> None:
        """Do nothing yet.

        Args:
            meter: of the request.
            exchange: answers it.
            request_id: appears in errors and in the log.
        """
        self._meter = meter
        self._exchange = exchange
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse before any header."""
        try:
            await self._meter.begin()
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            await make_error_response(error, self._request_id)(scope, receive, send)
            return
        try:
            await self._exchange(scope, receive, send)
        finally:
            self._meter.end()


def count_answer_tokens(call: GenerationCall, default_max_tokens: int) -> int:
    """Return the most new tokens that a call may draw.

    Args:
        call: one prompt.
        default_max_tokens: of each choice, where the request names no limit.
    """
    max_tokens = call["sampling"].get("max_tokens", 0)
    if not call["is_max_tokens_explicit"]:
        # Beside "min_tokens" one stands there that is not the request's.
        max_tokens = max(max_tokens, default_max_tokens)
    return int(max_tokens * call["num_choices"])


def guess_prompt_tokens(call: GenerationCall) -> int:
    """Return about how many tokens a prompt has; exact for one of token ids."""
    prompt = call["prompt"]
    if prompt["kind"] == "tokens":
        return len(prompt["token_ids"])
    if prompt["kind"] == "text":
        return 1 + len(prompt["text"]) // _CHARACTERS_PER_TOKEN
    return 1 + len(orjson.dumps(prompt["messages"])) // _CHARACTERS_PER_TOKEN
