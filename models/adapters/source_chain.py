"""SourceChain: several sources of adapters, asked in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from models.adapters.source import AdapterFiles, AdapterSource
from models.errors import AdapterNotFoundError


class ClosableSource(AdapterSource, Protocol):
    """A source that has threads to end."""

    def close(self) -> None:
        """End them. Idempotent."""
        ...


class SourceChain:
    """The adapters of several sources; of two with one id, that of the earlier source counts.

    If the earlier one gets its own only later, it counts once the later one is to be looked at
    again.

    Owner: any thread, as its sources.
    """

    def __init__(self, sources: Sequence[ClosableSource]) -> None:
        """Take over sources: ``close`` closes them.

        Args:
            sources: at least one.
        """
        self._sources = tuple(sources)

    def find(self, adapter_id: str) -> AdapterFiles:
        """Return the version of the first source that has the adapter.

        Raises:
            AdapterNotFoundError: none of them has.
            ModelServiceError: whatever else the first one that does not say so raises.
        """
        for source in self._sources[:-1]:
            try:
                return source.find(adapter_id)
            except AdapterNotFoundError:
                continue
        return self._sources[-1].find(adapter_id)

    def recall(self, adapter_id: str) -> AdapterFiles | None:
        """Return what a source can tell at once, None if none can."""
        for source in self._sources:
            if (files := source.recall(adapter_id)) is not None:
                return files
        return None

    def forget(self, adapter_id: str) -> None:
        """Let every source begin anew with an adapter."""
        for source in self._sources:
            source.forget(adapter_id)

    def list_ids(self) -> tuple[str, ...]:
        """Return the ids of all sources, sorted."""
        return tuple(sorted({name for source in self._sources for name in source.list_ids()}))

    def close(self) -> None:
        """Close all sources. Idempotent."""
        for source in self._sources:
            source.close()
