"""The process below ``medley up``: starts Ray and Serve, says when it is ready, ends in order.

Does not handle the terminal's signals and does not clean up after a crash: ``cluster.supervisor``
does. While it loads, SIGINT ends this process at once, because then nothing needs an orderly end.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from cluster.console import Console, open_console
from cluster.failure_text import read_failure
from cluster.process_tree import end_with_parent
from cluster.replica_log import ReplicaLog
from deployments.config import ServiceConfig
from models.errors import ConfigError

APPLICATION_NAME = "medley"
# How a replica's log record starts that tells of progress.
PROGRESS_MARK = "progress: "

# Messages go from process to process by gRPC; only what Ray itself stores needs this memory.
_OBJECT_STORE_BYTES = 128 << 20
_POLL_S = 0.25
_HEARTBEAT_S = 10.0
_HTTP_TIMEOUT_S = 10.0
# Of the 10 s that a stop may take: what open requests get to finish, ...
_GRACE_S = 2.0
# ... what their last event and the answer to that call get, ...
_LAST_EVENT_S = 2.0
# ... and what the proxy gets to pass the last bytes on.
_FLUSH_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """What to serve and where.

    Attributes:
        host: address for HTTP.
        port: port for HTTP.
        parent_pid: the process to end with.
        arguments: the builder's arguments, already validated once.
    """

    host: str
    port: int
    parent_pid: int
    arguments: Mapping[str, Any]

    def to_json(self) -> bytes:
        """Return it as the driver reads it."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    @property
    def url(self) -> str:
        """The address to call from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def make_ready_line(url: str, model_id: str) -> str:
    """Return the line that tells that it is ready, with a command to paste.

    Args:
        url: scheme, host and port.
        model_id: the model that the command asks.
    """
    body = json.dumps(
        {
            "model": model_id,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
    ).replace("'", "\\u0027")
    return (
        f"Medley is ready on {url} - try: curl {url}/v1/chat/completions "
        f"-H 'content-type: application/json' -d '{body}'"
    )


def main() -> int:
    """Read a LaunchOrder from standard input and serve it until SIGINT or SIGTERM.

    Returns:
        The exit status: 0 after a requested stop, 1 if the start failed.
    """
    # Also where the shell handed down an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    order = LaunchOrder.from_json(sys.stdin.buffer.read())
    end_with_parent(order.parent_pid)
    console = open_console()
    try:
        config = ServiceConfig.model_validate(order.arguments)
        _serve(order, config, console)
    except (ConfigError, _StartFailedError) as error:
        console.fail(str(error))
    except (RuntimeError, OSError) as error:
        # Ray and Serve raise these for a port that is taken meanwhile, a full disk and the like.
        console.fail(f"could not start: {type(error).__name__}: {error}")
    else:
        return 0
    return 1


class _StartFailedError(Exception):
    """The application did not start; the text is for a person."""


def _serve(order: LaunchOrder, config: ServiceConfig, console: Console) -> None:
    """Start, say that it is ready, wait for a signal, end open requests, stop Ray."""
    console.say("starting Ray")
    # Ray takes seconds to import, and is not needed to refuse a bad configuration.
    import ray

    from deployments.app import build_app

    application = build_app(config)
    try:
        session_folder = _start_ray()
        console.say("starting Ray Serve")
        log = ReplicaLog(session_folder, APPLICATION_NAME, PROGRESS_MARK)
        _deploy(application, order)
        _wait_until_running(log, console)
        _wait_until_answering(order, console)
        stop = _catch_stop_signals()
        console.announce(make_ready_line(order.url, config.model_ids[0]))
        while not stop.wait(_POLL_S * 4):
            for line in log.read_new():
                console.say(line)
        _end_open_requests(console)
    finally:
        ray.shutdown()


def _start_ray() -> Path:
    """Start a Ray of our own, whatever else runs on this machine; return its session folder."""
    import ray

    context = ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    return Path(context.address_info["session_dir"])


def _deploy(application: Any, order: LaunchOrder) -> None:
    """Start Serve's HTTP proxy and hand it the application, without waiting for replicas."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": order.host, "port": order.port},
        logging_config={"enable_access_log": False},
    )
    serve.run_many(
        [serve.RunTarget(application, name=APPLICATION_NAME, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _wait_until_running(log: ReplicaLog, console: Console) -> None:
    """Print progress until every deployment is healthy.

    Raises:
        _StartFailedError: if the start failed, or will fail at every try.
    """
    from ray import serve

    pause = threading.Event()
    last_line_s = console.elapsed_s
    failures: list[str] = []
    while True:
        application = serve.status().applications[APPLICATION_NAME]
        deployments = application.deployments
        messages = {name: deployment.message for name, deployment in deployments.items()}
        new_failures = [text for text in _read_failures(messages) if text not in failures]
        failures += new_failures
        if application.status == "DEPLOY_FAILED":
            reason = "; ".join(failures) or application.message
            raise _StartFailedError(f"{reason} (logs: {log.folder})")
        lines = log.read_new() + [f"{text}; Ray Serve tries again" for text in new_failures]
        if not lines and console.elapsed_s - last_line_s >= _HEARTBEAT_S:
            waiting = [name for name, it in deployments.items() if it.status != "HEALTHY"]
            lines = [f"waiting for {', '.join(waiting) or 'Ray Serve'}"]
        for line in lines:
            console.say(line)
            last_line_s = console.elapsed_s
        if application.status == "RUNNING":
            return
        pause.wait(_POLL_S)


def _read_failures(messages: Mapping[str, str]) -> list[str]:
    """Return a line for each deployment whose replicas fail to start.

    Args:
        messages: what Serve says, by deployment.

    Raises:
        _StartFailedError: if one fails at every try.
    """
    lines = []
    for name, message in messages.items():
        failure = read_failure(message)
        if failure is not None and failure.is_final:
            raise _StartFailedError(failure.text)
        if failure is not None:
            lines.append(f"{name}: {failure.text}")
    return lines


def _wait_until_answering(order: LaunchOrder, console: Console) -> None:
    """Wait until the proxy knows the application's routes."""
    pause = threading.Event()
    limit_s = console.elapsed_s + _HTTP_TIMEOUT_S
    while not _is_answering(order):
        if console.elapsed_s > limit_s:
            raise _StartFailedError(f"{order.url}/health does not answer")
        pause.wait(_POLL_S)


def _is_answering(order: LaunchOrder) -> bool:
    host = order.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, order.port, timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def _catch_stop_signals() -> threading.Event:
    """From now on a signal asks for an orderly end. Replaces the handler that Ray installs."""
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return stop


def _end_open_requests(console: Console) -> None:
    """Let every ingress finish its open requests, or end them with their terminal error."""
    from ray import serve

    try:
        ingress = serve.get_app_handle(APPLICATION_NAME)
        numbers = ingress.broadcast("begin_shutdown", _GRACE_S).results(
            timeout_s=_GRACE_S + _LAST_EVENT_S
        )
    except Exception as error:  # noqa: BLE001 - whatever fails here, the end goes on
        console.say(f"open requests are cut: {type(error).__name__}")
        return
    if num_ended := sum(numbers):
        console.say(f"open requests ended early: {num_ended}")
    threading.Event().wait(_FLUSH_S)


if __name__ == "__main__":
    sys.exit(main())
