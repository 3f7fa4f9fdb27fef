"""What an engine needs of whatever turns prompts into tokens and tokens into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from models.requests import Prompt


class Detokenizer(Protocol):
    """What a choice needs of ``models.text.detokenizer.IncrementalDetokenizer``."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


class TextFront(Protocol):
    """What an engine needs of ``models.text.tokenizer.Text``."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        ...

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        ...

    def detokenizer(
        self, *, is_special_token_skipped: bool = True, context_token_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a detokenizer for text that follows the context."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token's own text and its bytes."""
        ...
