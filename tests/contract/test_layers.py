"""What an import drags in, seen in a fresh interpreter: static rules cannot see all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

TORCH_FREE = (
    "deployments.app",
    "deployments.ingress",
    "deployments.model_replica",
    "cluster.launch",
    "models.config",
    "models.errors",
    "models.requests",
    "models.adapters.meter",
    "models.adapters.remote_source",
    "models.kv_cache.ledger",
    "models.scheduling.scheduler",
    "models.text.template_worker",
    "sampling.errors",
    "sampling.params",
)


def import_and_list(module):
    """The modules that are loaded once a module has been imported."""
    script = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_light_parts_load_no_torch(module):
    loaded = import_and_list(module)

    assert module in loaded
    assert not loaded & {"torch", "transformers", "peft"}


@pytest.mark.parametrize("module", ["models.engine.engine", "sampling.params"])
def test_the_engine_knows_no_ray_and_no_http(module):
    loaded = import_and_list(module)

    assert not loaded & {"ray", "starlette", "fastapi", "pydantic"}
