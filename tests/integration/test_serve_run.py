"""Ray Serve's own command line, and nothing set up around it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.integration.conftest import find_free_port
from tests.integration.process_tags import ProcessTag
from tests.integration.tiny_service_model import save_tiny_model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 180
# Ray itself ends its processes, in its own time.
STOP_LIMIT_S = 30
LIMIT_S = 60


def entry(folder, model_id, **fields):
    save_tiny_model(folder)
    return {
        "model": str(folder),
        "model_id": model_id,
        "dtype": "float32",
        "kv_budget_bytes": 16 << 20,
        "num_threads": 1,
        **fields,
    }


def write_config(folder, port):
    models = [
        entry(folder / "first", "first"),
        entry(
            folder / "second",
            "second",
            min_replicas=1,
            max_replicas=2,
            target_ongoing_requests=1,
            upscale_delay_s=0.5,
        ),
    ]
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "medley",
                "route_prefix": "/",
                "import_path": "deployments.app:build_app",
                "args": {"models": models, "shutdown_grace_s": 1.0},
            }
        ],
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_until_healthy(process, client, log):
    end_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.2)


def ask(client, model_id, *, prefix=""):
    body = {
        "model": model_id,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    return client.post(f"{prefix}/v1/chat/completions", json=body).json()


def start(tag, output, *words):
    """Start ``serve run``, as after a login; but no usage report is sent from a test."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("serve"), "run", *words],
        cwd=ROOT,
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME")},
            "RAY_USAGE_STATS_ENABLED": "0",
            **tag.environment,
        },
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def count_replicas(tag, application, model_id):
    # A replica that is starting has another title behind the same name.
    title = f"ray::ServeReplica:{application}:model-{model_id}"
    count = 0
    for process in tag.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            count += " ".join(process.cmdline()).startswith(title)
    return count


def count_replicas_under_load(tag, client, model_id):
    """Keep streams open until there are two replicas, or the time is over."""
    body = {
        "model": model_id,
        "prompt": "abc",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with contextlib.ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(client.stream("POST", "/v1/completions", json=body))
        end_s = time.monotonic() + START_LIMIT_S
        while (count := count_replicas(tag, "medley", model_id)) < 2 and time.monotonic() < end_s:
            time.sleep(0.2)
    return count


def run_flat(tag, output, folder):
    """Put one more application into the cluster that runs, by flat arguments; return the status."""
    save_tiny_model(folder)
    process = start(
        tag,
        output,
        *("--address", "auto", "--non-blocking", "--name", "flat", "--route-prefix", "/flat"),
        "deployments.app:build_app",
        *(f"model={folder}", "model_id=flat-model", "dtype=float32", "replicas=1"),
        *("kv_budget_bytes=16777216", "num_threads=1"),
    )
    return process.wait(timeout=START_LIMIT_S)


def test_serve_run_serves_a_file_and_flat_arguments_until_it_is_interrupted(tmp_path):
    port = find_free_port()
    config, log = write_config(tmp_path, port), tmp_path / "log"
    tag = ProcessTag()
    with log.open("w") as output:
        process = start(tag, output, config)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            wait_until_healthy(process, client, log)
            listed = client.get("/v1/models").json()["data"]
            answers = [ask(client, model_id) for model_id in ("first", "second")]
            counts = [count_replicas(tag, "medley", model_id) for model_id in ("first", "second")]
            scaled = count_replicas_under_load(tag, client, "second")
            with (tmp_path / "flat-log").open("w") as output:
                flat_status = run_flat(tag, output, tmp_path / "flat")
            flat = client.get("/flat/v1/models").json()["data"]
            flat_answer = ask(client, "flat-model", prefix="/flat")
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=STOP_LIMIT_S)
        remaining = tag.wait_until_gone(STOP_LIMIT_S)
    finally:
        for left in tag.processes():
            left.kill()
        process.wait()

    assert [model["id"] for model in listed] == ["first", "second"]
    assert [answer["model"] for answer in answers] == ["first", "second"]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4, 4]
    assert (counts, scaled) == ([1, 1], 2)
    assert flat_status == 0, (tmp_path / "flat-log").read_text()
    assert [model["id"] for model in flat] == ["flat-model"]
    assert flat_answer["usage"]["completion_tokens"] == 4
    assert (status, remaining) == (0, [])
