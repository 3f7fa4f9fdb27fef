"""What a ``tokenizer.json`` that is not trusted adds to a base vocabulary. Builds no tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

_MAX_NUM_ADDED = 4096
_MAX_TOKEN_CHARACTERS = 256
# How much larger than the base's, written out, a file with its vocabulary can be.
_MAX_SIZE_RATIO = 4
_FREE_BYTES = 4 << 20
# Sections that say how text is split and joined; the base model's are used.
_SECTIONS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")


class OwnTokenizerError(Exception):
    """Files cannot be used; its text is one sentence. Never leaves ``models.text``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token beyond the base vocabulary; the fields are those of the file."""

    id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AddedTokens:
    """What a file adds.

    Attributes:
        tokens: in the order of their ids, which follow the base's without a gap.
        warnings: what else it says and is not used.
    """

    tokens: tuple[AddedToken, ...] = ()
    warnings: tuple[str, ...] = ()


class BaseVocabulary:
    """The vocabulary of a base model, as digests. Immutable; any thread."""

    def __init__(self, encoded: str) -> None:
        """Read the base's own ``tokenizer.json``.

        Args:
            encoded: as the tokenizers library writes it; "" for a tokenizer that has none.
        """
        self._encoded_bytes = len(encoded)
        described = json.loads(encoded) if encoded else {}
        model = described.get("model") or {}
        self._vocabulary = _digest(model.get("vocab"))
        self._merges = _digest_merges(model)
        self._rest = _rest_of(described)
        self._added = {token["content"]: token["id"] for token in described.get("added_tokens", ())}
        self._size = _size_of(model, self._added)

    def compare(self, encoded: bytes) -> AddedTokens:
        """Return what an adapter's file adds.

        Raises:
            OwnTokenizerError: it describes another vocabulary, or is none.
        """
        if not self._encoded_bytes:
            return AddedTokens(warnings=("its tokenizer.json is not used: the base has none",))
        if len(encoded) > _MAX_SIZE_RATIO * self._encoded_bytes + _FREE_BYTES:
            raise OwnTokenizerError("its tokenizer.json is much larger than the base model's")
        try:
            described = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            raise OwnTokenizerError("its tokenizer.json is no JSON") from error
        model = described.get("model") if isinstance(described, dict) else None
        if not isinstance(model, dict):
            raise OwnTokenizerError("its tokenizer.json describes no tokenizer")
        if _digest(model.get("vocab")) != self._vocabulary:
            raise OwnTokenizerError("its tokenizer.json has another vocabulary than the base model")
        if _digest_merges(model) != self._merges:
            raise OwnTokenizerError("its tokenizer.json has other merges than the base model")
        rest = _rest_of(described)
        differing = [name for name, digest in rest.items() if digest != self._rest.get(name)]
        warnings = (
            (f"its tokenizer.json has another {' and '.join(differing)}; the base model's is used",)
            if differing
            else ()
        )
        return AddedTokens(self._tokens_beyond(described.get("added_tokens")), warnings)

    def _tokens_beyond(self, listed: Any) -> tuple[AddedToken, ...]:
        """Return the tokens that the base does not have.

        Raises:
            OwnTokenizerError: the base's are not among them, or the ids make no sense.
        """
        tokens = sorted(_read_added(listed), key=lambda token: token.id)
        found = {token.content: token.id for token in tokens}
        if len(found) != len(tokens) or len(set(found.values())) != len(tokens):
            raise OwnTokenizerError("its tokenizer.json adds a token or an id twice")
        for content, token_id in self._added.items():
            if found.get(content) != token_id:
                raise OwnTokenizerError(
                    f"its tokenizer.json has not the base model's added token {token_id}"
                )
        beyond = tuple(token for token in tokens if token.content not in self._added)
        if [token.id for token in beyond] != list(range(self._size, self._size + len(beyond))):
            raise OwnTokenizerError(
                f"the tokens that its tokenizer.json adds do not have the ids from {self._size} on"
            )
        return beyond


def _read_added(listed: Any) -> list[AddedToken]:
    if not isinstance(listed, list) or len(listed) > _MAX_NUM_ADDED:
        raise OwnTokenizerError(
            f"its tokenizer.json lists no added tokens, or over {_MAX_NUM_ADDED}"
        )
    tokens = []
    for entry in listed:
        values = entry if isinstance(entry, dict) else {}
        token_id, content = values.get("id"), values.get("content")
        if type(token_id) is not int or not isinstance(content, str):
            raise OwnTokenizerError("its tokenizer.json has an added token without id or content")
        if not 0 < len(content) <= _MAX_TOKEN_CHARACTERS or not content.isprintable():
            raise OwnTokenizerError(f"its added token {token_id} is empty, long or not printable")
        flags = {
            name: values.get(name) is True
            for name in ("special", "single_word", "lstrip", "rstrip", "normalized")
        }
        tokens.append(AddedToken(id=token_id, content=content, **flags))
    return tokens


def _size_of(model: Mapping[str, Any], added: Mapping[str, int]) -> int:
    """Return the first id that is free behind a vocabulary and its added tokens."""
    return max((len(model.get("vocab") or ()) - 1, *added.values()), default=-1) + 1


def _digest_merges(model: Mapping[str, Any]) -> str:
    """Digest merges, which newer files write as pairs and older ones as texts."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        return _digest(merges)
    return _digest([m.split(" ") if isinstance(m, str) else m for m in merges])


def _rest_of(described: Mapping[str, Any]) -> dict[str, str]:
    """Digest by section what says how text is split and joined."""
    model = described.get("model") or {}
    rest = {
        name: value for name, value in model.items() if name not in ("vocab", "merges") and value
    }
    return {
        **{name: _digest(described.get(name)) for name in _SECTIONS},
        "model": _digest(rest),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
