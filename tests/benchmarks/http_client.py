"""Streaming clients over bare sockets, in a process of their own that costs hardly any CPU.

``run_http_load`` starts it; it reads a Load as JSON and prints a LoadResult as JSON. Nothing is
parsed while the clock runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.closed_loop import Answer, LoadResult, TokenIds, run_closed_loop

_ROOT = Path(__file__).parents[2]
# Behind the service, which must not wait for who measures it: Ray runs its replicas at 15.
_NICENESS = 19
_LOAD_LIMIT_S = 600.0
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of whom.

    Attributes:
        host: address.
        port: TCP port.
        model_id: the model's name.
        num_clients: how many requests are open at the same time.
        num_new_tokens: length of every answer.
        prompts: token ids.
    """

    host: str
    port: int
    model_id: str
    num_clients: int
    num_new_tokens: int
    prompts: Sequence[TokenIds]

    def request_bytes(self, prompt: TokenIds) -> bytes:
        """Return a whole HTTP request."""
        body = json.dumps(
            {
                "model": self.model_id,
                "prompt": list(prompt),
                "max_tokens": self.num_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (self.host.encode(), len(body), body)
        )


def run_http_load(load: Load) -> LoadResult:
    """Run a load in a process of its own.

    Raises:
        RuntimeError: an answer was not complete.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=_ROOT,
        input=json.dumps(dataclasses.asdict(load)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LOAD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("the HTTP clients failed, see above")
    result = json.loads(done.stdout)
    return LoadResult(
        duration_s=result["duration_s"],
        answers=tuple(Answer(**answer) for answer in result["answers"]),
    )


class _Exchange(asyncio.Protocol):
    """One connection: writes a request, keeps what comes, notes when text first does."""

    def __init__(self, request: bytes, closed: asyncio.Future[None]) -> None:
        self._request = request
        self._closed = closed
        self.received: list[bytes] = []
        self.first_event_at_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first_event_at_s is None and b"data: " in data:
            self.first_event_at_s = time.monotonic()
        self.received.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


async def _run(load: Load) -> LoadResult:
    loop = asyncio.get_running_loop()
    requests = {id(prompt): load.request_bytes(prompt) for prompt in load.prompts}
    finished: list[tuple[float, _Exchange]] = []

    async def ask(prompt: TokenIds) -> Answer:
        asked_at_s = time.monotonic()
        closed = loop.create_future()
        request = requests[id(prompt)]
        _, exchange = await loop.create_connection(
            lambda: _Exchange(request, closed), load.host, load.port
        )
        await closed
        finished.append((asked_at_s, exchange))
        return Answer(first_token_s=0.0, num_tokens=0, num_cached_tokens=0)

    result = await run_closed_loop(load.prompts, load.num_clients, ask)
    answers = tuple(_read_answer(asked_at_s, exchange) for asked_at_s, exchange in finished)
    return dataclasses.replace(result, answers=answers)


def _read_answer(asked_at_s: float, exchange: _Exchange) -> Answer:
    answer = b"".join(exchange.received)
    num_tokens = _COMPLETION_TOKENS.search(answer)
    num_cached = _CACHED_TOKENS.search(answer)
    if (
        b"data: [DONE]" not in answer
        or exchange.first_event_at_s is None
        or num_tokens is None
        or num_cached is None
    ):
        raise RuntimeError(f"not a complete answer: {answer[:200]!r} ... {answer[-200:]!r}")
    return Answer(
        first_token_s=exchange.first_event_at_s - asked_at_s,
        num_tokens=int(num_tokens[1]),
        num_cached_tokens=int(num_cached[1]),
    )


def main() -> None:
    """Read a Load from standard input, run it, print its LoadResult."""
    os.nice(_NICENESS)
    load = Load(**json.load(sys.stdin))
    json.dump(dataclasses.asdict(asyncio.run(_run(load))), sys.stdout)


if __name__ == "__main__":
    main()
