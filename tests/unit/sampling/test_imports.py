import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["sampling", "sampling.params", "sampling.errors", "sampling.rng", "sampling.stopping"],
)
def test_a_module_that_an_ingress_may_need_imports_no_torch(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
