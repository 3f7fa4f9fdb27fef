"""Tests of the host tier: one load, leases, versions, failures, room."""

import asyncio
import collections
import gc
import random
import threading
import time
import weakref

import pytest

from models.adapters.catalogue import AdapterCatalogue, CatalogueConfig
from models.adapters.folder_source import FolderSource
from models.adapters.host_tier import HostState
from models.adapters.source import AdapterFiles, FilesChangedError, VersionDigest, read_contents
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    AdapterSlotTimeoutError,
    DrainingError,
    InvalidAdapterIdError,
)
from models.requests import AdapterRef
from tests.fakes import FakeClock
from tests.unit.models.adapters.files import write_adapter

pytestmark = pytest.mark.anyio

PATIENCE_S = 20


class Weights:
    def __init__(self, files):
        self.ref = AdapterRef(files.adapter_id, files.version)
        self.num_bytes = files.num_bytes


class FakeSource:
    """Versions by id; every call is counted, and a call can be held or made to fail."""

    def __init__(self, tmp_path):
        self.folder = tmp_path
        self.versions = collections.defaultdict(lambda: "1")
        self.missing = set()
        self.num_bytes = collections.defaultdict(lambda: 10)
        self.error = None
        self.finds = collections.Counter()
        self.forgotten = []
        self.remembered = {}
        self.is_remembering = False
        self.gate = threading.Event()
        self.gate.set()

    def find(self, adapter_id):
        self.finds[adapter_id] += 1
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        if adapter_id in self.missing:
            raise AdapterNotFoundError(adapter_id)
        files = AdapterFiles(
            adapter_id=adapter_id,
            folder=self.folder / adapter_id,
            version=self.versions[adapter_id],
            num_bytes=self.num_bytes[adapter_id],
        )
        self.remembered[adapter_id] = files
        return files

    def recall(self, adapter_id):
        return self.remembered.get(adapter_id) if self.is_remembering else None

    def forget(self, adapter_id):
        self.forgotten.append(adapter_id)
        self.remembered.pop(adapter_id, None)

    def list_ids(self):
        return ()


class FakeLoader:
    """Makes weights; loads can be held, and the next ones made to fail in turn."""

    def __init__(self):
        self.loads = collections.Counter()
        self.errors = []
        self.sizes = {}
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self.alive = weakref.WeakSet()
        self.most_at_once = collections.Counter()

    def __call__(self, files):
        ref = AdapterRef(files.adapter_id, files.version)
        self.loads[ref] += 1
        assert self.gate.wait(PATIENCE_S)
        if self.errors:
            error = self.errors.pop(0)
            if error is not None:
                raise error
        weights = Weights(files)
        weights.num_bytes = self.sizes.get(files.adapter_id, files.num_bytes)
        with self.lock:
            self.alive.add(weights)
            copies = sum(each.ref == ref for each in self.alive)
            self.most_at_once[ref] = max(self.most_at_once[ref], copies)
        return weights

    def alive_refs(self):
        # Without a garbage collection: memory has to be free at once.
        with self.lock:
            return sorted((each.ref.id, each.ref.version) for each in self.alive)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(tmp_path):
    return FakeSource(tmp_path)


@pytest.fixture
def loader():
    return FakeLoader()


@pytest.fixture
def make(source, loader, clock):
    made = []

    def make(*, budget_bytes=100, **fields):
        config = CatalogueConfig(budget_bytes=budget_bytes, **fields)
        made.append(AdapterCatalogue(source, loader, config, clock))
        return made[-1]

    yield make
    source.gate.set()
    loader.gate.set()
    for catalogue in made:
        catalogue.close()
        catalogue.check_invariants()


async def hold(catalogue, *adapter_ids):
    return [await catalogue.resolve(adapter_id) for adapter_id in adapter_ids]


async def use(catalogue, *adapter_ids):
    for adapter_id in adapter_ids:
        (await catalogue.resolve(adapter_id)).release()


