"""A service in a process of its own, seen from the test that started it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.integration.process_tags import ProcessTag

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 60


class ServingProcess:
    """The process, its address, and what it says of its engines."""

    def __init__(self, process, tag):
        self._process = process
        self._tag = tag
        self.url = self._read("url:")

    def listeners(self):
        """Return the names of its processes that accept connections to the address."""
        port = int(self.url.rpartition(":")[2])
        return {
            process.name()
            for process in self._tag.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }

    def processes(self):
        """Return all processes of the service, this one's cluster and no other's."""
        return self._tag.processes()

    def stats(self, model_id):
        """Return the state of a model's one engine."""
        self._process.stdin.write(f"{model_id}\n")
        self._process.stdin.flush()
        return json.loads(self._read("stats:"))

    def _read(self, mark):
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        raise AssertionError("the serving process ended")


@contextlib.contextmanager
def run_serving_process(arguments, environment=()):
    """Serve with these arguments of ``build_app`` until the end of the context."""
    tag = ProcessTag()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.serving_process", json.dumps(arguments)],
        cwd=_ROOT,
        env={**os.environ, **dict(environment), **tag.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield ServingProcess(process, tag)
        process.stdin.close()
        process.wait(timeout=_LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
