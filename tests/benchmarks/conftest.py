"""Options of ``make bench``, ``bench-sampling``, ``bench-adapters`` and ``bench-gpu``."""

import pytest

PARTS = ("engine", "http", "start")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption(
        "--bench-parts", default=",".join(PARTS), help=f"what to measure, of {', '.join(PARTS)}"
    )
    group.addoption("--bench-save", action="store_true", help="also write the page in docs/")
    group.addoption("--bench-sampling", action="store_true", help="measure sampling by itself")
    group.addoption("--bench-adapters", action="store_true", help="measure what adapters cost")
    group.addoption("--bench-gpu", action="store_true", help="measure attention on a GPU")
    group.addoption("--bench-contract", action="store_true", help="measure the HTTP contract")
    group.addoption("--bench-quick", action="store_true", help="little work: figures mean nothing")
