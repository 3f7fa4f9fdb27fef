"""Tests of adapters across a network that fails, is slow, or ends; and what a restart finds."""

import functools
import itertools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from models.adapters.download_cache import DownloadCache
from models.adapters.fsspec_origin import open_origin
from models.adapters.remote_source import RemoteSource, RemoteSourceConfig
from models.adapters.source import FilesChangedError, read_contents
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    DrainingError,
)
from tests.unit.models.adapters.files import safetensors_bytes, write_adapter
from tests.unit.models.adapters.remote_stores import (
    CONFIG,
    assert_no_residue,
    find_later,
)

# the call that fails, and at its which time
FAULTS = [("info", 0), ("info", 1), ("info", 4), ("open", 0), ("open", 1), ("read", 0), ("read", 5)]
LAST_LOOK = ("info", 6)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("to 10.0.0.1"),
        ValueError("secret"),
        OSError(),
        # asyncio words it so.
        ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 443)"),
    ],
)
@pytest.mark.parametrize("fault", [*FAULTS, LAST_LOOK])
def test_a_fault_at_any_step_leaves_nothing_and_is_tried_again(
    source, store, clock, tmp_path, fault, error
):
    store.put("a")
    counts = {call: itertools.count() for call in ("info", "open", "read")}

    def fail(call, path):
        if call == fault[0] and next(counts[call]) == fault[1]:
            raise error

    store.before = fail
    with pytest.raises(AdapterLoadFailedError) as caught:
        source.find("a")
    num_calls = len(store.calls)

    assert caught.value.__cause__ is not None
    assert "10.0.0.1" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.retry_after_s == 5.0
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(AdapterLoadFailedError):
        source.find("a")
    assert len(store.calls) == num_calls
    assert read_contents(find_later(source, clock, 5.0)).config == CONFIG


@pytest.mark.parametrize("fault", ["info", "open", "read"])
def test_the_last_good_version_is_served_while_the_store_cannot_be_reached(
    source, store, clock, fault
):
    store.put("a")
    old = source.find("a")
    store.put("a", data=b"all new!")

    def fail(call, path):
        if call == fault:
            raise ConnectionError

    store.before = fail
    for _ in range(20):
        assert find_later(source, clock) == old
    store.before = lambda call, path: None
    find_later(source, clock)

    assert read_contents(find_later(source, clock)).weights == safetensors_bytes(b"all new!")


def test_a_store_that_nobody_answers_for_is_not_an_empty_one(source, store, clock):
    store.put("a")
    old = source.find("a")

    def fail(call, path):
        # As fsspec's http:// does.
        raise FileNotFoundError(path) from ConnectionRefusedError(111, "to 10.0.0.1")

    store.before = fail
    for _ in range(5):
        assert find_later(source, clock) == old
    with pytest.raises(AdapterLoadFailedError, match="Connection refused"):
        source.find("b")


def test_a_store_that_does_not_tell_sizes_is_told(source, store):
    store.put("a")
    info = store.info
    store.info = lambda path, **options: {**info(path), "size": None}

    with pytest.raises(AdapterLoadFailedError, match="how large files are"):
        source.find("a")
    assert store.num("open") == 0


def test_a_restart_fetches_nothing_that_is_in_the_cache(make_source, store):
    store.put("a")
    first = make_source()
    old = first.find("a")
    first.close()
    store.calls.clear()

    assert make_source().find("a") == old
    assert store.num("open") == 0


def test_a_restart_without_a_connection_serves_what_is_in_the_cache(make_source, store, clock):
    store.put("a")
    first = make_source()
    old = first.find("a")
    first.close()
    store.put("a", data=b"all new!")

    def fail(call, path):
        raise ConnectionError

    store.before = fail
    source = make_source()
    assert source.find("a") == old
    with pytest.raises(AdapterLoadFailedError):
        source.find("b")

    store.before = lambda call, path: None
    find_later(source, clock)
    assert find_later(source, clock).version != old.version


