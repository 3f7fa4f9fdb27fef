"""Patterns mean what Python's engine says, and cannot take longer than they may."""

import re
import time

import pytest

from models.adapters.faults import AdapterFaultError
from models.adapters.patterns import PatternMatcher


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|v)_proj",
        r"^(?!.*vision).*layers\.\d{1,2}\..*(q_proj|fc[12])$",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|v_proj).*?)|model\.layers\.0\.x",
        "",
        "q_proj",
        r"(?i)MODEL\.layers\.[0-9]+\.self_attn\.q_proj",
    ],
)
@pytest.mark.parametrize(
    "name",
    ["model.layers.10.self_attn.q_proj", "text.mlp.k_proj.x", "q_proj", "", "model.layers.0.x"],
)
def test_matches_are_those_of_python(pattern, name):
    matcher = PatternMatcher()

    assert bool(matcher.fullmatch(pattern, name)) == bool(re.fullmatch(pattern, name))
    assert bool(matcher.match(pattern, name)) == bool(re.match(pattern, name))


def test_a_pattern_that_would_never_end_is_refused_in_time():
    start_s = time.monotonic()

    with pytest.raises(AdapterFaultError, match="take too long"):
        PatternMatcher(budget_s=0.1).fullmatch("((a+)+|(a|aa)+)$", "a" * 60 + "b")

    assert time.monotonic() - start_s < 30


def test_all_patterns_share_one_budget():
    now_s = 0.0
    matcher = PatternMatcher(budget_s=1.0, clock=lambda: now_s)
    matcher.fullmatch("a", "a")

    now_s = 1.5
    with pytest.raises(AdapterFaultError, match="the last was 'b'"):
        matcher.fullmatch("b", "b")


@pytest.mark.parametrize("pattern", ["(", "*", "a{2,1}", "(?P<x>a)(?P<x>b)", "(" * 5000, "\\"])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(AdapterFaultError, match="is no regular expression"):
        PatternMatcher().fullmatch(pattern, "a")


def test_a_pattern_only_the_other_engine_knows_is_refused():
    with pytest.raises(AdapterFaultError, match="is no regular expression"):
        PatternMatcher().fullmatch(r"(?|a|b)", "a")


def test_a_pattern_of_absurd_length_is_refused_unread():
    with pytest.raises(AdapterFaultError, match="20000 characters"):
        PatternMatcher().fullmatch("a" * 20_000, "a")
