"""Opens the sources of adapters that a configuration names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from models.adapters.download_cache import DownloadCache
from models.adapters.folder_source import FolderSource
from models.adapters.fsspec_origin import open_origin
from models.adapters.hub_origin import HubOrigin, SnapshotDownload
from models.adapters.location import local_folder
from models.adapters.origin import AdapterOrigin
from models.adapters.remote_source import RemoteSource, RemoteSourceConfig
from models.adapters.source_chain import ClosableSource, SourceChain
from models.config import AdapterConfig
from models.errors import ConfigError

_HUB = "hub"


def is_fetching(config: AdapterConfig) -> bool:
    """Return whether adapters come over a network."""
    return config.is_hub_allowed or (bool(config.path) and local_folder(config.path) is None)


def open_source(
    config: AdapterConfig,
    *,
    cache_folder: Path,
    max_num_bytes: int,
    clock: Callable[[], float],
    hub_download: SnapshotDownload | None = None,
) -> ClosableSource:
    """Open what the configuration names: a folder or a URL, the hub, or both in this order.

    Args:
        config: names at least one.
        cache_folder: downloads go below it, into a folder for each origin.
        max_num_bytes: most bytes of an adapter's config and weights; more are never fetched.
        clock: seconds.
        hub_download: None takes ``huggingface_hub.snapshot_download``.

    Raises:
        ConfigError: there is no such folder, or no library for the URL.
    """

    def fetch_from(origin: AdapterOrigin, name: str) -> RemoteSource:
        return RemoteSource(
            origin,
            _open_cache(cache_folder, name, config.download_budget_bytes),
            RemoteSourceConfig(
                max_num_bytes=max_num_bytes, check_interval_s=config.check_interval_s
            ),
            clock,
        )

    sources: list[ClosableSource] = []
    if config.path:
        folder = local_folder(config.path)
        if folder is None:
            sources.append(fetch_from(open_origin(config.path), config.path))
        elif folder.is_dir():
            sources.append(FolderSource(folder, clock))
        else:
            raise ConfigError("adapters", f"there is no folder '{folder}'")
    if config.is_hub_allowed:
        name = f"{_HUB} {config.hub_revision}"
        sources.append(fetch_from(HubOrigin(hub_download, config.hub_revision), name))
    return sources[0] if len(sources) == 1 else SourceChain(sources)


def _open_cache(cache_folder: Path, name: str, budget_bytes: int) -> DownloadCache:
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    folder = cache_folder / "adapters" / digest
    try:
        return DownloadCache(folder, budget_bytes)
    except OSError as error:
        raise ConfigError(
            "cache_folder", f"'{folder}' cannot be used: {error.strerror or type(error).__name__}"
        ) from error
