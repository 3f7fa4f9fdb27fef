"""Tests of adapters across a network: what is fetched when, versions, rewrites, the list."""

import pytest

from models.adapters import remote_source
from models.adapters.folder_source import FolderSource
from models.adapters.origin import FILE_NAMES
from models.adapters.source import read_contents
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
    InvalidAdapterIdError,
)
from tests.unit.models.adapters.files import safetensors_bytes, write_adapter
from tests.unit.models.adapters.remote_stores import (
    CONFIG,
    INTERVAL_S,
    SETTLE_S,
    assert_no_residue,
    find_later,
)
from tests.unit.models.adapters.test_ids import ABUSE, shown


@pytest.mark.parametrize("adapter_id", ["a", "org/name"])
def test_an_adapter_is_fetched_at_its_first_request(source, store, adapter_id, tmp_path):
    store.put(adapter_id, tokenizer_config__json=b"{}")

    files = source.find(adapter_id)

    assert files.adapter_id == adapter_id
    assert tmp_path in files.folder.parents
    contents = read_contents(files)
    assert (contents.config, contents.weights) == (CONFIG, safetensors_bytes())
    assert contents.texts == {"tokenizer_config.json": b"{}"}
    assert files.num_bytes == len(CONFIG) + len(safetensors_bytes()) + 2
    assert_no_residue(tmp_path)


def test_the_version_is_that_of_a_local_folder(source, store, tmp_path, clock):
    store.put("a", chat_template__jinja=b"{{ messages }}")
    folder = write_adapter(tmp_path / "local", "a")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}")
    local = FolderSource(tmp_path / "local", clock)

    assert source.find("a").version == local.find("a").version
    local.close()


@pytest.mark.parametrize("adapter_id", ABUSE, ids=shown)
def test_an_id_that_breaks_the_grammar_reaches_nobody(source, store, adapter_id):
    with pytest.raises(InvalidAdapterIdError):
        source.find(adapter_id)

    assert store.calls == []


def test_nothing_but_the_known_files_is_fetched(source, store, tmp_path):
    store.put("a", evil__py=b"import os", README__md=b"x")

    files = source.find("a")

    names = {path.name for path in files.folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "state.json"}


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_the_files_is_no_adapter_yet(source, store, clock, missing):
    store.put("a")
    store.rm(f"/root/a/{missing}")
    with pytest.raises(AdapterNotFoundError):
        source.find("a")

    store.put("a")

    assert find_later(source, clock, 5.0).version


def test_pickled_weights_are_refused_by_name_and_not_opened(source, store):
    store.put("a")
    store.rm("/root/a/adapter_model.safetensors")
    store.pipe("/root/a/adapter_model.bin", b"pickle")

    with pytest.raises(AdapterIncompatibleError, match="pickled"):
        source.find("a")
    assert store.num("open") == 0


def test_more_bytes_than_the_limit_are_never_fetched(source, store):
    store.put("a", data=b"x" * 10_000)

    with pytest.raises(AdapterIncompatibleError, match="the limit here is 10000"):
        source.find("a")
    assert store.num("open") == 0


def test_text_files_have_a_limit_of_their_own(source, store, monkeypatch):
    monkeypatch.setattr("models.adapters.fetcher.MAX_TEXT_FILE_BYTES", 20_000)
    store.put("fits", tokenizer__json=b"{" + b" " * 15_000 + b"}")
    store.put("large", tokenizer__json=b"{" + b" " * 20_000 + b"}")

    assert source.find("fits").num_bytes > 15_000
    with pytest.raises(AdapterIncompatibleError, match=r"tokenizer\.json has 20002 bytes"):
        source.find("large")


def test_a_store_that_sends_more_than_it_told_is_cut_off(source, store, tmp_path):
    store.put("a")
    real_open = store.open
    sent = []

    class Endless:
        def read(self, size):
            sent.append(size)
            return b"x" * size

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    store.open = lambda path, *rest, **options: (
        Endless() if path.endswith("safetensors") else real_open(path, *rest, **options)
    )

    with pytest.raises(AdapterLoadFailedError, match="being rewritten"):
        source.find("a")
    assert sum(sent) == len(safetensors_bytes()) + 1
    assert_no_residue(tmp_path)


def test_the_store_is_asked_once_an_interval(source, store, clock):
    store.put("a")
    source.find("a")
    find_later(source, clock, SETTLE_S)
    num_calls = len(store.calls)

    clock.advance(INTERVAL_S - 0.1)
    for _ in range(10):
        assert source.find("a") == source.recall("a")
    assert len(store.calls) == num_calls

    clock.advance(0.1)
    assert source.recall("a") is None
    source.find("a")
    assert len(store.calls) > num_calls
    assert store.num("open") == 2


def test_what_is_not_there_is_not_asked_for_again_for_a_moment(source, store, clock):
    for _ in range(5):
        with pytest.raises(AdapterNotFoundError):
            source.find("a")
    assert store.num("info") == len(FILE_NAMES) + 1

    store.put("a")

    assert find_later(source, clock, 5.0).version


def test_changed_files_are_a_new_version_once_they_have_settled(source, store, clock):
    store.put("a")
    old = source.find("a")
    store.put("a", data=b"all new!")

    assert find_later(source, clock) == old
    assert find_later(source, clock, SETTLE_S - 0.1) == old
    new = find_later(source, clock, 0.1)

    assert new.version != old.version
    assert read_contents(new).weights == safetensors_bytes(b"all new!")
    assert read_contents(old).weights == safetensors_bytes()


