"""How times are told, and which headers there are."""

import pytest

from deployments.api_keys import ApiKey
from deployments.budget_shares import Standing
from deployments.rate_limit_headers import format_duration, make_rate_limit_headers
from deployments.spending import Unit


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0s"),
        (0.0121, "13ms"),
        (0.9995, "1000ms"),
        (1.0, "1s"),
        (59.2, "1m0s"),
        (61.5, "1m2s"),
        (360.0, "6m0s"),
    ],
)
def test_a_duration_is_told_as_openai_does(duration_s, text):
    assert format_duration(duration_s) == text


def test_limits_of_requests_and_tokens_are_told_and_those_of_running_ones_are_not():
    def standing(key, unit):
        assert key is alice
        if unit is Unit.RUNNING:
            raise AssertionError("is not asked for")
        return Standing(limit=10, remaining=7, next_s=1.2, reset_s=30.0)

    alice = ApiKey(name="alice", digest=b"", requests_per_minute=10)
    headers = dict(make_rate_limit_headers(alice, standing, lambda: 1_000.5))

    assert headers == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "10",
        "x-ratelimit-remaining-tokens": "7",
        "x-ratelimit-reset-tokens": "30s",
        "ratelimit-limit": "10",
        "ratelimit-remaining": "7",
        "ratelimit-reset": "1002",
    }
