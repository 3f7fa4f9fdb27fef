"""A thousand adapters on disk, two hundred of them used in random order."""

import gc

import psutil
import pytest

from tests.integration.adapter_fleet import Fleet

pytestmark = [pytest.mark.soak, pytest.mark.anyio]

NUM_ADAPTERS = 1000
NUM_USED = 200
NUM_REQUESTS_PER_SPELL = 1000
NUM_SPELLS = 4
MOST_GROWTH_BYTES = 20_000_000


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_memory_is_flat_and_each_answer_its_own(tmp_path):
    fleet = Fleet(tmp_path, NUM_ADAPTERS, max_num_slots=32, num_host_adapters=64)
    rests, answers = [], {}
    try:
        for spell in range(NUM_SPELLS):
            found = await fleet.ask_in_random_order(
                range(NUM_USED), NUM_REQUESTS_PER_SPELL, num_clients=32, seed=spell
            )
            for number, seen in found.items():
                answers.setdefault(number, set()).update(seen)
            gc.collect()
            rests.append(psutil.Process().memory_info().rss)
    finally:
        await fleet.engine.shutdown(drain_timeout_s=0.0)

    assert len(answers) == NUM_USED
    assert all(len(seen) == 1 for seen in answers.values())
    assert rests[-1] - rests[0] < MOST_GROWTH_BYTES, rests
