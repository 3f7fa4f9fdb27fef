"""The reduced form of the soak: resident memory, blocks and streams after hundreds of requests."""

import pytest

from tests.soak.engine_run import SoakOrder, run_engine_soak

pytestmark = pytest.mark.integration

# From the 100th to the 500th request the process grows by about 1 MB: pages that the allocator had
# not touched yet. The bound is 10 kB a request. It is for tensors, texts and the like; what Python
# keeps is counted exactly, and one object a request would be 400.
MOST_GROWTH_BYTES = 4_000_000
MOST_NEW_OBJECTS = 200
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