def test_damage_in_the_cache_is_found_and_fetched_again(make_source, store):
    store.put("a")
    first = make_source()
    files = first.find("a")
    first.close()
    weights = files.folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")

    again = make_source().find("a")

    assert again.version == files.version
    assert read_contents(again).weights == safetensors_bytes()


def test_a_version_that_left_the_cache_is_reported_and_fetched_again(source, store):
    store.put("a")
    files = source.find("a")
    shutil.rmtree(files.folder)
    with pytest.raises(FilesChangedError):
        read_contents(files)

    source.forget("a")

    assert read_contents(source.find("a")).config == CONFIG


def test_the_cache_stays_within_its_budget_and_every_adapter_can_be_had(
    make_source, store, tmp_path
):
    num_bytes = len(CONFIG) + len(safetensors_bytes(b"x" * 1000))
    source = make_source(budget_bytes=3 * num_bytes + 1500)
    for index in range(8):
        store.put(f"a{index}", data=b"%d" % index * 1000)
    for index in (0, 1, 2, 3, 4, 5, 6, 7, 0, 7):
        source.forget(f"a{index}")
        assert read_contents(source.find(f"a{index}")).config == CONFIG
        on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.*"))
        assert on_disk <= 3 * num_bytes + 1500


def test_an_adapter_larger_than_the_cache_is_refused(make_source, store):
    store.put("a", data=b"x" * 1000)

    with pytest.raises(AdapterIncompatibleError, match="disk cache"):
        make_source(budget_bytes=1500).find("a")


def test_many_that_ask_first_fetch_once(source, store):
    store.put("a")
    gate = threading.Event()
    store.before = lambda call, path: gate.wait(20)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(source.find, "a") for _ in range(20)]
        time.sleep(0.05)
        gate.set()

        assert len({answer.result(20) for answer in answers}) == 1
    assert store.num("open") == 2


def test_a_slow_store_does_not_hold_a_known_adapter(make_source, store, clock):
    source = make_source(max_check_wait_s=0.0)
    store.put("a")
    old = source.find("a")
    gate = threading.Event()
    store.before = lambda call, path: gate.wait(20)

    assert find_later(source, clock) == old
    assert source.recall("a") == old
    gate.set()


def test_who_waits_too_long_for_a_new_adapter_is_told_and_the_next_one_gets_it(
    make_source, store, clock
):
    source = make_source(max_fetch_wait_s=0.0)
    store.put("a")
    gate = threading.Event()
    store.before = lambda call, path: gate.wait(20)
    with pytest.raises(AdapterLoadFailedError, match="takes more than 0 s"):
        source.find("a")
    gate.set()

    deadline_s = time.monotonic() + 20
    while source.recall("a") is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert source.find("a").version


def test_closing_ends_a_download_and_whoever_waits(source, store, tmp_path):
    store.put("a", data=b"x" * 5000)
    is_reading = threading.Event()

    def crawl(call, path):
        if call == "read":
            is_reading.set()
            time.sleep(0.02)

    store.before = crawl
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(source.find, "a")
        assert is_reading.wait(20)
        source.close()

        with pytest.raises(DrainingError):
            answer.result(20)
    with pytest.raises(DrainingError):
        source.find("b")
    assert_no_residue(tmp_path)


def test_adapters_behind_a_real_http_server_are_found_and_an_outage_is_no_absence(tmp_path, clock):
    write_adapter(tmp_path / "served", "org/a")
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "served"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    source = RemoteSource(
        open_origin(f"http://127.0.0.1:{server.server_port}/"),
        DownloadCache(tmp_path / "cache", 1 << 20),
        RemoteSourceConfig(max_num_bytes=10_000, max_check_wait_s=20.0),
        clock,
    )
    try:
        found = source.find("org/a")
        assert read_contents(found).weights == safetensors_bytes()
        assert source.list_ids() == ("org/a",)
        with pytest.raises(AdapterNotFoundError):
            source.find("nobody")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)

    assert find_later(source, clock, adapter_id="org/a") == found
    assert find_later(source, clock, adapter_id="org/a") == found
    with pytest.raises(AdapterLoadFailedError):
        source.find("nobody")
    source.close()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass
