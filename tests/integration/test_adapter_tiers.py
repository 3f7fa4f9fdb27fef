"""Many adapters on disk, few places in memory, through the whole engine and real files."""

import asyncio
import contextlib
import gc

import psutil
import pytest

from tests.integration.adapter_fleet import Fleet

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

NUM_ADAPTERS = 60
NUM_USED = 24
MOST_GROWTH_BYTES = 16_000_000


@contextlib.asynccontextmanager
async def started(folder, **places):
    fleet = Fleet(folder, NUM_ADAPTERS, **({"max_num_slots": 4, "num_host_adapters": 12} | places))
    try:
        yield fleet
    finally:
        await fleet.engine.shutdown(drain_timeout_s=0.0)


async def test_fifty_first_requests_for_one_cold_adapter_load_it_once(tmp_path):
    async with started(tmp_path) as fleet:
        answers = await asyncio.gather(*(fleet.ask(0) for _ in range(50)))
        (status,) = fleet.engine.adapters.status()

    assert len(set(answers)) == 1
    assert (status.tier, status.num_in_flight) == ("device", 0)


async def test_random_order_over_few_places_gives_each_its_own_answer_and_memory_is_flat(tmp_path):
    async with started(tmp_path) as fleet:
        alone = {number: await fleet.ask(number) for number in (None, *range(NUM_USED))}
        assert len({tokens for _, tokens in alone.values()}) > NUM_USED // 2  # adapters show
        await fleet.ask_in_random_order(range(NUM_USED), 150, seed=1)
        gc.collect()
        before_bytes = psutil.Process().memory_info().rss

        answers = await fleet.ask_in_random_order([None, *range(NUM_USED)], 150, seed=2)

        gc.collect()
        growth_bytes = psutil.Process().memory_info().rss - before_bytes
        held_bytes = sum(status.num_bytes for status in fleet.engine.adapters.status())
        num_resident = len(fleet.engine.stats().resident_adapters)
        num_listed = len(await fleet.engine.adapters.list_ids())

    assert answers == {number: {alone[number]} for number in answers}
    assert len(answers) > NUM_USED // 2
    assert held_bytes <= fleet.host_budget_bytes
    assert (num_resident, num_listed) == (4, NUM_ADAPTERS)
    assert growth_bytes < MOST_GROWTH_BYTES


async def test_files_that_change_under_traffic_are_a_new_version_and_old_streams_finish(tmp_path):
    async with started(tmp_path) as fleet:
        first = await fleet.ask(0, num_tokens=200)
        running = asyncio.create_task(fleet.ask(0, num_tokens=200))
        neighbours = asyncio.create_task(fleet.ask_in_random_order(range(1, 6), 40))
        await asyncio.sleep(0.1)
        fleet.write(0, seed=999)
        async with asyncio.timeout(60):
            while (second := await fleet.ask(0, num_tokens=200))[0] == first[0]:
                assert second == first  # the old version, whole, until the new one is
        old = await running
        others = await neighbours
        again = {number: await fleet.ask(number) for number in range(1, 6)}

    assert old == first
    assert second[1] != first[1]
    assert all(answers == {again[number]} for number, answers in others.items())


async def test_an_adapter_that_is_unloaded_in_a_loop_serves_on(tmp_path):
    async with started(tmp_path) as fleet:
        expected = await fleet.ask(0)
        stream = asyncio.create_task(fleet.ask(1, num_tokens=120))
        alone = None
        for _ in range(10):
            fleet.engine.adapters.unload("a0")
            assert await fleet.ask(0) == expected
        alone = await fleet.ask(1, num_tokens=120)

        assert await stream == alone
