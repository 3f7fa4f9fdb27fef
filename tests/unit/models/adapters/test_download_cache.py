"""Tests of the cache of downloads: room, sharing, and what processes leave that end."""

import dataclasses
import os
import subprocess
import sys
import threading

import pytest

from models.adapters.download_cache import CachedVersion, CacheFullError, DownloadCache
from models.adapters.origin import RemoteFile, RemoteState
from models.adapters.source import AdapterFiles

STATE = RemoteState((RemoteFile("adapter_config.json", 2, "s1"),), "revision")


@pytest.fixture
def cache(tmp_path):
    return DownloadCache(tmp_path / "cache", 10_000)


def keep(cache, adapter_id, version="v1", num_bytes=100, state=STATE):
    with cache.build(num_bytes) as folder:
        (folder / "adapter_config.json").write_bytes(b"x" * num_bytes)
        files = AdapterFiles(
            adapter_id=adapter_id, folder=folder, version=version, num_bytes=num_bytes
        )
        return cache.keep(folder, CachedVersion(files, state))


def age(files, rank):
    os.utime(files.folder / "state.json", ns=(rank, rank))


def test_what_was_kept_is_found_by_the_next_process(cache):
    files = keep(cache, "org/name")

    found = DownloadCache(cache.folder, 10_000).find("org/name")

    assert found == CachedVersion(files, STATE)
    assert (files.folder / "adapter_config.json").read_bytes() == b"x" * 100
    assert cache.find("org-name") is None
    assert cache.find("org") is None


def test_the_version_that_was_used_last_is_found(cache):
    first, second = keep(cache, "a", "v1"), keep(cache, "a", "v2")
    age(first, 1)
    age(second, 2)
    assert cache.find("a").files == second

    cache.touch(first)

    assert cache.find("a").files == first


def test_the_least_recently_used_goes_first_and_no_more_than_needed(cache):
    kept = [keep(cache, f"a{rank}", num_bytes=2000) for rank in range(4)]
    for files, rank in zip(kept, (3, 1, 4, 2), strict=True):
        age(files, rank)

    keep(cache, "new", num_bytes=1500)

    assert [files.folder.exists() for files in kept] == [True, False, True, True]
    assert cache.num_used_bytes() <= 10_000


def test_a_build_that_fails_leaves_nothing(cache):
    def fail():
        with cache.build(100) as folder:
            (folder / "adapter_config.json").write_bytes(b"x")
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()

    assert list(cache.folder.iterdir()) == []
    assert cache.num_used_bytes() == 0


def test_room_for_what_is_being_built_is_not_given_twice(cache):
    with cache.build(6000), pytest.raises(CacheFullError), cache.build(6000):
        pass

    with cache.build(6000):
        pass


def test_a_version_that_is_there_already_is_kept(cache):
    first = keep(cache, "a")
    later = dataclasses.replace(STATE, revision="later")

    second = keep(cache, "a", state=later)

    assert second == first
    assert cache.find("a").state == later
    assert len(list(cache.folder.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": 1}', b"\xff", b"null"])
def test_an_entry_that_makes_no_sense_is_removed(cache, content):
    files = keep(cache, "a")
    (files.folder / "state.json").write_bytes(content)

    assert cache.find("a") is None
    assert not files.folder.exists()
    assert keep(cache, "a") == files


def test_what_a_killed_process_was_building_is_removed_by_the_next(cache):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from models.adapters.download_cache import DownloadCache\n"
        "with DownloadCache(Path(sys.argv[1]), 10_000).build(10) as folder:\n"
        "    (folder / 'f').write_bytes(b'x'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(cache.folder)], check=False, timeout=60)
    assert len(list(cache.folder.iterdir())) == 1

    with cache.build(10) as folder:
        DownloadCache(cache.folder, 1000)

        assert list(cache.folder.iterdir()) == [folder]


def test_threads_that_build_at_once_never_exceed_the_budget(cache):
    is_over, full = [], []

    def work(worker):
        for index in range(15):
            try:
                keep(cache, f"a{worker}-{index % 4}", num_bytes=1500)
            except CacheFullError:
                full.append(worker)
            is_over.append(cache.num_used_bytes() > 10_000)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not any(is_over)
    assert len(full) < len(is_over) // 2
    assert not list(cache.folder.glob(".tmp*"))


def test_a_version_without_its_state_counts_and_goes_first(cache):
    stateless, other = keep(cache, "a", num_bytes=4000), keep(cache, "b", num_bytes=4000)
    (stateless.folder / "state.json").unlink()
    assert cache.num_used_bytes() >= 8000

    keep(cache, "c", num_bytes=4000)

    assert not stateless.folder.exists()
    assert other.folder.exists()
