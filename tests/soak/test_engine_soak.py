"""Hundreds of mixed requests on the real model, in this engine alone."""

import pytest

from tests.soak.engine_run import SoakOrder, run_engine_soak

pytestmark = pytest.mark.soak

LIMIT_S = 3600


@pytest.fixture(scope="module")
def rests(bundled_model_path):
    order = SoakOrder(
        model_path=str(bundled_model_path),
        num_spells=8,
        num_requests_per_spell=100,
        num_clients=16,
    )
    return run_engine_soak(order, timeout_s=LIMIT_S)
