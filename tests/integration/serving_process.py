"""A service in a process of its own, for environments that must be set before Ray is imported.

Argument: the arguments of ``build_app`` as JSON. Prints the address; then answers each line that it
reads, a model's name, with the state of that model's engine, and ends with its input.
"""

import json
import sys

from tests.integration.conftest import run_service


def main() -> None:
    """Serve until standard input ends."""
    with run_service(json.loads(sys.argv[1])) as service:
        _say("url", service.url)
        for line in sys.stdin:
            _say("stats", json.dumps(service.stats(line.strip())))


def _say(mark: str, text: str) -> None:
    sys.stdout.write(f"{mark}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
