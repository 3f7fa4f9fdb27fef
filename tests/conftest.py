"""Fixtures shared by all tests."""

import logging
import os
from pathlib import Path

import hypothesis
import pytest

# Machines are shared: how long an example takes says nothing.
hypothesis.settings.register_profile(
    "medley", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("medley")
# Tests never reach for a model hub. Set before anything imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Compute threads that wait sleep instead of spinning: on busy cores a step is ten times faster.
# Read by OpenMP when torch is loaded; tests that start processes hand it down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Where `make serve` keeps it too, so that the model is converted once per checkout.
CACHE_FOLDER = Path(__file__).parent.parent / ".cache" / "medley"


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def bundled_model_path():
    """Folder of the bundled model, converted to safetensors at first use."""
    from models.loading.bundled import ensure_bundled_model

    return ensure_bundled_model(CACHE_FOLDER, logging.getLogger(__name__).info)
