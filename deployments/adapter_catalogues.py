"""Which adapters the base models have, as their replicas say. Keeps answers for a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from models.errors import EngineDeadError

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")

MAX_AGE_S = 1.0
_ANSWER_TIMEOUT_S = 2.0


class ListHandle(Protocol):
    """A model's handle with ``method_name="list_adapters"``."""

    def remote(self) -> Awaitable[Sequence[str]]:
        """Ask one replica for the ids of its adapters."""
        ...


class AdapterCatalogues:
    """The adapter ids of each base model.

    Every replica of a model reads the same folder, so any of them is asked. A model that does not
    answer keeps what it said last.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self, handles: Mapping[str, ListHandle], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask nobody yet.

        Args:
            handles: model id -> its handle.
            clock: seconds, monotonic.
        """
        self._catalogues = {
            model_id: _Catalogue(model_id, handle, clock) for model_id, handle in handles.items()
        }

    async def read(self) -> Mapping[str, Sequence[str]]:
        """Return model id -> its adapter ids, at most MAX_AGE_S old unless it does not answer."""
        await _refresh(c for c in self._catalogues.values() if c.is_old)
        return {model_id: catalogue.ids for model_id, catalogue in self._catalogues.items()}

    async def find_models(self, adapter_id: str) -> tuple[str, ...]:
        """Return the base models that have an adapter.

        If none is known to, each of them is asked once more.

        Raises:
            EngineDeadError: none is known to, and one of them does not answer.
        """
        asked = [catalogue for catalogue in self._catalogues.values() if catalogue.is_old]
        await _refresh(asked)
        if found := self._find(adapter_id):
            return found
        await _refresh(c for c in self._catalogues.values() if c not in asked)
        found = self._find(adapter_id)
        silent = [name for name, c in self._catalogues.items() if not c.is_answered]
        if silent and not found:
            raise EngineDeadError(f"no replica tells the adapters of {', '.join(silent)}")
        return found

    def _find(self, adapter_id: str) -> tuple[str, ...]:
        return tuple(name for name, c in self._catalogues.items() if c.has(adapter_id))


async def _refresh(catalogues: Iterable[_Catalogue]) -> None:
    await asyncio.gather(*(catalogue.refresh() for catalogue in catalogues))


class _Catalogue:
    """One model's adapter ids; however many ask at the same time, the model is asked once."""

    def __init__(self, model_id: str, handle: ListHandle, clock: Callable[[], float]) -> None:
        self.ids: Sequence[str] = ()
        self.is_answered = True
        self._model_id = model_id
        self._handle = handle
        self._clock = clock
        self._members: frozenset[str] = frozenset()
        self._read_at_s: float | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_old(self) -> bool:
        return self._read_at_s is None or self._clock() - self._read_at_s > MAX_AGE_S

    def has(self, adapter_id: str) -> bool:
        return adapter_id in self._members

    async def refresh(self) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        # One caller that leaves does not end it for the others.
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                ids = await self._handle.remote()
            self.ids = tuple(ids)
            self._members = frozenset(self.ids)
            self.is_answered = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the model did not answer
            self.is_answered = False
            _logger.warning(
                "model %s does not list its adapters: %s", self._model_id, type(error).__name__
            )
        finally:
            self._read_at_s = self._clock()
            self._reading = None
