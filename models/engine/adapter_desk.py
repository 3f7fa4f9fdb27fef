"""AdapterDesk: where requests get their adapters, and operators see and steer them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from models.adapters.catalogue import AdapterCatalogue
from models.adapters.host_tier import HostState
from models.adapters.ids import check_adapter_id
from models.adapters.lease import Lease
from models.adapters.meter import AdapterMeter, AdapterTotals
from models.adapters.source_chain import ClosableSource
from models.adapters.weights import AdapterWeights
from models.engine.adapter_uses import AdapterUses
from models.errors import AdapterNotFoundError
from models.requests import AdapterRef, GenerationEvent, TokenDelta

PostCall = Callable[[Callable[[AdapterUses], None]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One version of an adapter on this engine.

    Attributes:
        adapter_id: whose.
        version: of its weights.
        tier: the fastest memory that holds it; "loading" is none yet.
        num_bytes: in host memory.
        num_hits: requests that found it loaded.
        last_used_s: seconds since a request last asked for it.
        num_in_flight: requests that wait for it or use it.
        is_pinned: it is not evicted to make room.
    """

    adapter_id: str
    version: str
    tier: Literal["device", "host", "loading"]
    num_bytes: int
    num_hits: int
    last_used_s: float
    num_in_flight: int
    is_pinned: bool


class AdapterDesk:
    """The adapters of one engine; without a source there are none, and every id is unknown.

    Owner: any event loop; ``pin``, ``unpin``, ``unload`` and ``status`` any thread. What concerns
    device slots is posted to the step thread.
    """

    def __init__(
        self,
        source: ClosableSource | None,
        catalogue: AdapterCatalogue[AdapterWeights] | None,
        clock: Callable[[], float] = time.monotonic,
        meter: AdapterMeter | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire a desk.

        Args:
            source: where adapters come from; None if there are none.
            catalogue: over ``source``; None exactly if that is.
            clock: seconds; the catalogue's.
            meter: the catalogue's; None counts for nobody.
            on_close: ends what else there is.
        """
        self._on_close = on_close
        self._meter = meter or AdapterMeter(0)
        self._source = source
        self._catalogue = catalogue
        self._clock = clock
        self._post_call: PostCall = lambda _: None
        self._resident_refs: Callable[[], tuple[AdapterRef, ...]] = tuple

    def attach(
        self, post_call: PostCall, resident_refs: Callable[[], tuple[AdapterRef, ...]]
    ) -> None:
        """Connect the desk with the engine whose adapters it keeps; once, before use.

        Args:
            post_call: has something done on the step thread.
            resident_refs: tells which adapters have a device slot.
        """
        self._post_call = post_call
        self._resident_refs = resident_refs

    async def lease(self, adapter_id: str) -> Lease[AdapterWeights]:
        """Return a lease of the current version, once it is in host memory.

        Raises:
            InvalidAdapterIdError, AdapterNotFoundError, AdapterIncompatibleError,
            AdapterLoadFailedError, AdapterSlotTimeoutError, DrainingError: see
                ``AdapterCatalogue.resolve``.
        """
        lease = await self._catalogue_of(adapter_id).resolve(adapter_id)
        self._meter.count_request(adapter_id)
        return lease

    @property
    def host_bytes(self) -> int:
        """Bytes of adapters in host memory."""
        return 0 if self._catalogue is None else self._catalogue.stats.used_bytes

    def totals(self) -> Mapping[str, AdapterTotals]:
        """Return what adapters were used for; see ``AdapterMeter.totals``."""
        return self._meter.totals()

    def count_tokens(self, adapter_id: str, events: Sequence[GenerationEvent]) -> None:
        """Take note of tokens that an answer is made of."""
        num_tokens = sum(len(event.token_ids) for event in events if isinstance(event, TokenDelta))
        if num_tokens:
            self._meter.count_tokens(adapter_id, num_tokens)

    async def list_ids(self) -> tuple[str, ...]:
        """Return the ids of the adapters that there are, sorted, up to the source's limit."""
        if self._source is None:
            return ()
        return await asyncio.to_thread(self._source.list_ids)

    async def prefetch(self, adapter_id: str) -> AdapterRef:
        """Bring the current version into host memory; raises as ``lease`` does."""
        return await self._catalogue_of(adapter_id).prefetch(adapter_id)

    def pin(self, adapter_id: str) -> None:
        """Never evict an adapter to make room, in host memory or on the device. Idempotent.

        Raises:
            InvalidAdapterIdError: the id breaks the grammar.
            AdapterNotFoundError: this engine has no adapters.
        """
        self._catalogue_of(adapter_id).pin(adapter_id)
        self._post_call(lambda adapters: adapters.pin(adapter_id))

    def unpin(self, adapter_id: str) -> None:
        """Take a pin back; raises as ``pin`` does. Idempotent."""
        self._catalogue_of(adapter_id).unpin(adapter_id)
        self._post_call(lambda adapters: adapters.unpin(adapter_id))

    def unload(self, adapter_id: str) -> None:
        """Let an adapter go, from the device too; what is in use goes with its last request.

        Raises as ``pin`` does; an adapter that is not loaded is no error.
        """
        self._catalogue_of(adapter_id).unload(adapter_id)
        self._post_call(lambda adapters: adapters.evict(adapter_id))

    def status(self) -> tuple[AdapterStatus, ...]:
        """Return what is loaded or on its way, sorted by id."""
        if self._catalogue is None:
            return ()
        residents = frozenset(self._resident_refs())
        now_s = self._clock()
        return tuple(
            AdapterStatus(
                adapter_id=facts.ref.id,
                version=facts.ref.version,
                tier=_tier(is_resident=facts.ref in residents, state=facts.state),
                num_bytes=facts.num_bytes,
                num_hits=facts.num_hits,
                last_used_s=max(0.0, now_s - facts.last_used_s),
                num_in_flight=facts.num_in_flight,
                is_pinned=facts.is_pinned,
            )
            for facts in self._catalogue.facts()
        )

    def close(self) -> None:
        """End the threads of source and catalogue; waits for loads that run. Idempotent."""
        if self._source is not None:
            self._source.close()
        if self._catalogue is not None:
            self._catalogue.close()
        self._on_close()

    def _catalogue_of(self, adapter_id: str) -> AdapterCatalogue[AdapterWeights]:
        if self._catalogue is None:
            check_adapter_id(adapter_id)
            raise AdapterNotFoundError(adapter_id)
        return self._catalogue


def _tier(*, is_resident: bool, state: HostState) -> Literal["device", "host", "loading"]:
    if is_resident:
        return "device"
    return "host" if state is HostState.READY else "loading"
