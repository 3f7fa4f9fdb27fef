"""``make bench-sampling``: measures, prints one table, asserts nothing about speed."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.sampling_report import ROW_COUNTS, make_sampling_page, run_sampling_bench
from tests.conftest import CACHE_FOLDER

_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-sampling.md"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@pytest.mark.bench
def test_the_table_of_sampling_speeds_is_printed(request: pytest.FixtureRequest) -> None:
    options = request.config.getoption
    if not options("--bench-sampling", default=False):
        pytest.skip("has a target of its own: make bench-sampling")
    is_quick = options("--bench-quick", default=False)
    is_saved = options("--bench-save", default=False)
    assert not (is_quick and is_saved), "these figures are not worth keeping"

    report = run_sampling_bench(CACHE_FOLDER, _say, ROW_COUNTS[:2] if is_quick else ROW_COUNTS)

    print(f"\n{report}\n")
    if is_saved:
        _PAGE.parent.mkdir(exist_ok=True)
        _PAGE.write_text(make_sampling_page(report))
