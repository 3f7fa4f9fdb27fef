"""``make bench-contract``: measures, prints one table, asserts nothing about speed."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.contract_speed import make_contract_page, run_contract_bench

_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-contract.md"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@pytest.mark.bench
def test_the_table_of_what_the_contract_costs_is_printed(request: pytest.FixtureRequest) -> None:
    options = request.config.getoption
    if not options("--bench-contract", default=False):
        pytest.skip("has a target of its own: make bench-contract")

    report = run_contract_bench(_say)

    print(f"\n{report}\n")
    if options("--bench-save", default=False):
        _PAGE.parent.mkdir(exist_ok=True)
        _PAGE.write_text(make_contract_page(report))
