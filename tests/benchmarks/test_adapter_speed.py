"""``make bench-adapters``: measures, prints one table, asserts nothing about speed."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.adapter_report import make_adapter_page, run_adapter_bench
from tests.benchmarks.adapter_workload import FULL, QUICK
from tests.conftest import CACHE_FOLDER

_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-adapters.md"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@pytest.mark.bench
def test_the_table_of_speeds_with_adapters_is_printed(request: pytest.FixtureRequest) -> None:
    options = request.config.getoption
    if not options("--bench-adapters", default=False):
        pytest.skip("has a target of its own: make bench-adapters")
    is_quick = options("--bench-quick", default=False)
    is_saved = options("--bench-save", default=False)
    assert not (is_quick and is_saved), "these figures are not worth keeping"

    report = run_adapter_bench(CACHE_FOLDER, _say, QUICK if is_quick else FULL)

    print(f"\n{report}\n")
    if is_saved:
        _PAGE.parent.mkdir(exist_ok=True)
        _PAGE.write_text(make_adapter_page(report))
