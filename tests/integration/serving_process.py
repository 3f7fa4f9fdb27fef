"""A service in a process of its own, for environments that must be set before Ray is imported.

Arguments: where to save the tiny model. Prints the address; then answers each line that it reads
with the state of the engine, and ends with its input.
"""

import json
import sys
from pathlib import Path

from tests.integration.conftest import run_service
from tests.integration.tiny_service_model import TINY_ID, save_tiny_model


def main() -> None:
    """Serve the tiny model until standard input ends."""
    folder = Path(sys.argv[1])
    save_tiny_model(folder)
    arguments = {
        "model": str(folder),
        "model_id": TINY_ID,
        "dtype": "float32",
        "kv_budget_bytes": 16 << 20,
        "num_threads": 1,
        "shutdown_grace_s": 1.0,
    }
    with run_service(arguments) as service:
        _say("url", service.url)
        for _ in sys.stdin:
            _say("stats", json.dumps(service.stats(TINY_ID)))


def _say(mark: str, text: str) -> None:
    sys.stdout.write(f"{mark}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
