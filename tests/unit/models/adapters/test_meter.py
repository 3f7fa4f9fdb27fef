"""Tests of what each adapter was used for: sums, and that there is an end of names."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.adapters.catalogue import AdapterCatalogue, CatalogueConfig
from models.adapters.ids import is_adapter_id
from models.adapters.meter import OTHER_ADAPTERS, AdapterMeter, AdapterTotals
from models.adapters.source import AdapterFiles
from models.errors import AdapterLoadFailedError, AdapterNotFoundError
from tests.fakes import FakeClock

pytestmark = pytest.mark.anyio

COUNTS = {
    "request": ("num_requests", lambda meter, name: meter.count_request(name)),
    "tokens": ("num_generated_tokens", lambda meter, name: meter.count_tokens(name, 1)),
    "hit": ("num_hits", lambda meter, name: meter.count_hit(name)),
    "load": ("num_loads", lambda meter, name: meter.count_load(name, 0.5)),
    "failed": ("num_failed_loads", lambda meter, name: meter.count_failed_load(name)),
    "eviction": ("num_evictions", lambda meter, name: meter.count_eviction(name)),
}
PLACING = {"request", "load"}


def test_ten_thousand_adapters_have_a_hundred_names_and_nothing_is_lost():
    meter = AdapterMeter(100)
    for index in range(10_000):
        meter.count_request(f"a{index}")
        meter.count_tokens(f"a{index}", 3)
        meter.count_load(f"a{index}", 0.25)

    totals = meter.totals()

    assert len(totals) == 101
    assert totals["a99"] == AdapterTotals(
        num_requests=1, num_generated_tokens=3, num_loads=1, load_s=0.25
    )
    assert "a100" not in totals
    assert totals[OTHER_ADAPTERS].num_requests == 9_900
    assert sum(each.num_generated_tokens for each in totals.values()) == 30_000


def test_no_adapter_can_have_the_name_of_the_others():
    assert not is_adapter_id(OTHER_ADAPTERS)


def test_what_fails_takes_no_place():
    meter = AdapterMeter(1)
    for index in range(10):
        meter.count_failed_load(f"none{index}")
        meter.count_hit(f"none{index}")

    meter.count_load("real", 1.0)

    assert meter.totals()["real"].num_loads == 1
    assert meter.totals()[OTHER_ADAPTERS].num_failed_loads == 10


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(sorted(COUNTS)), st.sampled_from("abcdef"))),
)
def test_every_count_is_in_one_sum_and_no_total_falls(max_num_adapters, counts):
    meter = AdapterMeter(max_num_adapters)
    places = []
    expected = {OTHER_ADAPTERS: dict.fromkeys(COUNTS, 0)}
    for kind, name in counts:
        before = meter.totals()
        COUNTS[kind][1](meter, name)
        if kind in PLACING and name not in places and len(places) < max_num_adapters:
            places.append(name)
            expected[name] = dict.fromkeys(COUNTS, 0)
        expected[name if name in places else OTHER_ADAPTERS][kind] += 1
        after = meter.totals()
        for each, totals in before.items():
            for field in dataclasses.fields(totals):
                assert getattr(after[each], field.name) >= getattr(totals, field.name)

    totals = meter.totals()
    assert set(totals) == set(expected)
    for name, kinds in expected.items():
        for kind, number in kinds.items():
            assert getattr(totals[name], COUNTS[kind][0]) == number
        assert totals[name].load_s == 0.5 * kinds["load"]


def test_threads_that_count_at_once_lose_nothing():
    meter = AdapterMeter(2)

    def count():
        for index in range(2000):
            meter.count_request(f"a{index % 5}")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sum(each.num_requests for each in meter.totals().values()) == 8000


@dataclasses.dataclass
class Weights:
    num_bytes: int = 10


class Source:
    """Every id but two is an adapter of ten bytes."""

    def recall(self, adapter_id):
        return None

    def find(self, adapter_id):
        if adapter_id == "none":
            raise AdapterNotFoundError(adapter_id)
        if adapter_id == "unreachable":
            raise AdapterLoadFailedError(adapter_id, "cause", 1.0)
        return AdapterFiles(adapter_id=adapter_id, folder=None, version="v", num_bytes=10)

    def forget(self, adapter_id):
        return None


async def test_a_catalogue_tells_loads_hits_failures_and_evictions():
    clock = FakeClock()

    def load(files):
        clock.advance(2.0)
        if files.adapter_id == "broken":
            raise AdapterLoadFailedError("broken", "cause", 1.0)
        return Weights()

    meter = AdapterMeter(10)
    catalogue = AdapterCatalogue(
        Source(), load, CatalogueConfig(budget_bytes=20, failure_ttl_s=0.0), clock, meter
    )
    for name in ("a", "a", "b", "a", "c", "broken", "none", "unreachable", "b"):
        try:
            (await catalogue.resolve(name)).release()
        except (AdapterLoadFailedError, AdapterNotFoundError):
            continue
    catalogue.close()

    totals = meter.totals()
    assert set(totals) == {"a", "b", "c", OTHER_ADAPTERS}
    assert (totals["a"].num_loads, totals["a"].num_hits, totals["a"].load_s) == (1, 2, 2.0)
    assert totals["b"].num_loads == 2
    assert totals[OTHER_ADAPTERS].num_failed_loads == 2
    assert totals[OTHER_ADAPTERS].num_hits == 0
    evictions = sum(each.num_evictions for each in totals.values())
    assert evictions == catalogue.stats.num_evictions >= 2
