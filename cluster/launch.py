"""The ``medley`` command: up, validate, status, hash-key.

Does not import Ray in this process for ``up``, so that its signal handlers stand first.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.console import Console, open_console
from cluster.settings import make_child_environment, read_settings
from cluster.supervisor import StopSignals, supervise
from models.errors import ConfigError

EXIT_FAILED = 1
EXIT_MISUSE = 2

# The whole stop may take 10 s: what does not end by itself within this time is killed.
_STOP_LIMIT_S = 8.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: words after the program's name; those of this process by default.

    Returns:
        The exit status: 0, EXIT_FAILED or EXIT_MISUSE.
    """
    options = _make_parser().parse_args(argv)
    console = open_console()
    if options.command == "up":
        return _up(options.words, console)
    if options.command == "validate":
        return _validate(options.file, console)
    if options.command == "hash-key":
        return _hash_key(options.name, is_given=options.stdin, console=console)
    return _status(console)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="medley", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="serve on this machine until Ctrl-C")
    up.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="host, port, or an argument of deployments.app:build_app such as model or device",
    )
    validate = commands.add_parser("validate", help="check a Serve config file, start nothing")
    validate.add_argument("file", type=Path)
    commands.add_parser("status", help="what runs on this machine's Ray")
    hash_key = commands.add_parser("hash-key", help="print the record of a new API key")
    hash_key.add_argument("name", help="whose key it is")
    hash_key.add_argument(
        "--stdin", action="store_true", help="read the key from standard input, draw none"
    )
    return parser


def _up(words: Sequence[str], console: Console) -> int:
    signals = StopSignals()
    # pydantic and the schemas load after the signal handlers stand.
    from cluster.arguments import parse_up_arguments
    from cluster.serve_driver import LaunchOrder

    try:
        defaults = {"cache_folder": str(read_settings().cache_folder)}
        arguments = parse_up_arguments(words, defaults)
    except ConfigError as error:
        console.fail(str(error))
        return EXIT_MISUSE
    from deployments.open_door import describe_open_door, is_public

    if is_public(arguments.host) and not arguments.builder.get("api_keys_file"):
        console.warn(describe_open_door(arguments.host))
    if problem := find_port_problem(arguments.host, arguments.port):
        console.fail(problem)
        return EXIT_FAILED
    order = LaunchOrder(
        host=arguments.host,
        port=arguments.port,
        parent_pid=os.getpid(),
        arguments=arguments.builder,
    )
    return supervise(
        [sys.executable, "-m", "cluster.serve_driver"],
        signals,
        stdin=order.to_json(),
        environment=make_child_environment(),
        stop_limit_s=_STOP_LIMIT_S,
        say=console.say,
    )


def find_port_problem(host: str, port: int) -> str | None:
    """Say why HTTP cannot be served there; None if it can.

    Serve's own socket shares its port, so that a second server would start and steal requests.

    Args:
        host: name or address of this machine.
        port: TCP port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return f"cannot listen on {host} port {port}: {error.strerror} (choose another: port=...)"
    return None


def _validate(path: Path, console: Console) -> int:
    from cluster.serve_config import check_serve_config, find_open_doors

    try:
        configs = check_serve_config(path)
    except ConfigError as error:
        console.fail(str(error))
        return EXIT_FAILED
    for name, config in configs.items():
        console.announce(f"{name}: {', '.join(config.model_ids)}")
    for warning in find_open_doors(path, configs):
        console.warn(warning)
    return 0


def _hash_key(name: str, *, is_given: bool, console: Console) -> int:
    from cluster.hash_key import run_hash_key

    try:
        run_hash_key(name, sys.stdin if is_given else None, console)
    except ConfigError as error:
        console.fail(str(error))
        return EXIT_MISUSE
    return 0


def _status(console: Console) -> int:
    from cluster.status import read_status

    lines, is_running = read_status()
    for line in lines:
        console.announce(line)
    return 0 if is_running else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
