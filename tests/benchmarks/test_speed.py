"""``make bench``: measures, prints one table, asserts nothing about speed."""

import sys
from pathlib import Path

import pytest

from models.config import EngineConfig
from tests.benchmarks.conftest import PARTS
from tests.benchmarks.measurements import Bench
from tests.benchmarks.report import make_page, make_report
from tests.benchmarks.workload import FULL, QUICK
from tests.conftest import CACHE_FOLDER

_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@pytest.mark.bench
def test_the_table_of_speeds_is_printed(request: pytest.FixtureRequest) -> None:
    # Without a path on the command line pytest finds these options too late to know them.
    options = request.config.getoption
    is_quick = options("--bench-quick", default=False)
    is_saved = options("--bench-save", default=False)
    parts = options("--bench-parts", default=",".join(PARTS)).split(",")
    sizes = QUICK if is_quick else FULL
    assert set(parts) <= set(PARTS), f"parts are {', '.join(PARTS)}"
    assert not (is_quick and is_saved), "these figures are not worth keeping"

    found = Bench(sizes, EngineConfig(), CACHE_FOLDER, _say).run(parts)

    report = make_report(found, sizes)
    print(f"\n{report}\n")
    if is_saved:
        _PAGE.parent.mkdir(exist_ok=True)
        _PAGE.write_text(make_page(report))
