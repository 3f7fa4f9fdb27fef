"""API keys: what is kept of each, what it allows, and how one is found. Reads no files."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from deployments.spending import Unit

_SCHEME = "bearer"
_ANYTHING = ("*",)
# Compared with where no key has the digest that was asked for, so that there always is one
# comparison. No text is known to have it.
_NO_DIGEST = bytes(hashlib.sha256().digest_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Which models and adapters somebody may name.

    A pattern is a whole name, or the beginning of names and a ``*`` ("team/*", "*").

    Attributes:
        models: patterns of base models.
        adapters: patterns of adapters, which an adapter's base model must be allowed for besides.
    """

    models: tuple[str, ...] = _ANYTHING
    adapters: tuple[str, ...] = _ANYTHING

    def allows_model(self, model_id: str) -> bool:
        """Whether a base model may be named."""
        return _matches(self.models, model_id)

    def allows_adapter(self, adapter_id: str) -> bool:
        """Whether an adapter may be named, on a base model that may be."""
        return _matches(self.adapters, adapter_id)


# What a caller may who is in no need of a key.
EVERYTHING = Grants()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One record of the keys file.

    Attributes:
        name: whose it is; appears in logs, and budgets are counted by it.
        digest: SHA-256 of the key.
        grants: what it allows.
        tokens_per_minute: of prompts and answers; 0 sets no limit.
        requests_per_minute: 0 sets no limit.
        max_running_requests: at the same time; 0 sets no limit.
    """

    name: str
    digest: bytes = dataclasses.field(repr=False)
    grants: Grants = EVERYTHING
    tokens_per_minute: int = 0
    requests_per_minute: int = 0
    max_running_requests: int = 0

    @property
    def limits(self) -> Mapping[Unit, int]:
        """What is limited, and to how much."""
        limits = {
            Unit.TOKENS: self.tokens_per_minute,
            Unit.REQUESTS: self.requests_per_minute,
            Unit.RUNNING: self.max_running_requests,
        }
        return {unit: limit for unit, limit in limits.items() if limit}


class KeyRing:
    """All keys of one reading of the file. Immutable."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        """Hold these keys; their digests differ."""
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    @property
    def has_limits(self) -> bool:
        """Whether any key has a budget."""
        return any(key.limits for key in self._keys.values())

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key of a header ``Authorization: Bearer <key>``; None if there is none.

        The time it takes tells nothing of any key: only digests are looked up and compared, and
        nobody can choose how a digest begins without knowing the key.

        Args:
            authorization: the header's value, if there is one.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hash_key(secret.strip())
        key = self._keys.get(digest)
        is_equal = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        return key if is_equal and scheme.lower() == _SCHEME else None


def hash_key(secret: str) -> bytes:
    """Return what is kept of a key. Its entropy makes a slow hash needless."""
    return hashlib.sha256(secret.encode()).digest()


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )
