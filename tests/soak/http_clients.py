"""Clients that put mixed requests to a service through HTTP, streamed and whole."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from tests.integration.conftest import Service
from tests.soak.mixed_load import Bounds, MixedRequest, mixed_requests

_REQUEST_LIMIT_S = 300.0
_IDLE_LIMIT_S = 30.0


class HttpClients:
    """Puts requests and counts what came of them.

    Owner: one thread; every spell has an event loop of its own.
    """

    def __init__(self, service: Service, model_id: str, bounds: Bounds, num_clients: int) -> None:
        self.num_left = 0
        self.num_complete = 0
        self._service = service
        self._model_id = model_id
        self._requests = mixed_requests(bounds)
        self._num_clients = num_clients

    def work(self, num_requests: int) -> dict[str, Any]:
        """Put so many requests, wait until the engine rests, return its state."""
        asyncio.run(self._work(itertools.islice(self._requests, num_requests)))
        end_s = time.monotonic() + _IDLE_LIMIT_S
        while True:
            stats = self._service.stats(self._model_id)
            if stats["num_running"] == stats["num_waiting"] == 0:
                return stats
            assert time.monotonic() < end_s, stats
            time.sleep(0.1)

    async def _work(self, waiting: Iterator[MixedRequest]) -> None:
        async with httpx.AsyncClient(
            base_url=self._service.url, timeout=_REQUEST_LIMIT_S
        ) as connections:

            async def client() -> None:
                for request in waiting:
                    await self._ask(connections, request)

            await asyncio.gather(*(client() for _ in range(self._num_clients)))

    async def _ask(self, connections: httpx.AsyncClient, request: MixedRequest) -> None:
        body = {
            "model": self._model_id,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.num_new_tokens,
            "n": request.num_choices,
            "temperature": request.temperature,
            "logprobs": request.num_top_logprobs,
            "ignore_eos": True,
        }
        expected = request.num_new_tokens * request.num_choices
        if request.num_parts_taken is None and self.num_complete % 2:
            answer = (await connections.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == expected, answer
            self.num_complete += 1
            return
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with connections.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            events = [event async for event in _take(response, request.num_parts_taken)]
        if events[-1] == "data: [DONE]":
            assert f'"completion_tokens":{expected},' in events[-2], events[-2]
            self.num_complete += 1
        else:
            assert len(events) == request.num_parts_taken, events[-1]
            self.num_left += 1


async def _take(response: httpx.Response, num_parts: int | None) -> AsyncIterator[str]:
    """Yield events, at most ``num_parts`` of them."""
    num_taken = 0
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line
            num_taken += 1
        if num_taken == num_parts:
            return
