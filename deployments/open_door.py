"""Warns where HTTP is served to others without API keys. Refuses nothing."""

from __future__ import annotations

import ipaddress
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")


class OpenDoorWarning:
    """The layer where no keys are set: it warns, once, if others than this machine can come in."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before an application."""
        self._app = app
        self._is_told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if not self._is_told and scope["type"] == "http":
            host, _ = scope.get("server") or ("", None)
            if host and is_public(host):
                self._is_told = True
                _logger.warning("%s", describe_open_door(host))
        await self._app(scope, receive, send)


def is_public(host: str) -> bool:
    """Whether others than this machine may reach an address; names but "localhost" count as that.

    Args:
        host: a name or an address to listen on; "" is every address.
    """
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() != "localhost"


def describe_open_door(host: str) -> str:
    """Return the warning that whoever reaches an address may use the models."""
    return (
        f"WARNING: HTTP is served on {host} and no API keys are set: whoever reaches this address "
        "may use the models. Set api_keys_file (medley hash-key makes keys), or listen on 127.0.0.1"
    )
