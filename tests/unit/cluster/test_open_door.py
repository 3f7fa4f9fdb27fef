"""A public address without API keys is warned of before anything starts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.launch import EXIT_FAILED, main

ROOT = Path(__file__).parents[3]
WARNING = "no API keys are set"


def write_config(folder: Path, host: str | None, **args: str) -> Path:
    path = folder / "serve.yaml"
    application = {"name": "medley", "import_path": "deployments.app:build_app", "args": args}
    content: dict[str, object] = {"applications": [application]}
    if host is not None:
        content["http_options"] = {"host": host}
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("host", "is_warned"),
    [("0.0.0.0", True), ("::", True), (None, True), ("127.0.0.1", False), ("::1", False)],
)
def test_validate_warns_of_a_file_that_serves_everybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str | None, is_warned: bool
) -> None:
    assert main(["validate", str(write_config(tmp_path, host))]) == 0

    printed = capsys.readouterr()
    assert (WARNING in printed.err) is is_warned
    assert WARNING not in printed.out


def test_validate_is_quiet_where_keys_are_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(write_config(tmp_path, "0.0.0.0", api_keys_file="/keys"))]) == 0

    assert WARNING not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "words", "is_warned"),
    [("0.0.0.0", [], True), ("0.0.0.0", ["api_keys_file=/k"], False), ("127.0.0.1", [], False)],
)
def test_up_warns_of_an_address_that_others_reach(
    host: str, words: list[str], is_warned: bool
) -> None:
    # It goes no further than to a port that is taken. In a process of its own: it takes signals.
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "cluster.launch", "up", f"host={host}", f"port={port}"]
        result = subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    assert result.returncode == EXIT_FAILED
    assert f"cannot listen on {host}" in result.stderr
    assert (WARNING in result.stderr) is is_warned
