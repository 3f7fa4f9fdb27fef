"""Hundreds of mixed requests on the real model, in this engine alone."""

import pytest

from tests.soak.engine_run import SoakOrder, run_engine_soak

pytestmark = pytest.mark.soak

# The first two hundred requests bring most shapes, and with them the libraries' kernels and the
# allocator's largest heap; the bound is 33 kB for each request behind them.
NUM_WARM_UP_SPELLS = 2
MOST_GROWTH_BYTES = 20_000_000
LIMIT_S = 3600


@pytest.fixture(scope="module")
def rests(bundled_model_path):
    order = SoakOrder(
        model_path=str(bundled_model_path),
        num_spells=6,
        num_requests_per_spell=100,
        num_clients=16,
    )
    return run_engine_soak(order, timeout_s=LIMIT_S)


def test_the_load_has_leavers_prefix_hits_and_preemption(rests):
    assert rests[-1].num_requests == 600
    assert rests[-1].num_left > 0
    assert rests[-1].num_cached_tokens > 0
    assert rests[-1].num_preemptions > 0


def test_resident_memory_is_flat_after_the_warm_up(rests):
    growth_bytes = rests[-1].rss_bytes - rests[NUM_WARM_UP_SPELLS - 1].rss_bytes

    assert growth_bytes < MOST_GROWTH_BYTES, [rest.rss_bytes for rest in rests]


def test_no_block_and_no_stream_is_left_at_rest(rests):
    for rest in rests:
        assert rest.num_held_blocks == 0
        assert rest.num_streams == 0
