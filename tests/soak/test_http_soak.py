"""Hundreds of mixed requests through HTTP, Ray Serve and the real model."""

import dataclasses
import os
import sys

import pytest

from deployments.app import make_deployment_name
from deployments.ingress import Ingress
from tests.benchmarks.service_process import replica_rss_bytes
from tests.conftest import CACHE_FOLDER
from tests.integration.conftest import BUNDLED_ID, run_service
from tests.soak.engine_run import BUNDLED_BOUNDS, SMALL_KERNEL_CACHES
from tests.soak.http_clients import HttpClients

pytestmark = pytest.mark.soak

NUM_SPELLS = 6
NUM_REQUESTS_PER_SPELL = 100
# As in the engine's own soak; the ingress holds no tensors.
NUM_WARM_UP_SPELLS = 2
MOST_GROWTH_BYTES = {Ingress.__name__: 10_000_000, make_deployment_name(BUNDLED_ID): 20_000_000}
LIMIT_S = 60


@dataclasses.dataclass
class Soaked:
    """What was left.

    Attributes:
        clients: those who asked.
        states: of the engine, after each spell.
        rss_bytes: resident memory by deployment, after each spell.
        num_open: requests that the ingress still had open at the end.
    """

    clients: HttpClients
    states: list
    rss_bytes: list
    num_open: int


@pytest.fixture(scope="module")
def soaked():
    """What was left after each spell, and at the end."""
    arguments = {
        "cache_folder": str(CACHE_FOLDER),
        "shutdown_grace_s": 2.0,
        # Too little for all clients at once, so that the engine has to preempt.
        "kv_budget_bytes": 48 << 20,
    }
    states, rss_bytes = [], []
    with pytest.MonkeyPatch.context() as environment:
        for name, value in SMALL_KERNEL_CACHES.items():
            environment.setenv(name, value)
        with run_service(arguments) as service:
            clients = HttpClients(service, BUNDLED_ID, BUNDLED_BOUNDS, num_clients=16)
            for _ in range(NUM_SPELLS):
                states.append(clients.work(NUM_REQUESTS_PER_SPELL))
                rss_bytes.append(replica_rss_bytes(os.getpid()))
                sys.stderr.write(f"{rss_bytes[-1]}\n")
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