def test_a_rewrite_with_the_same_contents_keeps_the_version(source, store, clock):
    store.put("a")
    old = source.find("a")
    store.put("a")

    find_later(source, clock)

    assert find_later(source, clock, SETTLE_S).version == old.version


def test_files_of_different_generations_are_never_a_version(source, store, clock):
    store.put("a", data=b"weights0", config=b'{"n": 0}')
    old = source.find("a")
    seen = {old.version}
    for generation in range(1, 4):
        store.pipe("/root/a/adapter_config.json", b'{"n": %d}' % generation)
        for _ in range(3):
            # Weights arrive within the time that files must stand still.
            seen.add(find_later(source, clock, SETTLE_S / 4).version)
        store.pipe(
            "/root/a/adapter_model.safetensors", safetensors_bytes(b"weights%d" % generation)
        )
        for _ in range(10):
            seen.add(find_later(source, clock, SETTLE_S).version)

    contents = read_contents(source.find("a"))
    assert (contents.config, contents.weights) == (b'{"n": 3}', safetensors_bytes(b"weights3"))
    assert len(seen) == 4


def test_files_that_change_while_they_are_fetched_are_not_a_version(source, store, clock, tmp_path):
    store.put("a")
    old = source.find("a")
    store.put("a", data=b"1" * 100)
    find_later(source, clock)

    def rewrite(call, path):
        if call == "read":
            store.before = lambda call, path: None
            store.put("a", data=b"2" * 100)

    store.before = rewrite
    assert find_later(source, clock, SETTLE_S) == old
    assert_no_residue(tmp_path)
    # A state that it was not seen in before has to settle too.
    assert find_later(source, clock, SETTLE_S) == old
    new = find_later(source, clock, SETTLE_S)

    assert read_contents(new).weights == safetensors_bytes(b"2" * 100)


@pytest.mark.parametrize("is_cut", [True, False])
def test_unusable_files_are_hidden_behind_the_former_version_for_a_minute(
    source, store, clock, is_cut
):
    store.put("a")
    old = source.find("a")
    if is_cut:
        cut = safetensors_bytes(b"new weights", num_missing_bytes=3)
        store.pipe("/root/a/adapter_model.safetensors", cut)
    else:
        store.rm("/root/a/adapter_model.safetensors")
    assert find_later(source, clock) == old
    for _ in range(11):
        assert find_later(source, clock, SETTLE_S) == old
    num_opened = store.num("open")

    with pytest.raises(AdapterLoadFailedError if is_cut else AdapterNotFoundError):
        find_later(source, clock, SETTLE_S)
    # They were not fetched again and again.
    assert num_opened == (4 if is_cut else 2)
    assert source.recall("a") is None


def test_an_adapter_that_is_gone_is_not_found(source, store, clock):
    store.put("a")
    old = source.find("a")
    store.rm("/root/a", recursive=True)

    assert find_later(source, clock) == old
    with pytest.raises(AdapterNotFoundError):
        find_later(source, clock, SETTLE_S)

    assert not old.folder.exists()


def test_the_list_is_sorted_and_read_once_an_interval(source, store, clock):
    for name in ("b", "org/z", "org/y", "a"):
        store.put(name)
    store.pipe("/root/.hidden/adapter_config.json", b"{}")
    store.pipe("/root/file", b"")
    store.put("half")
    store.rm("/root/half/adapter_model.safetensors")

    assert source.list_ids() == ("a", "b", "org/y", "org/z")
    num_calls = store.num("ls")
    store.put("c")
    assert source.list_ids() == ("a", "b", "org/y", "org/z")
    assert store.num("ls") == num_calls
    clock.advance(INTERVAL_S)
    assert source.list_ids() == ("a", "b", "c", "org/y", "org/z")


def test_an_adapter_known_by_request_is_listed_at_once(source, store):
    assert source.list_ids() == ()
    store.put("a")
    source.find("a")

    assert source.list_ids() == ("a",)


def test_the_list_is_bounded(source, store, monkeypatch):
    monkeypatch.setattr("models.adapters.fsspec_origin._MAX_NUM_LISTED_FOLDERS", 3)
    for index in range(9):
        store.put(f"a{index}")

    assert source.list_ids() == ("a0", "a1", "a2")
    assert store.num("ls") <= 5


def test_a_list_that_fails_is_the_last_one(source, store, clock):
    store.put("a")
    assert source.list_ids() == ("a",)

    def fail(call, path):
        raise ConnectionError

    store.before = fail
    clock.advance(INTERVAL_S)

    assert source.list_ids() == ("a",)


def test_what_is_remembered_is_bounded(make_source, store, monkeypatch):
    monkeypatch.setattr(remote_source, "_MAX_NUM_REMEMBERED", 3)
    source = make_source()
    for index in range(6):
        store.put(f"a{index}")
        source.find(f"a{index}")
        with pytest.raises(AdapterNotFoundError):
            source.find(f"none{index}")

    assert [source.recall(f"a{index}") is not None for index in range(6)] == [False] * 3 + [
        True
    ] * 3
    assert len(source._failures) == 3
