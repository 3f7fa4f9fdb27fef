"""One Ray cluster for all tests that need the service: starting one takes longer than they do."""

import contextlib
import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CACHE_FOLDER
from tests.integration.tiny_service_model import TINY_ID, save_tiny_model

APPLICATION = "medley"
BUNDLED_ID = "smollm2-135m-instruct"
ADMIN_KEY = "integration-tests"


@dataclasses.dataclass(frozen=True)
class Service:
    """A running service with the bundled model and a tiny one, and where the tiny one lies."""

    url: str
    handle: Any
    ray_address: str
    model_folder: Path | None = None
    adapter_folder: Path | None = None

    def stats(self, model_id: str) -> dict[str, Any]:
        """Return the state of a model's one engine."""
        from ray import serve

        from deployments.app import make_deployment_name

        handle = serve.get_deployment_handle(make_deployment_name(model_id), APPLICATION)
        return handle.stats.remote().result(timeout_s=30)


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """The service over real HTTP on a free port of this machine; no adapter is there yet."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    adapter_folder = tmp_path_factory.mktemp("adapters")
    arguments = {
        "cache_folder": str(CACHE_FOLDER),
        "shutdown_grace_s": 2.0,
        "max_body_bytes": 100_000,
        "admin_key": ADMIN_KEY,
        "models": [
            {"kv_budget_bytes": 128 << 20},
            {
                "model": str(folder),
                "model_id": TINY_ID,
                "dtype": "float32",
                "adapters": str(adapter_folder),
                "kv_budget_bytes": 16 << 20,
                "max_num_seqs": 8,
                "max_num_waiting": 8,
                "num_threads": 1,
                "logits_processors": ["tests.integration.faulty_processor:FaultyProcessor"],
            },
        ],
    }
    with run_service(arguments) as running:
        yield dataclasses.replace(running, model_folder=folder, adapter_folder=adapter_folder)


@contextlib.contextmanager
def run_service(arguments):
    """Run a service on a Ray cluster of its own; both are gone behind the context."""
    import ray
    from ray import serve

    from deployments.app import build_app
    from deployments.config import ServiceConfig

    port = find_free_port()
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 << 20,
    )
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"enable_access_log": False},
        )
        app = build_app(ServiceConfig.model_validate(arguments))
        handle = serve.run(app, name=APPLICATION, route_prefix="/")
        yield Service(f"http://127.0.0.1:{port}", handle, context.address_info["gcs_address"])
        serve.shutdown()
    finally:
        ray.shutdown()


def find_free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
