"""HubOrigin: adapters of the Hugging Face hub, "owner/name"; if the configuration allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models.adapters.origin import (
    FILE_NAMES,
    OriginError,
    RemoteChangedError,
    RemoteFile,
    RemoteState,
    RemoteUnusableError,
)
from models.adapters.source import CONFIG_NAME, PICKLE_NAME, WEIGHTS_NAME
from models.errors import AdapterIncompatibleError, AdapterNotFoundError

_PICKLE_REASON = "its weights are pickled; only safetensors files are read"


# What is needed of ``huggingface_hub.snapshot_download``: it fetches files of a repository, or
# tells which they are (``dry_run``).
SnapshotDownload = Callable[..., Any]


class HubOrigin:
    """Adapters that are a repository of the hub each. Its commits make a version whole.

    A token, proxies and the address of the hub are huggingface_hub's own settings.

    Owner: any thread.
    """

    def __init__(self, download: SnapshotDownload | None = None, revision: str = "") -> None:
        """Remember what to fetch.

        Args:
            download: None takes ``huggingface_hub.snapshot_download``, imported when first needed.
            revision: branch, tag or commit of every repository; "" takes their default branch.
        """
        self._given_download = download
        self._revision = revision

    def look(self, adapter_id: str) -> RemoteState:
        """Resolve the revision and ask for its files; see ``AdapterOrigin``."""
        if adapter_id.count("/") != 1:
            raise RemoteUnusableError(AdapterNotFoundError(adapter_id), stamp="")
        from huggingface_hub import errors

        try:
            listed = self._download(
                adapter_id,
                revision=self._revision or None,
                allow_patterns=[*FILE_NAMES, PICKLE_NAME],
                dry_run=True,
            )
        except (
            errors.DryRunError,
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ) as error:
            if isinstance(error, errors.DryRunError) and not isinstance(
                error.__cause__, errors.RepositoryNotFoundError
            ):
                raise
            raise RemoteUnusableError(AdapterNotFoundError(adapter_id), stamp="") from error
        return _state_of(adapter_id, listed)

    def fetch(
        self, adapter_id: str, state: RemoteState, folder: Path, check_open: Callable[[], None]
    ) -> None:
        """Fetch exactly the files of one commit; see ``AdapterOrigin``."""
        check_open()
        self._download(
            adapter_id,
            revision=state.revision,
            allow_patterns=[file.name for file in state.files],
            local_dir=folder,
        )
        for file in state.files:
            path = folder / file.name
            if not path.is_file() or path.stat().st_size != file.num_bytes:
                raise RemoteChangedError(file.name)

    def list_ids(self, check_open: Callable[[], None]) -> Iterator[str]:  # noqa: ARG002
        """Yield nothing: the hub has adapters of all models there are."""
        return iter(())

    @property
    def _download(self) -> SnapshotDownload:
        if self._given_download is not None:
            return self._given_download
        from huggingface_hub import snapshot_download

        return snapshot_download


def _state_of(adapter_id: str, listed: Any) -> RemoteState:
    """Make a state of what a dry run tells.

    Raises:
        RemoteUnusableError: the repository holds no adapter in a form that is read.
    """
    if any(info.file_size is None for info in listed):
        raise OriginError("the hub does not tell how large files are")
    files = {
        info.filename: RemoteFile(info.filename, info.file_size, str(info.commit_hash))
        for info in listed
    }
    commits = {file.stamp for file in files.values()}
    stamp = " ".join(sorted(commits))
    if PICKLE_NAME in files and WEIGHTS_NAME not in files:
        raise RemoteUnusableError(AdapterIncompatibleError(adapter_id, _PICKLE_REASON), stamp)
    if not {CONFIG_NAME, WEIGHTS_NAME} <= files.keys():
        raise RemoteUnusableError(AdapterNotFoundError(adapter_id), stamp)
    if len(commits) != 1:
        raise OriginError("the hub tells of two commits at once")
    return RemoteState(tuple(files[name] for name in FILE_NAMES if name in files), stamp)
