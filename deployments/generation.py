"""One request's calls to a model's replicas: opened together, admitted, merged, cancelled.

Knows no HTTP and no answer format.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from deployments.calls import GenerationCall
from deployments.ray_errors import unwrap_ray_error
from deployments.records import AdmissionRecord, Message
from models.errors import EngineDeadError


class ReplicaStream(Protocol):
    """The messages of one call, as a streaming handle gives them."""

    async def __anext__(self) -> Message:
        """Return the next message; StopAsyncIteration after the last."""
        ...

    def cancel(self) -> None:
        """End the call on both sides; who waits for a message gets an error. Idempotent."""
        ...


class GenerateHandle(Protocol):
    """A model's handle with ``stream=True`` and ``method_name="generate"``."""

    def remote(self, call: GenerationCall) -> ReplicaStream:
        """Call one replica."""
        ...


class OpenGeneration(Protocol):
    """What answers are built from; see ``Generation``."""

    async def admit(self) -> list[AdmissionRecord]:
        """Open the streams and wait until every prompt is admitted."""
        ...

    def messages(self) -> AsyncGenerator[tuple[int, Message], None]:
        """Yield (prompt index, message) as they come."""
        ...


class Observer(Protocol):
    """Somebody who looks on as a generation goes by, and changes nothing."""

    def note_admissions(self, admissions: Sequence[AdmissionRecord]) -> None:
        """Take note of the admissions."""
        ...

    def note_message(self, prompt_index: int, message: Message) -> None:
        """Take note of a message of one prompt."""
        ...


class ObservedGeneration:
    """A generation that is passed on, and noted on its way. Owner: the request's task."""

    def __init__(self, generation: OpenGeneration, observers: Sequence[Observer]) -> None:
        """Note nothing yet.

        Args:
            generation: to pass on.
            observers: told in this order.
        """
        self._generation = generation
        self._observers = observers

    async def admit(self) -> list[AdmissionRecord]:
        """Pass on the admissions; raises as ``Generation.admit`` does."""
        admissions = await self._generation.admit()
        for observer in self._observers:
            observer.note_admissions(admissions)
        return admissions

    async def messages(self) -> AsyncGenerator[tuple[int, Message], None]:
        """Pass on the messages; raises as ``Generation.messages`` does."""
        async with contextlib.aclosing(self._generation.messages()) as messages:
            async for prompt_index, message in messages:
                for observer in self._observers:
                    observer.note_message(prompt_index, message)
                yield prompt_index, message


class Generation:
    """The streams of one request, one per prompt.

    Lifetime: ``admit`` once, then ``messages`` once; ``cancel`` always, in a ``finally``: dropping
    a stream of Ray's cancels nothing.

    Owner: the event loop that made it.
    """

    def __init__(self, handle: GenerateHandle, calls: Sequence[GenerationCall]) -> None:
        """Call nobody yet.

        Args:
            handle: the model's.
            calls: one per prompt, at least one.
        """
        self._handle = handle
        self._calls = calls
        self._streams: list[ReplicaStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._end: Exception | None = None

    async def admit(self) -> list[AdmissionRecord]:
        """Open the streams and wait until every prompt is admitted; return their records.

        Raises:
            ModelServiceError, SamplingError: one of them was refused.
        """
        for call in self._calls:
            self._streams.append(self._handle.remote(call))
        firsts = await asyncio.gather(*(self._next(stream) for stream in self._streams))
        admissions = []
        for first in firsts:
            if first is None or first[0]["kind"] != "admission":
                raise EngineDeadError("a stream began without an admission")
            admissions.append(first[0])
        return admissions

    async def messages(self) -> AsyncGenerator[tuple[int, Message], None]:
        """Yield (prompt index, message) as they come, until every stream has ended.

        Raises:
            ModelServiceError, SamplingError: whatever ended one of the streams early.
        """
        if len(self._streams) == 1:
            stream = self._streams[0]
            while (message := await self._next(stream)) is not None:
                yield 0, message
            return
        # The engine bounds what can gather here: max_tokens of each choice.
        queue: asyncio.Queue[tuple[int, Message | Exception | None]] = asyncio.Queue()
        self._pumps = [
            asyncio.create_task(self._pump(index, stream, queue))
            for index, stream in enumerate(self._streams)
        ]
        num_open = len(self._streams)
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item

    def end(self, error: Exception) -> None:
        """Cancel the streams; who waits for a message gets ``error``."""
        self._end = self._end or error
        for stream in self._streams:
            stream.cancel()

    def cancel(self) -> None:
        """Cancel the streams. Idempotent; costs nothing on a stream that is complete."""
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.cancel()

    async def _next(self, stream: ReplicaStream) -> Message | None:
        if self._end is not None:
            raise self._end
        try:
            return await stream.__anext__()
        except StopAsyncIteration:
            return None
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            raise self._end or unwrap_ray_error(error) from None

    async def _pump(
        self,
        index: int,
        stream: ReplicaStream,
        queue: asyncio.Queue[tuple[int, Message | Exception | None]],
    ) -> None:
        try:
            while (message := await self._next(stream)) is not None:
                queue.put_nowait((index, message))
        except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
            queue.put_nowait((index, error))
            return
        queue.put_nowait((index, None))
