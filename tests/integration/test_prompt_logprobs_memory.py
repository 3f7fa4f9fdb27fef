"""How much memory log probabilities of a long prompt take: measured, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.prompt_logprobs_peak import NUM_PROMPT_TOKENS, VOCABULARY_SIZE

pytestmark = pytest.mark.integration

_TIMEOUT_S = 300


def test_a_long_prompt_never_has_its_logits_all_at_once():
    run = subprocess.run(
        [sys.executable, "-m", "tests.integration.prompt_logprobs_peak"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    growth_bytes = int(run.stdout.split()[-1])
    all_logits_bytes = 4 * NUM_PROMPT_TOKENS * VOCABULARY_SIZE
    # The step's logits are 6 MB; the rest is the answer: 18,000 pairs of Python numbers.
    assert growth_bytes < all_logits_bytes / 15
