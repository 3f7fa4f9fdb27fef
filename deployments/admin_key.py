"""The key of the admin routes: known by its digest, compared in constant time."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

from deployments.http_errors import InvalidKeyError

_SCHEME = "bearer"


@dataclasses.dataclass(frozen=True, slots=True)
class AdminKey:
    """What is kept of a key.

    Attributes:
        digest: SHA-256 of it.
    """

    digest: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, secret: str) -> AdminKey:
        """Return what is kept of a key."""
        return cls(hashlib.sha256(secret.encode()).digest())

    def check(self, authorization: str | None) -> None:
        """Check the header ``Authorization: Bearer <key>`` of a request.

        Args:
            authorization: its value, if there is one.

        Raises:
            InvalidKeyError: no key, or a wrong one.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        # Digests of equal length: the time tells nothing of the key.
        is_equal = hmac.compare_digest(AdminKey.of(secret.strip()).digest, self.digest)
        if scheme.lower() != _SCHEME or not is_equal:
            raise InvalidKeyError
