"""What crosses a handle from Ingress to ModelReplica for /tokenize and /detokenize, and back.

Plain dicts, as in ``deployments.calls`` and ``deployments.records``.
"""

from __future__ import annotations

from typing import TypedDict

from deployments.calls import ChatPromptRecord, TextPromptRecord


class TokenizeCall(TypedDict):
    """A prompt to make tokens of.

    ``adapter_id`` None is the base model's tokenizer. With ``has_texts`` the answer spells them.
    """

    prompt: ChatPromptRecord | TextPromptRecord
    adapter_id: str | None
    has_texts: bool


class DetokenizeCall(TypedDict):
    """Token ids to make text of; ``adapter_id`` as in TokenizeCall."""

    token_ids: list[int]
    adapter_id: str | None


class TokensRecord(TypedDict):
    """Token ids of a prompt, and the text of each of them if that was asked for, else None."""

    token_ids: list[int]
    texts: list[str] | None
