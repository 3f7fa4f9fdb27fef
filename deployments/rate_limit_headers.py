"""What answers tell of their caller's budgets: OpenAI's headers and DigitalOcean's."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

from deployments.api_keys import ApiKey
from deployments.budget_shares import Standing
from deployments.spending import Unit

_SECONDS_PER_MINUTE = 60


def _now_s() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


def make_rate_limit_headers(
    key: ApiKey,
    standing: Callable[[ApiKey, Unit], Standing | None],
    now_s: Callable[[], float] = _now_s,
) -> list[tuple[str, str]]:
    """Return the headers of the units that a key has a limit of.

    ``x-ratelimit-reset-*`` is the time until all of the budget is back, as "1m2s";
    ``ratelimit-reset`` the Unix time at which the first of what was spent comes back.

    Args:
        key: the caller's.
        standing: how its budgets stand.
        now_s: Unix time in seconds.
    """
    headers = []
    for unit in (Unit.REQUESTS, Unit.TOKENS):
        stands = standing(key, unit)
        if stands is None:
            continue
        headers += [
            (f"x-ratelimit-limit-{unit}", str(stands.limit)),
            (f"x-ratelimit-remaining-{unit}", str(stands.remaining)),
            (f"x-ratelimit-reset-{unit}", format_duration(stands.reset_s)),
        ]
        if unit is Unit.REQUESTS:
            headers += [
                ("ratelimit-limit", str(stands.limit)),
                ("ratelimit-remaining", str(stands.remaining)),
                ("ratelimit-reset", str(math.ceil(now_s() + stands.next_s))),
            ]
    return headers


def format_duration(duration_s: float) -> str:
    """Return a time as OpenAI writes it: "12ms", "3s", "1m2s"."""
    if 0 < duration_s < 1:
        return f"{math.ceil(duration_s * 1000)}ms"
    minutes, seconds = divmod(math.ceil(duration_s), _SECONDS_PER_MINUTE)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
