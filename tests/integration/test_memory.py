"""The reduced forms of the soaks: memory, blocks and streams after hundreds of requests."""

import os

import pytest

from deployments.app import make_deployment_name
from deployments.ingress import Ingress
from tests.benchmarks.service_process import replica_rss_bytes
from tests.integration.tiny_service_model import TINY_ID
from tests.soak.engine_run import SoakOrder, run_engine_soak
from tests.soak.http_clients import HttpClients
from tests.soak.mixed_load import Bounds

pytestmark = pytest.mark.integration

# From the 100th to the 500th request the engine's process grows by about 1 MB: pages that the
# allocator had not touched yet. The bound is 10 kB a request. It is for tensors, texts and the
# like; what Python keeps is counted exactly, and one object a request would be 400.
MOST_GROWTH_BYTES = 4_000_000
MOST_NEW_OBJECTS = 200
# Through HTTP, from the 100th to the 400th request, both replicas grow by 1 to 3 MB, most of it
# Ray's; the bound is 27 kB a request.
MOST_REPLICA_GROWTH_BYTES = 8_000_000
LIMIT_S = 300


@pytest.fixture(scope="module")
def rests():
    order = SoakOrder(model_path="", num_spells=5, num_requests_per_spell=100, num_clients=16)
    return run_engine_soak(order, timeout_s=LIMIT_S)


def test_the_load_has_leavers_prefix_hits_and_preemption(rests):
    assert rests[-1].num_requests == 500
    assert rests[-1].num_left > 0
    assert rests[-1].num_cached_tokens > 0
    assert rests[-1].num_preemptions > 0


def test_after_500_requests_resident_memory_is_flat(rests):
    growth_bytes = rests[-1].rss_bytes - rests[0].rss_bytes

    assert growth_bytes < MOST_GROWTH_BYTES, [rest.rss_bytes for rest in rests]


def test_after_500_requests_python_keeps_no_more_objects(rests):
    num_new = rests[-1].num_objects - rests[0].num_objects

    assert num_new < MOST_NEW_OBJECTS, [rest.num_objects for rest in rests]


def test_no_block_and_no_stream_is_left_at_rest(rests):
    for rest in rests:
        assert rest.num_held_blocks == 0
        assert rest.num_streams == 0


def test_the_runner_forgets_sequences_that_ended(rests):
    # Those of the last step are told to leave with the next one.
    assert max(rest.num_rows for rest in rests) <= 16


def test_after_400_requests_through_http_both_replicas_are_as_large_as_before(service):
    bounds = Bounds(vocabulary_size=250, longest_prompt_tokens=64, most_new_tokens=24)
    clients = HttpClients(service, TINY_ID, bounds, num_clients=8)
    clients.work(100)
    before = replica_rss_bytes(os.getpid())

    state = clients.work(300)

    after = replica_rss_bytes(os.getpid())
    for name in (Ingress.__name__, make_deployment_name(TINY_ID)):
        assert after[name] - before[name] < MOST_REPLICA_GROWTH_BYTES, (before, after)
    assert state["num_free_blocks"] == state["num_blocks"]
    assert clients.num_complete + clients.num_left == 400
    assert clients.num_left > 0