async def until(is_so):
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - other threads and tasks make it so
            await asyncio.sleep(0.001)


def ready_ids(catalogue):
    return [facts.ref.id for facts in catalogue.facts() if facts.state is HostState.READY]


def in_flight(catalogue):
    return catalogue.stats.num_in_flight


async def test_a_lease_has_the_weights_of_the_version_that_was_found(make):
    lease = await make().resolve("a")

    assert lease.ref == lease.weights.ref == AdapterRef("a", "1")
    lease.release()
    with pytest.raises(RuntimeError, match="released"):
        _ = lease.weights


async def test_a_second_request_loads_nothing(make, loader):
    catalogue = make()
    first, second = await hold(catalogue, "a", "a")

    assert first.weights is second.weights
    assert sum(loader.loads.values()) == 1
    assert (catalogue.stats.num_hits, catalogue.stats.num_misses) == (1, 1)
    assert in_flight(catalogue) == 2


async def test_releasing_twice_releases_once_also_from_other_threads(make):
    catalogue = make()
    first, second = await hold(catalogue, "a", "a")
    threads = [threading.Thread(target=first.release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert in_flight(catalogue) == 1
    second.release()
    assert in_flight(catalogue) == 0


@pytest.mark.parametrize("is_remembering", [False, True])
async def test_fifty_first_requests_find_once_and_load_once(make, source, loader, is_remembering):
    source.is_remembering = is_remembering
    source.gate.clear()
    loader.gate.clear()
    catalogue = make()
    requests = [asyncio.create_task(catalogue.resolve("a")) for _ in range(50)]
    await asyncio.sleep(0.01)
    source.gate.set()
    await until(lambda: in_flight(catalogue) == 50)
    loader.gate.set()

    leases = await asyncio.gather(*requests)

    assert len({id(lease.weights) for lease in leases}) == 1
    assert source.finds["a"] == 1
    assert sum(loader.loads.values()) == 1
    assert catalogue.stats.num_loads == 1
    assert catalogue.stats.used_bytes == 10


async def test_what_the_source_remembers_is_not_found_again(make, source):
    source.is_remembering = True
    await use(make(), "a", "a", "a")

    assert source.finds["a"] == 1


async def test_requests_of_several_event_loops_share_one_load(make, loader):
    loader.gate.clear()
    catalogue = make()
    own = asyncio.create_task(catalogue.resolve("a"))
    other = asyncio.create_task(asyncio.to_thread(asyncio.run, catalogue.resolve("a")))
    await until(lambda: in_flight(catalogue) == 2)
    loader.gate.set()

    assert (await own).weights is (await other).weights
    assert sum(loader.loads.values()) == 1


async def test_the_event_loop_runs_on_while_an_adapter_loads(make, loader):
    loader.gate.clear()
    catalogue = make()
    await_loaded = asyncio.create_task(catalogue.resolve("slow"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not await_loaded.done()

    loader.gate.set()
    await await_loaded


async def test_a_slow_load_does_not_hold_up_another_adapter(make, loader):
    catalogue = make()
    await use(catalogue, "ready")
    loader.gate.clear()
    slow = asyncio.create_task(catalogue.resolve("slow"))
    await until(lambda: catalogue.stats.num_loading == 1)

    async with asyncio.timeout(PATIENCE_S / 2):
        await use(catalogue, "ready")

    loader.gate.set()
    await slow


@pytest.mark.parametrize("adapter_id", ["../x", "/etc/x", "a\0b", "", "a" * 4000])
async def test_an_id_that_breaks_the_grammar_reaches_no_source(make, source, adapter_id):
    catalogue = make()
    for ask in (catalogue.resolve, catalogue.prefetch):
        with pytest.raises(InvalidAdapterIdError):
            await ask(adapter_id)
    with pytest.raises(InvalidAdapterIdError):
        catalogue.pin(adapter_id)

    assert not source.finds


async def test_an_unknown_adapter_is_not_remembered(make, source):
    source.missing.add("a")
    catalogue = make()
    with pytest.raises(AdapterNotFoundError):
        await catalogue.resolve("a")

    source.missing.clear()
    await use(catalogue, "a")


ERRORS = [
    (AdapterIncompatibleError("a", "rank 65 is over 64"), AdapterIncompatibleError, "rank 65"),
    (AdapterLoadFailedError("a", "torn", 2.0), AdapterLoadFailedError, "torn"),
    (OSError(5, "Input/output error", "/secret/path"), AdapterLoadFailedError, "Input/output"),
    (ValueError("/secret/path"), AdapterLoadFailedError, "ValueError"),
    (MemoryError(), AdapterLoadFailedError, "MemoryError"),
]


@pytest.mark.parametrize("step", ["find", "load"])
@pytest.mark.parametrize(("error", "kind", "words"), ERRORS, ids=lambda each: type(each).__name__)
async def test_a_failure_reaches_everyone_with_its_cause_and_leaves_nothing(
    make, source, loader, step, error, kind, words
):
    catalogue = make()
    gate = source.gate if step == "find" else loader.gate
    gate.clear()
    if step == "find":
        source.error = error
    else:
        loader.errors = [error]
    requests = [asyncio.create_task(catalogue.resolve("a")) for _ in range(10)]
    await until(lambda: in_flight(catalogue) == 10 if step == "load" else source.finds["a"])
    await asyncio.sleep(0.01)
    gate.set()

    outcomes = await asyncio.gather(*requests, return_exceptions=True)

    assert {type(outcome) for outcome in outcomes} == {kind}
    assert len({id(outcome) for outcome in outcomes}) == 10
    for outcome in outcomes:
        assert words in str(outcome)
        assert "/secret" not in str(outcome)
    assert catalogue.facts() == ()
    assert catalogue.stats.used_bytes == 0
    if step == "find":
        assert source.finds["a"] == 1
    assert sum(loader.loads.values()) == (step == "load")
    catalogue.check_invariants()


async def test_a_failed_load_is_remembered_for_a_while_and_then_tried_again(make, loader, clock):
    catalogue = make(failure_ttl_s=5.0)
    loader.errors = [OSError(5, "Input/output error")]
    for _ in range(3):
        with pytest.raises(AdapterLoadFailedError) as caught:
            await catalogue.resolve("a")
        assert caught.value.retry_after_s == 5.0
        clock.advance(1.5)
    assert sum(loader.loads.values()) == 1
    assert catalogue.stats.num_remembered_failures == 2

    clock.advance(0.5)

    await use(catalogue, "a")
    assert sum(loader.loads.values()) == 2


async def test_a_failed_load_is_remembered_of_its_version_only(make, source, loader):
    catalogue = make()
    loader.errors = [AdapterIncompatibleError("a", "NaN")]
    with pytest.raises(AdapterIncompatibleError):
        await catalogue.resolve("a")

    source.versions["a"] = "2"

    await use(catalogue, "a", "b")


async def test_remembered_failures_are_bounded(make, loader, monkeypatch):
    monkeypatch.setattr("models.adapters.catalogue._MAX_NUM_FAILURES", 3)
    catalogue = make()
    loader.errors = [ValueError()] * 10
    for n in range(10):
        with pytest.raises(AdapterLoadFailedError):
            await catalogue.resolve(f"a{n}")

    assert len(catalogue._failures) == 3


async def test_a_waiter_that_leaves_does_not_stop_the_others(make, loader):
    loader.gate.clear()
    catalogue = make()
    requests = [asyncio.create_task(catalogue.resolve("a")) for _ in range(5)]
    await until(lambda: in_flight(catalogue) == 5)
    for request in requests[:4]:
        request.cancel()
    await asyncio.wait(requests[:4])
    assert in_flight(catalogue) == 1
    loader.gate.set()

    assert (await requests[4]).weights.ref.id == "a"
    assert sum(loader.loads.values()) == 1


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_load_that_everyone_left_ends_in_the_cache_or_quietly(
    make, loader, is_failing, caplog
):
    loader.gate.clear()
    loader.errors = [AdapterIncompatibleError("a", "NaN")] if is_failing else []
    catalogue = make()
    request = asyncio.create_task(catalogue.resolve("a"))
    await until(lambda: in_flight(catalogue) == 1)
    request.cancel()
    await asyncio.wait([request])

    loader.gate.set()
    await until(lambda: catalogue.stats.num_loading == 0)
    await asyncio.sleep(0.01)
    gc.collect()

    assert ready_ids(catalogue) == ([] if is_failing else ["a"])
    assert in_flight(catalogue) == 0
    assert not caplog.records


async def test_leaving_while_the_source_looks_leaves_no_reference(make, source):
    source.gate.clear()
    catalogue = make()
    request = asyncio.create_task(catalogue.resolve("a"))
    await until(lambda: source.finds["a"] == 1)
    request.cancel()
    await asyncio.wait([request])
    source.gate.set()
    await use(catalogue, "a")

    assert in_flight(catalogue) == 0


async def test_requests_keep_their_version_and_new_ones_get_the_new_one(make, source, loader):
    catalogue = make()
    [old] = await hold(catalogue, "a")
    source.versions["a"] = "2"
    [new] = await hold(catalogue, "a")

    assert (old.weights.ref.version, new.weights.ref.version) == ("1", "2")
    assert loader.alive_refs() == [("a", "1"), ("a", "2")]

    old.release()
    assert loader.alive_refs() == [("a", "2")]
    assert catalogue.stats.used_bytes == 10


async def test_an_old_version_that_nobody_uses_goes_when_the_new_one_is_there(make, source, loader):
    catalogue = make()
    catalogue.pin("a")
    await use(catalogue, "a")
    source.versions["a"] = "2"
    loader.errors = [AdapterIncompatibleError("a", "NaN")]
    with pytest.raises(AdapterIncompatibleError):
        await catalogue.resolve("a")
    assert loader.alive_refs() == [("a", "1")]

    source.versions["a"] = "3"
    await use(catalogue, "a")

    assert loader.alive_refs() == [("a", "3")]


async def test_a_load_of_an_old_version_that_ends_late_does_not_push_out_the_new_one(
    make, source, loader
):
    catalogue = make()
    loader.gate.clear()
    old = asyncio.create_task(catalogue.resolve("a"))
    await until(lambda: catalogue.stats.num_loading == 1)
    source.versions["a"] = "2"
    new = asyncio.create_task(catalogue.resolve("a"))
    await until(lambda: catalogue.stats.num_loading == 2)
    loader.gate.set()
    (await new).release()
    (await old).release()

    assert loader.alive_refs() == [("a", "2")]


async def test_files_that_change_under_a_load_are_found_anew(make, source, loader):
    source.is_remembering = True
    catalogue = make()

    loader.gate.clear()
    loader.errors = [FilesChangedError("a")]
    requests = [asyncio.create_task(catalogue.resolve("a")) for _ in range(10)]
    await until(lambda: in_flight(catalogue) == 10)
    source.versions["a"] = "2"
    loader.gate.set()

    leases = await asyncio.gather(*requests)

    assert {lease.ref.version for lease in leases} == {"2"}
    assert source.forgotten == ["a"]
    assert catalogue.stats.num_failed_loads == 1
    assert in_flight(catalogue) == 10


async def test_files_that_never_stand_still_are_given_up(make, loader):
    catalogue = make()
    loader.errors = [FilesChangedError("a")] * 3
    with pytest.raises(AdapterLoadFailedError, match="changing"):
        await catalogue.resolve("a")
    assert catalogue.facts() == ()

    await use(catalogue, "a")


async def test_the_adapter_released_longest_ago_makes_room(make):
    catalogue = make(budget_bytes=30)
    await use(catalogue, "a", "b", "c")
    await use(catalogue, "a")
    await use(catalogue, "d")

    assert ready_ids(catalogue) == ["a", "c", "d"]
    assert catalogue.stats.num_evictions == 1


async def test_what_is_used_or_pinned_is_not_evicted(make):
    catalogue = make(budget_bytes=30)
    [held] = await hold(catalogue, "held")
    catalogue.pin("pinned")
    await use(catalogue, "pinned", "a", "b", "c")

    assert ready_ids(catalogue) == ["c", "held", "pinned"]
    assert held.weights.ref.id == "held"

    catalogue.unpin("pinned")
    await use(catalogue, "d", "e")
    assert ready_ids(catalogue) == ["d", "e", "held"]


async def test_who_finds_no_room_waits_for_it_first_come_first_served(make, source):
    source.num_bytes["large"] = 20
    catalogue = make(budget_bytes=20)
    first, second = await hold(catalogue, "a", "b")
    large = asyncio.create_task(catalogue.resolve("large"))
    await until(lambda: catalogue.stats.num_queued == 1)
    small = asyncio.create_task(catalogue.resolve("small"))
    await until(lambda: catalogue.stats.num_queued == 2)

    first.release()
    await asyncio.sleep(0.02)
    # There is room for the small one, but it would starve the large one.
    assert not small.done()

    second.release()
    (await large).release()
    (await small).release()


async def test_the_wait_for_room_is_bounded_and_leaves_nothing(make, loader):
    catalogue = make(budget_bytes=10, max_wait_s=0.02)
    [held] = await hold(catalogue, "a")
    for _ in range(2):
        with pytest.raises(AdapterSlotTimeoutError):
            await catalogue.resolve("b")
    assert [facts.ref.id for facts in catalogue.facts()] == ["a"]
    assert sum(loader.loads.values()) == 1

    held.release()
    await use(catalogue, "b")


async def test_leaving_the_queue_lets_those_behind_go_on(make, source):
    source.num_bytes["large"] = 20
    catalogue = make(budget_bytes=20)
    [held] = await hold(catalogue, "a")
    large = asyncio.create_task(catalogue.resolve("large"))
    await until(lambda: catalogue.stats.num_queued == 1)
    small = asyncio.create_task(catalogue.resolve("small"))
    await until(lambda: catalogue.stats.num_queued == 2)

    large.cancel()

    assert (await small).weights.ref.id == "small"
    held.release()


@pytest.mark.parametrize("is_known_before", [True, False])
async def test_an_adapter_larger_than_the_whole_budget_is_refused(
    make, source, loader, is_known_before
):
    catalogue = make(budget_bytes=30)
    await use(catalogue, "a")
    if is_known_before:
        source.num_bytes["huge"] = 31
    loader.sizes["huge"] = 31

    with pytest.raises(AdapterIncompatibleError, match="31 bytes"):
        await catalogue.resolve("huge")

    assert ready_ids(catalogue) == ["a"]
    assert loader.loads[AdapterRef("huge", "1")] == (not is_known_before)
    assert catalogue.stats.used_bytes == 10


async def test_weights_larger_than_their_files_push_others_out(make, loader):
    loader.sizes["b"] = 25
    catalogue = make(budget_bytes=30)
    await use(catalogue, "a", "b")

    assert ready_ids(catalogue) == ["b"]
    assert catalogue.stats.used_bytes == 25


async def test_unloading_drops_what_nobody_uses(make, loader):
    catalogue = make()
    catalogue.pin("a")
    await use(catalogue, "a", "b")
    catalogue.unload("a")
    catalogue.unload("unknown")

    assert loader.alive_refs() == [("b", "1")]
    assert catalogue.stats.used_bytes == 10


async def test_unloading_what_is_used_waits_for_the_last_request_and_makes_no_copy(make, loader):
    catalogue = make()
    [first] = await hold(catalogue, "a")
    catalogue.unload("a")
    assert catalogue.facts()[0].is_leaving
    [second] = await hold(catalogue, "a")
    assert second.weights is first.weights

    first.release()
    assert loader.alive_refs() == [("a", "1")]
    second.release()
    assert loader.alive_refs() == []
    assert catalogue.stats.used_bytes == 0

    await use(catalogue, "a")
    assert loader.most_at_once[AdapterRef("a", "1")] == 1


async def test_unloading_while_it_loads_serves_who_waits_and_then_drops_it(make, loader):
    loader.gate.clear()
    catalogue = make()
    request = asyncio.create_task(catalogue.resolve("a"))
    await until(lambda: catalogue.stats.num_loading == 1)
    catalogue.unload("a")
    loader.gate.set()

    lease = await request
    assert lease.weights.ref.id == "a"
    lease.release()
    assert catalogue.facts() == ()


async def test_a_prefetch_brings_an_adapter_and_takes_an_unload_back(make, loader):
    catalogue = make()
    assert await catalogue.prefetch("a") == AdapterRef("a", "1")
    assert ready_ids(catalogue) == ["a"]
    assert in_flight(catalogue) == 0

    [held] = await hold(catalogue, "a")
    catalogue.unload("a")
    await catalogue.prefetch("a")
    held.release()

    assert ready_ids(catalogue) == ["a"]
    assert sum(loader.loads.values()) == 1


async def test_facts_tell_what_is_there(make, clock):
    catalogue = make()
    await use(catalogue, "b")
    clock.advance(7)
    catalogue.pin("a")
    [held, _] = await hold(catalogue, "a", "a")

    first, second = catalogue.facts()

    assert (first.ref, first.num_bytes, first.num_hits, first.num_in_flight, first.is_pinned) == (
        AdapterRef("a", "1"),
        10,
        1,
        2,
        True,
    )
    assert second.ref.id == "b"
    assert first.last_used_s - second.last_used_s == 7
    held.release()


async def test_closing_answers_whoever_waits_and_leaves_leases_good(make, loader):
    catalogue = make(budget_bytes=20, num_load_threads=1)
    [held] = await hold(catalogue, "held")
    loader.gate.clear()
    loading = asyncio.create_task(catalogue.resolve("loading"))
    await until(lambda: catalogue.stats.num_loading == 1)
    queued = asyncio.create_task(catalogue.resolve("queued"))
    await until(lambda: catalogue.stats.num_queued == 1)

    closing = asyncio.create_task(asyncio.to_thread(catalogue.close))
    outcomes = await asyncio.gather(loading, queued, return_exceptions=True)
    loader.gate.set()
    await closing

    assert [type(outcome) for outcome in outcomes] == [DrainingError] * 2
    assert held.weights.ref.id == "held"
    held.release()
    assert loader.alive_refs() == [("held", "1")]
    with pytest.raises(DrainingError):
        await catalogue.resolve("held")
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("medley-adapter")]


class Traffic:
    """Requests that come and leave, and an administrator, all at random."""

    def __init__(self, catalogue, source, ids):
        self.catalogue = catalogue
        self.source = source
        self.ids = ids
        self.rng = random.Random(4)
        self.outcomes = collections.Counter()

    async def request(self):
        adapter_id = self.rng.choice(self.ids)
        try:
            with await self.catalogue.resolve(adapter_id) as lease:
                assert lease.weights.ref.id == adapter_id
                for _ in range(self.rng.randrange(4)):
                    await asyncio.sleep(0)
                assert lease.weights.ref == lease.ref
                self.outcomes["served"] += 1
        except (AdapterSlotTimeoutError, AdapterLoadFailedError) as error:
            self.outcomes[type(error).__name__] += 1

    async def request_and_perhaps_leave(self):
        task = asyncio.create_task(self.request())
        if self.rng.random() < 0.1:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def administer(self):
        adapter_id = self.rng.choice(self.ids)
        action = self.rng.randrange(5)
        if action == 0:
            self.source.versions[adapter_id] = str(self.rng.randrange(3))
        elif action == 1:
            self.catalogue.pin(adapter_id)
            await asyncio.sleep(0)
            self.catalogue.unpin(adapter_id)
        else:
            self.catalogue.unload(adapter_id)

    async def client(self):
        for _ in range(25):
            if self.rng.random() < 0.15:
                await self.administer()
            else:
                await self.request_and_perhaps_leave()
            self.catalogue.check_invariants()


async def test_many_tasks_that_load_unload_reload_and_leave_keep_the_books_right(
    make, source, loader
):
    ids = [f"a{n}" for n in range(12)]
    source.num_bytes.update({adapter_id: 5 + n for n, adapter_id in enumerate(ids)})
    errors = random.Random(5).choices(
        [None, OSError(5, "io"), FilesChangedError("a")], weights=[18, 1, 1], k=2000
    )
    loader.errors = errors
    catalogue = make(budget_bytes=40, num_load_threads=3, max_wait_s=0.05, failure_ttl_s=0.0)
    traffic = Traffic(catalogue, source, ids)

    await asyncio.gather(*(traffic.client() for _ in range(20)))
    await until(lambda: catalogue.stats.num_loading == 0)

    catalogue.check_invariants()
    assert traffic.outcomes["served"] > 100
    assert traffic.outcomes["AdapterLoadFailedError"] > 0
    assert in_flight(catalogue) == 0
    assert catalogue.stats.num_queued == 0
    assert catalogue.stats.used_bytes <= 40
    held = sorted((facts.ref.id, facts.ref.version) for facts in catalogue.facts())
    assert loader.alive_refs() == held
    assert max(loader.most_at_once.values()) == 1


async def test_a_thousand_adapters_leave_no_trace_but_what_fits(make, source, loader):
    catalogue = make(budget_bytes=80)
    rng = random.Random(1)
    for _ in range(400):
        await use(catalogue, f"a{rng.randrange(1000)}")

    assert len(loader.alive_refs()) == len(catalogue.facts()) == 8
    assert not catalogue._finding


class Contents:
    """Weights that are the bytes of the files; torn ones have another version."""

    def __init__(self, files):
        contents = read_contents(files)
        digest = VersionDigest()
        for content in (contents.config, contents.weights):
            digest.add_file(len(content), [content])
        self.version = digest.version
        self.num_bytes = len(contents.weights)


async def test_requests_on_a_real_folder_that_is_rewritten_get_one_whole_version_each(tmp_path):
    source = FolderSource(tmp_path, time.monotonic, check_interval_s=0.0)
    config = CatalogueConfig(budget_bytes=100_000, failure_ttl_s=0.0)
    catalogue = AdapterCatalogue(source, Contents, config, time.monotonic)
    write_adapter(tmp_path, "a", data=b"first")
    served = collections.Counter()
    is_done = False

    async def client():
        while not is_done:
            try:
                with await catalogue.resolve("a") as lease:
                    await asyncio.sleep(0.01)
                    assert lease.weights.version == lease.ref.version
                    served[lease.ref.version] += 1
            except AdapterLoadFailedError:
                await asyncio.sleep(0.01)
            catalogue.check_invariants()

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for turn in range(15):
        await asyncio.to_thread(write_adapter, tmp_path, "a", data=b"%d" % turn * (100 + turn))
        await asyncio.sleep(0.01)
    write_adapter(tmp_path, "a", data=b"last")
    await until(lambda: read_contents(source.find("a")).weights.endswith(b"last"))
    last = source.find("a").version
    await until(lambda: served[last])
    is_done = True
    await asyncio.gather(*clients)
    source.close()
    catalogue.close()

    assert len(served) > 1
    assert [facts.ref.version for facts in catalogue.facts()] == [last]
    assert in_flight(catalogue) == 0
