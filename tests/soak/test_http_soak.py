"""Hundreds of mixed requests through HTTP, Ray Serve and the real model."""

import asyncio
import dataclasses
import itertools
import os
import sys
import time

import httpx
import pytest

from deployments.app import make_deployment_name
from deployments.ingress import Ingress
from tests.benchmarks.service_process import replica_rss_bytes
from tests.conftest import CACHE_FOLDER
from tests.integration.conftest import BUNDLED_ID, run_service
from tests.soak.engine_run import BUNDLED_BOUNDS, SMALL_KERNEL_CACHES
from tests.soak.mixed_load import mixed_requests

pytestmark = pytest.mark.soak

NUM_SPELLS = 6
NUM_REQUESTS_PER_SPELL = 100
NUM_CLIENTS = 16
# As in the engine's own soak; the ingress holds no tensors.
NUM_WARM_UP_SPELLS = 2
MOST_GROWTH_BYTES = {Ingress.__name__: 10_000_000, make_deployment_name(BUNDLED_ID): 20_000_000}
LIMIT_S = 300
IDLE_LIMIT_S = 10


class Clients:
    """Puts mixed requests, streamed and whole, and counts what came of them."""

    def __init__(self, url):
        self.num_left = 0
        self.num_complete = 0
        self._url = url
        self._requests = mixed_requests(BUNDLED_BOUNDS)

    async def work(self):
        """Put one spell of requests."""
        waiting = itertools.islice(self._requests, NUM_REQUESTS_PER_SPELL)
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S) as connections:

            async def client():
                for request in waiting:
                    await self._ask(connections, request)

            await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _ask(self, connections, request):
        body = {
            "model": BUNDLED_ID,
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
            events = [line async for line in self._take(response, request.num_parts_taken)]
        if events[-1] == "data: [DONE]":
            assert f'"completion_tokens":{expected},' in events[-2], events[-2]
            self.num_complete += 1
        else:
            assert "error" not in events[-1], events[-1]
            self.num_left += 1

    async def _take(self, response, num_parts):
        num_taken = 0
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield line
                num_taken += 1
            if num_taken == num_parts:
                return


async def wait_until_idle(service):
    """Wait until the engine runs nothing; return its state."""
    end_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        stats = await asyncio.to_thread(service.stats, BUNDLED_ID)
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        assert time.monotonic() < end_s, stats
        await asyncio.sleep(0.1)


@dataclasses.dataclass
class Soaked:
    """What was left.

    Attributes:
        clients: those who asked.
        states: of the engine, after each spell.
        rss_bytes: resident memory by deployment, after each spell.
        num_open: requests that the ingress still had open at the end.
    """

    clients: Clients
    states: list
    rss_bytes: list
    num_open: int


@pytest.fixture(scope="module")
def soaked():
    arguments = {
        "cache_folder": str(CACHE_FOLDER),
        "shutdown_grace_s": 2.0,
        # Too little for all clients at once, so that the engine has to preempt.
        "kv_budget_bytes": 48 << 20,
    }
    rss_bytes = []
    states = []

    async def run(service, clients):
        for _ in range(NUM_SPELLS):
            await clients.work()
            states.append(await wait_until_idle(service))
            rss_bytes.append(replica_rss_bytes(os.getpid()))
            sys.stderr.write(f"{rss_bytes[-1]}\n")

    with pytest.MonkeyPatch.context() as environment:
        for name, value in SMALL_KERNEL_CACHES.items():
            environment.setenv(name, value)
        with run_service(arguments) as service:
            clients = Clients(service.url)
            asyncio.run(run(service, clients))
            num_open = service.handle.begin_shutdown.remote(0.0).result(timeout_s=LIMIT_S)
    return Soaked(clients, states, rss_bytes, num_open)


def test_every_request_was_answered_or_left(soaked):
    clients = soaked.clients

    assert clients.num_complete + clients.num_left == NUM_SPELLS * NUM_REQUESTS_PER_SPELL
    assert clients.num_left > 0


def test_resident_memory_of_both_replicas_is_flat_after_the_warm_up(soaked):
    begin, end = soaked.rss_bytes[NUM_WARM_UP_SPELLS - 1], soaked.rss_bytes[-1]

    for name, most_bytes in MOST_GROWTH_BYTES.items():
        assert end[name] - begin[name] < most_bytes, soaked.rss_bytes


def test_no_block_is_held_and_no_request_is_open_at_rest(soaked):
    for state in soaked.states:
        assert state["num_free_blocks"] == state["num_blocks"]
    assert soaked.num_open == 0
