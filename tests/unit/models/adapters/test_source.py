"""Tests of folders of adapters: what is found, which version it is, and rewrites."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.adapters import adapter_folder
from models.adapters.folder_source import FolderSource
from models.adapters.source import FilesChangedError, VersionDigest, read_contents
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    DrainingError,
    InvalidAdapterIdError,
)
from tests.fakes import FakeClock
from tests.unit.models.adapters.files import safetensors_bytes, write_adapter
from tests.unit.models.adapters.test_ids import ABUSE, shown


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "adapters"
    root.mkdir()
    return root


@pytest.fixture
def source(root, clock):
    # Waits long for hashes, so that no test depends on how busy the machine is.
    source = FolderSource(root, clock, max_change_wait_s=20.0)
    yield source
    source.close()


@pytest.fixture
def impatient(root, clock):
    source = FolderSource(root, clock, max_change_wait_s=0.0)
    yield source
    source.close()


def find_later(source, clock, adapter_id="a"):
    """Find an adapter once its files may be looked at again."""
    clock.advance(1.0)
    return source.find(adapter_id)


def find_until(source, clock, is_wanted):
    """Find again and again, since hashes are computed in the background."""
    deadline_s = time.monotonic() + 20
    while not is_wanted(files := find_later(source, clock)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return files


@pytest.fixture
def gate(monkeypatch):
    """Holds every hash at its first chunk until it is opened; counts the hashes."""

    class Gate:
        def __init__(self):
            self.event = threading.Event()
            self.event.set()
            self.num_hashes = 0
            self.is_reached = threading.Event()

    gate = Gate()
    original = adapter_folder._chunks

    def chunks(file, check_open):
        if file.name.endswith("safetensors"):
            gate.num_hashes += 1
            gate.is_reached.set()
            while not gate.event.wait(0.01):
                check_open()
        yield from original(file, check_open)

    monkeypatch.setattr(adapter_folder, "_chunks", chunks)
    yield gate
    gate.event.set()


@pytest.mark.parametrize("adapter_id", ["a", "org/name"])
def test_a_folder_that_is_dropped_in_is_found_at_its_first_request(source, root, adapter_id):
    with pytest.raises(AdapterNotFoundError):
        source.find(adapter_id)

    folder = write_adapter(root, adapter_id)

    files = source.find(adapter_id)
    assert files.adapter_id == adapter_id
    assert files.folder == folder.resolve()
    assert files.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert source.list_ids() == (adapter_id,)


def test_the_root_may_appear_later(tmp_path, clock):
    source = FolderSource(tmp_path / "later", clock)
    with pytest.raises(AdapterNotFoundError):
        source.find("a")
    assert source.list_ids() == ()

    write_adapter(tmp_path / "later", "a")

    assert source.find("a").version
    source.close()


def test_the_version_names_the_contents_of_both_files_and_nothing_else(source, root):
    write_adapter(root, "a")
    write_adapter(root, "same")
    write_adapter(root, "weights", data=b"weights?")
    write_adapter(root, "config", config=b'{"peft_type": "LOHA"}')

    versions = {name: source.find(name).version for name in ("a", "same", "weights", "config")}

    assert versions["a"] == versions["same"]
    assert len(set(versions.values())) == 3


def test_a_byte_that_moves_from_one_file_to_the_other_changes_the_version():
    versions = set()
    for config, weights in ((b"{}", b"}w"), (b"{}}", b"w")):
        digest = VersionDigest()
        digest.add_file(len(config), [config])
        digest.add_file(len(weights), [weights])
        versions.add(digest.version)

    assert len(versions) == 2


@pytest.mark.parametrize("adapter_id", ABUSE, ids=shown)
def test_an_id_that_breaks_the_grammar_never_reaches_the_disk(source, adapter_id, monkeypatch):
    def touch(*arguments, **keywords):
        raise AssertionError("the disk was touched")

    for name in ("realpath", "exists", "isdir", "lexists"):
        monkeypatch.setattr(os.path, name, touch)
    for name in ("stat", "scandir", "open"):
        monkeypatch.setattr(os, name, touch)

    with pytest.raises(InvalidAdapterIdError):
        source.find(adapter_id)


@pytest.mark.parametrize("linked", ["folder", "weights", "config", "owner"])
def test_links_out_of_the_root_are_not_followed(source, root, tmp_path, linked):
    outside = write_adapter(tmp_path / "outside", "org/a")
    if linked == "folder":
        (root / "org").mkdir()
        (root / "org" / "a").symlink_to(outside)
    elif linked == "owner":
        (root / "org").symlink_to(outside.parent)
    else:
        name = {"weights": "adapter_model.safetensors", "config": "adapter_config.json"}[linked]
        inside = write_adapter(root, "org/a")
        (inside / name).unlink()
        (inside / name).symlink_to(outside / name)

    with pytest.raises(AdapterNotFoundError):
        source.find("org/a")
    assert source.list_ids() == ()


def test_links_within_the_root_are_followed_and_the_root_may_be_one(tmp_path, clock):
    write_adapter(tmp_path / "real", "a")
    (tmp_path / "real" / "alias").symlink_to("a")
    (tmp_path / "root").symlink_to("real")
    source = FolderSource(tmp_path / "root", clock)

    assert source.find("alias").folder == (tmp_path / "real" / "a").resolve()
    assert source.list_ids() == ("a", "alias")
    source.close()


def test_links_in_a_circle_and_files_in_the_way_are_an_error_of_ours(source, root):
    (root / "circle").symlink_to("circle")
    (root / "file").write_bytes(b"")

    with pytest.raises((AdapterNotFoundError, AdapterLoadFailedError)):
        source.find("circle")
    for adapter_id in ("file", "file/a"):
        with pytest.raises(AdapterNotFoundError):
            source.find(adapter_id)


def test_a_pipe_is_not_opened(source, root):
    folder = write_adapter(root, "a")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")

    with pytest.raises(AdapterNotFoundError):
        source.find("a")


def test_pickled_weights_are_refused_by_name_and_not_opened(source, root):
    folder = write_adapter(root, "a")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")

    with pytest.raises(AdapterIncompatibleError, match="safetensors"):
        source.find("a")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_the_files_is_no_adapter(source, root, missing):
    (write_adapter(root, "a") / missing).unlink()

    with pytest.raises(AdapterNotFoundError):
        source.find("a")
    assert source.list_ids() == ()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", b"\x40"),
        ("adapter_model.safetensors", safetensors_bytes()[:20]),
        ("adapter_model.safetensors", safetensors_bytes(num_missing_bytes=1)),
        ("adapter_model.safetensors", b"\0" * 100),
        ("adapter_config.json", b""),
        ("adapter_config.json", b'{"peft_type": "LO'),
    ],
)
def test_files_cut_short_are_not_an_adapter_yet_and_become_one(source, root, name, content):
    folder = write_adapter(root, "a")
    (folder / name).write_bytes(content)
    with pytest.raises(AdapterLoadFailedError, match="incomplete") as caught:
        source.find("a")
    assert caught.value.retry_after_s == 1.0

    write_adapter(root, "a")

    assert source.find("a").version


def test_other_damage_is_left_to_whoever_reads_the_tensors(source, root):
    folder = write_adapter(root, "a")
    (folder / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec")

    assert source.find("a").version


def test_the_disk_is_looked_at_once_an_interval(source, root, clock):
    write_adapter(root, "a")
    old = source.find("a")
    write_adapter(root, "a", data=b"changed!")

    clock.advance(0.99)
    assert source.recall("a") == old
    assert source.find("a") == old

    clock.advance(0.01)
    assert source.recall("a") is None
    new = source.find("a")
    assert new.version != old.version
    assert source.recall("a") == new


def test_touching_files_and_copying_them_over_themselves_keeps_the_version(source, root, clock):
    folder = write_adapter(root, "a")
    old = source.find("a")

    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    assert find_later(source, clock) == old

    shutil.copytree(folder, root / "copy")
    shutil.rmtree(folder)
    (root / "copy").rename(folder)
    assert find_later(source, clock) == old


@pytest.mark.parametrize("kept", ["size", "size and time"])
def test_a_change_is_seen_though_size_and_time_are_as_before(source, root, clock, kept):
    folder = write_adapter(root, "a", data=b"11111111")
    old = source.find("a")
    before = (folder / "adapter_model.safetensors").stat()
    find_later(source, clock)

    write_adapter(root, "a", data=b"22222222")
    if kept == "size and time":
        times = (before.st_atime_ns, before.st_mtime_ns)
        os.utime(folder / "adapter_model.safetensors", ns=times)

    assert find_later(source, clock).version != old.version


def test_a_write_in_the_same_tick_as_the_first_hash_is_found(source, root, clock, monkeypatch):
    folder = write_adapter(root, "a", data=b"11111111")
    real_stat = Path.stat
    frozen = {}

    def stat(path, **keywords):
        # A file clock that never ticks: no write shows in the fingerprint.
        state = real_stat(path, **keywords)
        return frozen.setdefault(path, state)

    monkeypatch.setattr(Path, "stat", stat)
    old = source.find("a")
    write_adapter(root, "a", data=b"22222222")

    new = find_until(source, clock, lambda files: files.version != old.version)

    monkeypatch.undo()
    source.forget("a")
    assert source.find("a").version == new.version
    assert folder.is_dir()


def test_the_old_version_serves_while_the_new_one_is_hashed(impatient, root, clock, gate):
    write_adapter(root, "a")
    old = impatient.find("a")
    gate.event.clear()
    write_adapter(root, "a", data=b"changed!")

    for _ in range(5):
        assert find_later(impatient, clock) == old
    assert gate.num_hashes <= 2, "one hash at a time"

    gate.event.set()
    new = find_until(impatient, clock, lambda files: files != old)
    assert read_contents(new).weights == safetensors_bytes(b"changed!")


def test_files_that_change_under_the_hash_are_not_a_version(impatient, root, clock, gate):
    write_adapter(root, "a")
    old = impatient.find("a")
    gate.event.clear()
    gate.is_reached.clear()
    write_adapter(root, "a", data=b"half new")
    assert find_later(impatient, clock) == old
    assert gate.is_reached.wait(20)

    write_adapter(root, "a", data=b"all new!")
    gate.event.set()

    seen = {old.version}

    def is_last(files):
        seen.add(files.version)
        return files != old

    new = find_until(impatient, clock, is_last)
    assert read_contents(new).weights == safetensors_bytes(b"all new!")
    assert seen == {old.version, new.version}


def test_a_rewrite_in_pieces_shows_the_old_version_until_it_is_whole(source, root, clock):
    folder = write_adapter(root, "a")
    old = source.find("a")
    whole = safetensors_bytes(b"much longer than it was before" * 10)

    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert find_later(source, clock) == old
    for end in range(7, len(whole), 50):
        (folder / "adapter_model.safetensors").write_bytes(whole[:end])
        assert find_later(source, clock) == old
    (folder / "adapter_model.safetensors").unlink()
    assert find_later(source, clock) == old
    (folder / "adapter_model.safetensors").write_bytes(whole)

    assert find_later(source, clock) != old


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_rewrite_that_was_given_up_is_told_after_a_minute_without_a_change(
    source, root, clock, is_missing
):
    folder = write_adapter(root, "a")
    old = source.find("a")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert find_later(source, clock) == old
    clock.advance(50)
    if is_missing:
        (folder / "adapter_model.safetensors").unlink()
    else:
        (folder / "adapter_model.safetensors").write_bytes(b"a")  # another size
    for _ in range(50):
        assert find_later(source, clock) == old

    clock.advance(50)

    with pytest.raises(AdapterNotFoundError if is_missing else AdapterLoadFailedError):
        source.find("a")
    assert source.recall("a") is None


def test_a_folder_that_is_gone_is_not_found(impatient, root, clock):
    folder = write_adapter(root, "a")
    impatient.find("a")
    shutil.rmtree(folder)

    with pytest.raises(AdapterNotFoundError):
        find_later(impatient, clock)
    assert impatient.recall("a") is None


def test_a_folder_that_is_gone_for_a_moment_only_is_waited_for(root, clock):
    source = FolderSource(root, clock, max_change_wait_s=40.0)
    folder = write_adapter(root, "a")
    old = source.find("a")
    folder.rename(root / "away")
    with ThreadPoolExecutor(1) as pool:
        source._is_closing.wait = lambda timeout: (root / "away").rename(folder)
        clock.advance(1.0)

        assert pool.submit(source.find, "a").result(20) == old
    source.close()


def test_many_threads_that_ask_first_hash_once_and_get_one_answer(source, root, gate):
    write_adapter(root, "a")
    gate.event.clear()
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(source.find, "a") for _ in range(20)]
        assert gate.is_reached.wait(20)
        gate.event.set()

        assert len({answer.result(20) for answer in answers}) == 1
    assert gate.num_hashes == 1


def test_unreadable_files_are_told_without_their_path(source, root, monkeypatch):
    folder = write_adapter(root, "a")
    real_open = Path.open

    def refuse(path, *arguments):
        if path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments)

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(AdapterLoadFailedError, match="Permission denied") as caught:
        source.find("a")
    assert str(root) not in str(caught.value)


def test_contents_are_of_the_version_or_refused(source, root):
    folder = write_adapter(root, "a")
    files = source.find("a")

    contents = read_contents(files)
    assert contents.config == b'{"peft_type": "LORA"}'
    assert contents.weights == safetensors_bytes()

    for data in (b"weights?", b"shorter", b"longer than before"):
        write_adapter(root, "a", data=data)
        with pytest.raises(FilesChangedError):
            read_contents(files)
    shutil.rmtree(folder)
    with pytest.raises(FilesChangedError):
        read_contents(files)


def test_while_files_are_rewritten_in_pieces_only_whole_versions_are_read(root):
    source = FolderSource(root, time.monotonic, check_interval_s=0.0, max_change_wait_s=0.01)
    folder = write_adapter(root, "a", data=b"0" * 5000)
    is_done = threading.Event()

    def rewrite():
        for turn in range(1, 1000):
            whole = safetensors_bytes(b"%d" % (turn % 10) * (5000 + turn % 3))
            with (folder / "adapter_model.safetensors").open("wb", buffering=0) as file:
                for start in range(0, len(whole), 500):
                    file.write(whole[start : start + 500])
            if is_done.wait(0.002):
                return

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(rewrite)
        seen = set()
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            try:
                files = source.find("a")
                contents = read_contents(files)
            except (FilesChangedError, AdapterLoadFailedError):
                continue
            seen.add((files.version, contents.weights))
        is_done.set()
        writer.result(20)
    source.close()

    assert seen
    assert len(seen) == len({version for version, _ in seen})
    whole = {safetensors_bytes(b"%d" % (n % 10) * (5000 + n % 3)) for n in range(30)}
    assert {weights for _, weights in seen} <= whole | {safetensors_bytes(b"0" * 5000)}


def test_a_forgotten_adapter_is_found_anew_within_the_interval(source, root):
    write_adapter(root, "a")
    old = source.find("a")
    write_adapter(root, "a", data=b"changed!")
    source.forget("a")

    assert source.recall("a") is None
    assert source.find("a") != old


def test_the_list_is_sorted_bounded_and_read_once_an_interval(source, root, clock, monkeypatch):
    for name in ("b", "org/z", "a", "org/y"):
        write_adapter(root, name)
    write_adapter(root, ".hidden")
    write_adapter(root, "a/too/deep")
    assert source.list_ids() == ("a", "b", "org/y", "org/z")

    write_adapter(root, "c")
    assert "c" not in source.list_ids()
    clock.advance(1.0)
    assert "c" in source.list_ids()

    monkeypatch.setattr("models.adapters.folder_source._MAX_NUM_LISTED_FOLDERS", 2)
    clock.advance(1.0)
    assert len(source.list_ids()) <= 2


def test_what_is_remembered_is_bounded(source, root, monkeypatch):
    monkeypatch.setattr("models.adapters.folder_source._MAX_NUM_REMEMBERED", 3)
    for name in "abcde":
        write_adapter(root, name)
        source.find(name)

    assert [source.recall(name) is not None for name in "abcde"] == [False, False, True, True, True]


def test_closing_ends_the_threads_and_whoever_waits(root, clock, gate):
    source = FolderSource(root, clock)
    write_adapter(root, "a")
    gate.event.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.find, "a")
        assert gate.is_reached.wait(20)

        source.close()

        with pytest.raises(DrainingError):
            waiting.result(20)
    assert not [t for t in threading.enumerate() if t.name.startswith("medley-adapter-hash")]
    with pytest.raises(DrainingError):
        source.find("a")
    source.close()
