"""Times what the HTTP contract costs on one core: reading, refusing and framing. Runs no model."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import httpx
import orjson

from deployments import sse
from deployments.answer_form import AnswerForm, LogprobScope
from deployments.answers import AnswerEvents
from deployments.ingress import Ingress
from deployments.logprob_objects import PromptResult
from deployments.records import DeltaRecord, LogprobRecord
from deployments.responses import ReplyHead, make_reply
from deployments.service import GenerationService, ServiceLimits
from tests.benchmarks.table import Row, describe_machine, format_table

CHOICE_COUNTS = (1, 8, 32)
_MODEL_ID = "benchmark"
_LIMITS = ServiceLimits(
    probed_model_ids=(_MODEL_ID,),
    adapter_model_ids=(),
    max_body_bytes=2 << 20,
    header_wait_s=5.0,
    keepalive_s=5.0,
)
_MESSAGE = {"role": "user", "content": "What is the capital of France? " * 20}
_NUM_CALLS = 200
_NUM_EVENTS = 500
_NUM_REFUSALS = 20


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": _MODEL_ID, "messages": [_MESSAGE], "temperature": 0.7, **fields}


REQUESTS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "one message": _body(),
        "20 messages, most fields": _body(
            messages=[_MESSAGE] * 20,
            max_tokens=128,
            top_p=0.9,
            top_k=40,
            stop=["a", "b"],
            seed=7,
            n=2,
            logprobs=True,
            top_logprobs=5,
            logit_bias={str(index): 1 for index in range(20)},
            metadata={f"key{index}": "value" for index in range(8)},
            user="someone",
            stream=True,
            stream_options={"include_usage": True},
            peft="an/adapter",
        ),
        "1,000 messages": _body(messages=[_MESSAGE] * 1000),
    }
)
HOSTILE: Mapping[str, bytes] = MappingProxyType(
    {
        "broken JSON": b'{"model": ',
        "a body of 3 MB": b'{"model": "' + b"x" * (3 << 20) + b'"}',
        "100,000 messages": orjson.dumps(_body(messages=[{}] * 100_000)),
        "100,000 biases": orjson.dumps(
            _body(logit_bias={str(index): 1 for index in range(100_000)})
        ),
        "1,000 levels": b'{"x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        "n of 5,000,000": orjson.dumps(_body(n=5_000_000)),
        "100,000 unknown fields": orjson.dumps(
            _body(temperature=9, **{f"f{index}": 1 for index in range(100_000)})
        ),
    }
)


class _NoHandle:
    """Takes the place of a model's handle; nothing is sent to it."""

    def options(self, **options: Any) -> Any:
        return self

    def broadcast(self, method_name: str, *arguments: Any) -> Any:
        raise NotImplementedError


def run_contract_bench(say: Callable[[str], None]) -> str:
    """Measure all; return the table with what its figures are on top."""
    rows = []
    say("reading requests")
    rows += [
        Row(name=f"parse and validate: {name}", unit="us", values={1: _time_reading_us(body)})
        for name, body in REQUESTS.items()
    ]
    say("framing")
    for name, num_top in (("text", None), ("text and logprobs 5", 5)):
        values = {count: _time_framing_us(count, num_top) for count in CHOICE_COUNTS}
        rows.append(
            Row(name=f"frame a chunk of a choice: {name}", unit="us", values=values, digits=1)
        )
    say("refusals")
    rows += [
        Row(name=f"refuse: {name}", unit="ms", values={1: _time_refusal_ms(data)}, digits=2)
        for name, data in HOSTILE.items()
    ]
    table = format_table(rows, CHOICE_COUNTS, counted="choice")
    explanation = (
        "One core, medians, no model. Parse and validate: from the bytes of a chat request to the "
        "calls of its replicas. Frame: from a message of a replica to the bytes of an event, a "
        "message with one piece of text for each choice. Refuse: from a request to the ASGI "
        "application to its 4xx."
    )
    return "\n\n".join([describe_machine(), explanation, table])


def make_contract_page(report: str) -> str:
    """Return the page of the documentation that keeps a report."""
    return (
        "# Cost of the HTTP contract\n\nPrinted by `make bench-contract`; `make bench-contract "
        f"SAVE=1` writes this page.\n\n{report}\n"
    )


def _median_us(call: Callable[[], object], num_calls: int) -> float:
    call()
    seconds = []
    for _ in range(num_calls):
        began_at_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_at_s)
    return 1e6 * statistics.median(seconds)


def _time_reading_us(body: dict[str, Any]) -> float:
    data = orjson.dumps(body)
    service = GenerationService(_LIMITS, {_MODEL_ID: _NoHandle()}, lambda: 1, lambda: 1)

    def read() -> None:
        # Nothing in it waits, so one step of the coroutine is all of it.
        making = service.make_job(orjson.loads(data), is_chat=True)
        try:
            making.send(None)
        except StopIteration:
            return
        raise AssertionError("a job was not made at once")

    return _median_us(read, _NUM_CALLS)


def _time_framing_us(num_choices: int, num_top: int | None) -> float:
    scope = LogprobScope.NONE if num_top is None else LogprobScope.OUTPUT
    form = AnswerForm(
        is_chat=True, num_choices=num_choices, logprobs=scope, num_top_logprobs=num_top or 0
    )
    head = ReplyHead(id="chatcmpl-x", created=1, model=_MODEL_ID, system_fingerprint="fp_x")
    events = AnswerEvents[bytes](
        sse.EventEncoder(make_reply(head, form)), form, [PromptResult(num_tokens=3, text="")]
    )
    events.open()
    message = [_delta(choice, num_top) for choice in range(num_choices)]
    return _median_us(lambda: b"".join(events.add(0, message)), _NUM_EVENTS) / num_choices


def _delta(choice: int, num_top: int | None) -> DeltaRecord:
    logprobs: list[LogprobRecord] = []
    if num_top is not None:
        told = {"token_id": 7, "token": " word", "bytes": list(b" word"), "logprob": -0.5}
        logprobs = [{**told, "top": [told] * num_top}]  # type: ignore[list-item, typeddict-item]
    return DeltaRecord(
        kind="delta",
        choice=choice,
        token_ids=[7],
        text=" word",
        logprobs=logprobs,
        finish_reason=None,
        stop_reason=None,
    )


def _time_refusal_ms(data: bytes) -> float:
    async def measure() -> float:
        ingress = Ingress(_LIMITS, {_MODEL_ID: _NoHandle()})
        transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://medley") as client:
            return await _median_ms(lambda: _refused(client, data))

    return asyncio.run(measure())


async def _refused(client: httpx.AsyncClient, data: bytes) -> None:
    response = await client.post(
        "/v1/chat/completions", content=data, headers={"content-type": "application/json"}
    )
    assert response.is_client_error, response.text[:200]
    assert json.loads(response.content)["error"]["message"]


async def _median_ms(call: Callable[[], Awaitable[None]]) -> float:
    await call()
    seconds = []
    for _ in range(_NUM_REFUSALS):
        began_at_s = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began_at_s)
    return 1000 * statistics.median(seconds)
