"""Which web pages may call the API from a browser: none, unless the configuration names them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

_MAX_AGE_S = 600
# What a page may read beside the body.
_ANSWER_HEADERS = (
    "openai-processing-ms",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "retry-after",
    "x-medley-adapter-version",
    "x-medley-ignored-fields",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
    "x-should-retry",
)


def make_cors_layers(origins: Sequence[str]) -> list[Middleware]:
    """Return the outermost layers of the application: none without origins.

    No page may send cookies: keys travel in a header.

    Args:
        origins: such as "https://chat.example.org"; "*" is every page.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            # Clients add some of their own ("x-stainless-..."), which change with their versions.
            allow_headers=["*"],
            expose_headers=list(_ANSWER_HEADERS),
            max_age=_MAX_AGE_S,
        )
    ]
