"""``make bench-gpu``: measures, prints one table, asserts nothing about speed."""

import sys

import pytest
import torch

from tests.benchmarks.gpu_speed import FULL, QUICK, run_gpu_bench
from tests.conftest import CACHE_FOLDER


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@pytest.mark.bench
def test_the_table_of_speeds_on_a_gpu_is_printed(request: pytest.FixtureRequest) -> None:
    options = request.config.getoption
    if not options("--bench-gpu", default=False):
        pytest.skip("has a target of its own: make bench-gpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here, or torch was built without CUDA")
    sizes = QUICK if options("--bench-quick", default=False) else FULL

    print(f"\n{run_gpu_bench(CACHE_FOLDER, _say, sizes)}\n")
