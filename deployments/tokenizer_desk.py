"""TokenizerDesk: a replica's tokenizers for whoever wants no generation. Loads none itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from deployments.calls import to_prompt
from deployments.tokenizer_calls import DetokenizeCall, TokenizeCall, TokensRecord
from models.errors import QueueFullError
from models.requests import TokenPrompt
from models.text_front import TextFront

# Calls that wait or run at the same time, each with a body of a few megabytes at most.
MAX_NUM_CALLS = 32

_Result = TypeVar("_Result")


class OwnText(Protocol):
    """What is used of an adapter's weights."""

    @property
    def text(self) -> TextFront | None:
        """What the adapter brought to write and read text with; None if nothing."""
        ...


class TextLease(Protocol):
    """What is used of a lease of an adapter."""

    @property
    def weights(self) -> OwnText:
        """The adapter's weights."""
        ...

    def release(self) -> None:
        """Give the lease back."""
        ...


class LeasingDesk(Protocol):
    """What is used of ``models.engine.adapter_desk.AdapterDesk``."""

    async def lease(self, adapter_id: str) -> TextLease:
        """Return a lease of an adapter once it is in memory."""
        ...


class TokenizerDesk:
    """Encodes and decodes off the event loop, by the model's tokenizer or an adapter's own.

    The base model's tokenizer and the adapters' own have a thread each, apart from those of
    generations: however much is asked here, those find theirs free.

    Owner: the replica's event loop.
    """

    def __init__(self, text: TextFront, adapters: LeasingDesk) -> None:
        """Start no thread yet.

        Args:
            text: of the base model.
            adapters: has those that bring a tokenizer of their own.
        """
        self._text = text
        self._adapters = adapters
        self._num_calls = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="medley-text")
        # What an adapter brings may take long, and holds up nobody but adapters.
        self._own_thread = ThreadPoolExecutor(1, thread_name_prefix="medley-text-own")

    async def tokenize(self, call: TokenizeCall) -> TokensRecord:
        """Return the token ids of a prompt.

        Raises:
            ChatTemplateError: the template refused the messages, or there is none.
            InvalidRequestError: the prompt has no token, or is not valid Unicode.
            QueueFullError: too many calls wait.
            ModelServiceError: the adapter cannot be had; see ``AdapterDesk.lease``.
        """
        prompt = to_prompt(call["prompt"])

        def encode(text: TextFront) -> TokensRecord:
            token_ids = text.encode(prompt)
            texts = None
            if call["has_texts"]:
                texts = [text.token_text(token_id)[0] for token_id in token_ids]
            return {"token_ids": list(token_ids), "texts": texts}

        return await self._run(call["adapter_id"], encode)

    async def detokenize(self, call: DetokenizeCall) -> str:
        """Return the text of token ids, special tokens spelled out.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary; ``param`` is "prompt".
            QueueFullError: too many calls wait.
            ModelServiceError: the adapter cannot be had; see ``AdapterDesk.lease``.
        """
        token_ids = tuple(call["token_ids"])

        def decode(text: TextFront) -> str:
            if not token_ids:
                return ""
            text.encode(TokenPrompt(token_ids=token_ids))
            detokenizer = text.detokenizer(is_special_token_skipped=False)
            return detokenizer.feed(token_ids) + detokenizer.flush()

        return await self._run(call["adapter_id"], decode)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._own_thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, adapter_id: str | None, work: Callable[[TextFront], _Result]) -> _Result:
        if self._num_calls >= MAX_NUM_CALLS:
            raise QueueFullError(self._num_calls, MAX_NUM_CALLS)
        self._num_calls += 1
        try:
            async with self._own_text(adapter_id) as own:
                thread = self._thread if own is None else self._own_thread
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(thread, work, own or self._text)
        finally:
            self._num_calls -= 1

    @contextlib.asynccontextmanager
    async def _own_text(self, adapter_id: str | None) -> AsyncIterator[TextFront | None]:
        """Hold an adapter's own text; None where the base model's is meant."""
        if adapter_id is None:
            yield None
            return
        lease = await self._adapters.lease(adapter_id)
        try:
            yield lease.weights.text
        finally:
            lease.release()
