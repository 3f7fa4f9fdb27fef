"""Tests of which sources a configuration opens."""

import fsspec
import pytest
from huggingface_hub import DryRunFileInfo

from models.config import AdapterConfig
from models.engine.adapter_sources import is_fetching, open_source
from models.errors import AdapterNotFoundError, ConfigError
from tests.fakes import FakeClock
from tests.unit.models.adapters.files import safetensors_bytes, write_adapter


@pytest.fixture
def opened(tmp_path):
    sources = []

    def open_it(config, **options):
        source = open_source(
            config,
            cache_folder=tmp_path / "cache",
            max_num_bytes=10_000,
            clock=FakeClock(),
            **options,
        )
        sources.append(source)
        return source

    yield open_it
    for source in sources:
        source.close()


def refuse_network(*arguments, **options):
    raise AssertionError("the network was asked")


def tell_of_one(repo_id, *, local_dir=None, dry_run=False, **options):
    """A hub on which every name is an adapter."""
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": safetensors_bytes()}
    if dry_run:
        return [
            DryRunFileInfo("c", len(content), name, "", is_cached=False, will_download=True)
            for name, content in files.items()
        ]
    for name, content in files.items():
        (local_dir / name).write_bytes(content)
    return None


def test_a_folder_is_read_where_it_lies(opened, tmp_path):
    write_adapter(tmp_path / "adapters", "org/a")
    for path in (f"{tmp_path}/adapters", f"file://{tmp_path}/adapters"):
        config = AdapterConfig(path=path)

        source = opened(config, hub_download=refuse_network)

        assert source.find("org/a").folder == (tmp_path / "adapters/org/a").resolve()
        assert not is_fetching(config)
        # The hub is off: its ids are unknown, and nobody is asked.
        with pytest.raises(AdapterNotFoundError):
            source.find("org/other")
    assert not (tmp_path / "cache").exists()


def test_a_url_is_fetched_into_the_cache(opened, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/adapter-sources-test/a/adapter_config.json", b"{}")
    memory.pipe("/adapter-sources-test/a/adapter_model.safetensors", safetensors_bytes())
    config = AdapterConfig(path="memory://adapter-sources-test")

    source = opened(config)

    assert (tmp_path / "cache").resolve() in source.find("a").folder.parents
    assert source.list_ids() == ("a",)
    assert is_fetching(config)
    memory.rm("/adapter-sources-test", recursive=True)


def test_the_hub_comes_behind_the_folder(opened, tmp_path):
    write_adapter(tmp_path / "adapters", "org/mine")
    config = AdapterConfig(path=str(tmp_path / "adapters"), is_hub_allowed=True)

    source = opened(config, hub_download=tell_of_one)

    assert source.find("org/mine").folder.name == "mine"
    assert (tmp_path / "cache").resolve() in source.find("org/theirs").folder.parents
    with pytest.raises(AdapterNotFoundError):
        source.find("name")
    assert source.list_ids() == ("org/mine", "org/theirs")


def test_the_hub_may_be_all_there_is(opened):
    config = AdapterConfig(is_hub_allowed=True)

    assert config.is_enabled
    assert opened(config, hub_download=tell_of_one).find("org/a").version


@pytest.mark.parametrize("path", ["/does/not/exist", "nowhere://x"])
def test_what_cannot_be_opened_is_told(opened, path):
    with pytest.raises(ConfigError) as caught:
        opened(AdapterConfig(path=path))

    assert caught.value.field == "adapters"


def test_a_cache_that_cannot_be_made_is_told(opened, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file in the way")

    with pytest.raises(ConfigError) as caught:
        opened(AdapterConfig(path="memory://x"))

    assert caught.value.field == "cache_folder"
