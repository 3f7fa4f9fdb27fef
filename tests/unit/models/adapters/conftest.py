"""Sources over a store in memory."""

import pytest

from models.adapters.download_cache import DownloadCache
from models.adapters.fsspec_origin import FsspecOrigin
from models.adapters.remote_source import RemoteSource, RemoteSourceConfig
from tests.fakes import FakeClock
from tests.unit.models.adapters.remote_stores import Store


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def make_source(store, clock, tmp_path):
    """Sources over the store and one cache; they wait long, so that no test hangs on speed."""
    opened = []

    def make(budget_bytes=1 << 20, **config):
        fields = {"max_num_bytes": 10_000, "max_check_wait_s": 20.0, **config}
        source = RemoteSource(
            FsspecOrigin(store, "/root"),
            DownloadCache(tmp_path / "cache", budget_bytes),
            RemoteSourceConfig(**fields),
            clock,
        )
        opened.append(source)
        return source

    yield make
    for source in opened:
        source.close()


@pytest.fixture
def source(make_source):
    return make_source()
