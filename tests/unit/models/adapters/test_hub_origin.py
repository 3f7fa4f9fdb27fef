"""Tests of adapters of the hub, over a stand-in for ``snapshot_download``: no network."""

import dataclasses
import fnmatch
import subprocess
import sys

import pytest
from huggingface_hub import DryRunFileInfo, errors

from models.adapters.download_cache import DownloadCache
from models.adapters.hub_origin import HubOrigin
from models.adapters.remote_source import RemoteSource, RemoteSourceConfig
from models.adapters.source import read_contents
from models.errors import (
    AdapterIncompatibleError,
    AdapterLoadFailedError,
    AdapterNotFoundError,
)
from tests.fakes import FakeClock
from tests.unit.models.adapters.files import safetensors_bytes


@dataclasses.dataclass
class Hub:
    """Repositories by name: revisions by name, files by name."""

    repositories: dict = dataclasses.field(default_factory=dict)
    calls: list = dataclasses.field(default_factory=list)
    error: Exception | None = None

    def put(self, repo_id, commit, data=b"weights!", *, branch="main", **files):
        contents = {
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": safetensors_bytes(data),
            "train.py": b"import os",
            "checkpoint-1/adapter_model.safetensors": b"other",
            **{name.replace("__", "."): content for name, content in files.items()},
        }
        revisions = self.repositories.setdefault(repo_id, {})
        revisions[commit] = revisions[branch] = (commit, contents)

    def download(self, repo_id, *, revision, allow_patterns, dry_run=False, local_dir=None):
        self.calls.append((repo_id, revision, dry_run))
        if self.error is not None:
            raise self.error
        if repo_id not in self.repositories:
            missing = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
            raise errors.DryRunError("cannot be accessed") from missing
        commit, contents = self.repositories[repo_id][revision or "main"]
        names = [name for name in contents if any(fnmatch.fnmatch(name, p) for p in allow_patterns)]
        if dry_run:
            return [
                DryRunFileInfo(
                    commit_hash=commit,
                    file_size=len(contents[name]),
                    filename=name,
                    local_path="",
                    is_cached=False,
                    will_download=True,
                )
                for name in names
            ]
        for name in names:
            (local_dir / name).write_bytes(contents[name])
        (local_dir / ".cache" / "huggingface").mkdir(parents=True)
        (local_dir / ".cache" / "huggingface" / "x.metadata").write_bytes(b"x")
        return str(local_dir)


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make_source(hub, tmp_path, clock):
    opened = []

    def make(revision=""):
        source = RemoteSource(
            HubOrigin(hub.download, revision),
            DownloadCache(tmp_path / "cache", 1 << 20),
            RemoteSourceConfig(max_num_bytes=10_000, max_check_wait_s=20.0),
            clock,
        )
        opened.append(source)
        return source

    yield make
    for source in opened:
        source.close()


def test_a_repository_is_fetched_at_its_first_request_without_its_code(make_source, hub):
    hub.put("org/name", "c1", tokenizer__json=b"{}")

    files = make_source().find("org/name")

    contents = read_contents(files)
    assert contents.weights == safetensors_bytes()
    assert contents.texts == {"tokenizer.json": b"{}"}
    assert {path.name for path in files.folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "state.json",
    }
    # What is fetched is the commit that was looked at, whatever its branch is by then.
    assert hub.calls == [("org/name", None, True), ("org/name", "c1", False)]


def test_a_pinned_revision_is_what_is_asked_for(make_source, hub):
    hub.put("org/name", "c1", b"weights1", branch="v1")
    hub.put("org/name", "c2", b"weights2")

    files = make_source("v1").find("org/name")

    assert read_contents(files).weights == safetensors_bytes(b"weights1")


def test_a_new_commit_is_a_new_version(make_source, hub, clock):
    hub.put("org/name", "c1", b"weights1")
    source = make_source()
    old = source.find("org/name")
    hub.put("org/name", "c2", b"weights2")

    clock.advance(30)
    assert source.find("org/name") == old
    clock.advance(5)

    assert read_contents(source.find("org/name")).weights == safetensors_bytes(b"weights2")


@pytest.mark.parametrize("adapter_id", ["name", "org/nobody"])
def test_what_is_no_repository_is_not_found(make_source, hub, adapter_id):
    with pytest.raises(AdapterNotFoundError):
        make_source().find(adapter_id)

    assert len(hub.calls) == adapter_id.count("/")


@pytest.mark.parametrize(
    "error",
    [
        errors.HFValidationError("org/name--x"),
        errors.RevisionNotFoundError.__new__(errors.RevisionNotFoundError),
    ],
)
def test_names_and_revisions_that_the_hub_refuses_are_not_found(make_source, hub, error):
    hub.error = error

    with pytest.raises(AdapterNotFoundError):
        make_source().find("org/name")


@pytest.mark.parametrize(
    "error", [errors.DryRunError("no network: token hf_secret"), ConnectionError(), ValueError()]
)
def test_a_hub_that_cannot_be_reached_is_told_and_tried_again(make_source, hub, clock, error):
    hub.put("org/name", "c1")
    hub.error = error
    source = make_source()
    with pytest.raises(AdapterLoadFailedError) as caught:
        source.find("org/name")
    assert "hf_secret" not in str(caught.value)

    hub.error = None
    clock.advance(5)

    assert source.find("org/name").version


def test_pickled_weights_are_refused_and_never_fetched(make_source, hub):
    hub.put("org/name", "c1", adapter_model__bin=b"pickle")
    del hub.repositories["org/name"]["main"][1]["adapter_model.safetensors"]

    with pytest.raises(AdapterIncompatibleError, match="pickled"):
        make_source().find("org/name")
    assert [is_dry for _, _, is_dry in hub.calls] == [True]


def test_more_bytes_than_the_limit_are_never_fetched(make_source, hub):
    hub.put("org/name", "c1", b"x" * 10_000)

    with pytest.raises(AdapterIncompatibleError, match="the limit here is 10000"):
        make_source().find("org/name")
    assert [is_dry for _, _, is_dry in hub.calls] == [True]


def test_the_hub_is_not_listed_but_what_was_asked_for_is(make_source, hub):
    hub.put("org/name", "c1")
    source = make_source()
    assert source.list_ids() == ()

    source.find("org/name")

    assert source.list_ids() == ("org/name",)


def test_the_library_of_the_hub_is_imported_when_it_is_needed_only():
    origins = "import sys, models.adapters.hub_origin, models.adapters.fsspec_origin; "
    shown = "print(sorted({'huggingface_hub', 'fsspec', 'torch'} & {*sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", origins + shown],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert result.stdout.strip() == "[]"
