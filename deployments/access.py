"""Who may ask over HTTP: an ASGI layer that wants a key of every request. Off without keys.

Whatever is not listed as open needs a key, also what does not exist. Python handles never come
here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api_keys import EVERYTHING, ApiKey, Grants
from deployments.budget_client import BudgetClient, Connect
from deployments.budget_shares import BudgetShares
from deployments.exchange import GenerationExchange
from deployments.http_errors import InvalidKeyError
from deployments.http_io import get_request_id, make_error_response
from deployments.key_file import KeyFile
from deployments.metering import Meter, MeteredExchange
from deployments.open_door import OpenDoorWarning
from deployments.paths import DOCS_PATH, HEALTH_PATH, OPENAPI_PATH, VERSION_PATH
from deployments.rate_limit_headers import make_rate_limit_headers
from deployments.service import GenerationService
from deployments.translate import Job

# Probes and descriptions, which tell nothing of models, adapters and other callers.
OPEN_PATHS = frozenset({HEALTH_PATH, VERSION_PATH, OPENAPI_PATH, DOCS_PATH})
_KEY_IN_SCOPE = "medley.api_key"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may ask over HTTP.

    Attributes:
        keys_path: file or folder of the keys; None lets everybody.
        default_max_tokens: model id -> new tokens of a request that names no limit.
        cors_origins: web pages that may ask from a browser.
    """

    keys_path: Path | None = None
    default_max_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cors_origins: tuple[str, ...] = ()


class Access:
    """The keys and their budgets, as one ingress replica holds them.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self, keys_path: Path, default_max_tokens: Mapping[str, int], connect: Connect
    ) -> None:
        """Read the keys and look from now on whether they change.

        Args:
            keys_path: file or folder.
            default_max_tokens: see ``AccessConfig``.
            connect: reaches the budgets, once there is a key with a limit.

        Raises:
            ConfigError: the keys cannot be read.
        """
        self._keys = KeyFile(keys_path)
        self._keys.watch()
        self._budgets = BudgetClient(BudgetShares(uuid.uuid4().hex), connect)
        if self._keys.ring.has_limits:
            self._budgets.prepare()
        self._default_max_tokens = default_max_tokens

    def find_key(self, authorization: str | None) -> ApiKey:
        """Return the caller's key.

        Args:
            authorization: value of the header, if there is one.

        Raises:
            InvalidKeyError: there is none, or a wrong one.
        """
        key = self._keys.ring.find(authorization)
        if key is None:
            raise InvalidKeyError
        return key

    def make_meter(self, key: ApiKey, job: Job) -> Meter | None:
        """Return what charges a request to its key; None if the key has no limit."""
        if not key.limits:
            return None
        return Meter(self._budgets, key, job, self._default_max_tokens)

    async def close(self) -> None:
        """End what goes on in the background."""
        await self._budgets.close()
        await asyncio.to_thread(self._keys.close)

    def rate_limit_headers(self, key: ApiKey) -> list[tuple[str, str]]:
        """Return what an answer tells of the budgets of a key."""
        return make_rate_limit_headers(key, self._budgets.standing)


class AccessGate:
    """The layer in front of all routes.

    It leaves the caller's key in the scope, for ``get_grants`` and ``make_exchange``, and tells
    with every answer how the key's budgets stand.
    """

    def __init__(self, app: ASGIApp, access: Access, own_key_paths: Collection[str]) -> None:
        """Stand before an application.

        Args:
            app: the routes.
            access: who may.
            own_key_paths: paths that ask for a key of their own.
        """
        self._app = app
        self._access = access
        self._open_paths = OPEN_PATHS | set(own_key_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a 401 before its body is read."""
        if scope["type"] != "http" or _read_route(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            key = self._access.find_key(request.headers.get("authorization"))
        except InvalidKeyError as error:
            response = make_error_response(error, get_request_id(request))
            await response(scope, receive, send)
            return
        scope[_KEY_IN_SCOPE] = key

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = self._access.rate_limit_headers(key)
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told]
                message = {**message, "headers": [*message.get("headers", ()), *raw]}
            await send(message)

        await self._app(scope, receive, send_with_limits if key.limits else send)


def make_access_layers(access: Access | None, own_key_paths: Collection[str]) -> list[Middleware]:
    """Return the layers of the application that see to who may ask.

    Args:
        access: None lets everybody.
        own_key_paths: see ``AccessGate``.
    """
    if access is None:
        return [Middleware(OpenDoorWarning)]
    return [Middleware(AccessGate, access=access, own_key_paths=own_key_paths)]


def get_grants(request: Request) -> Grants:
    """Return what the caller may name."""
    key: ApiKey | None = request.scope.get(_KEY_IN_SCOPE)
    return EVERYTHING if key is None else key.grants


def make_exchange(
    request: Request, service: GenerationService, access: Access | None, job: Job
) -> ASGIApp:
    """Return the answer to a request that generates, charged to its key if that has limits.

    Args:
        request: has passed the gate.
        service: opens the generation.
        access: None without keys.
        job: what to answer.
    """
    request_id = get_request_id(request, job.response_id)
    key: ApiKey | None = request.scope.get(_KEY_IN_SCOPE)
    meter = None if access is None or key is None else access.make_meter(key, job)
    exchange = GenerationExchange(service, job, request_id, meter)
    return exchange if meter is None else MeteredExchange(meter, exchange, request_id)


def _read_route(scope: Scope) -> str:
    """Return the path below the application's prefix, without the slash that may end it."""
    path: str = scope["path"]
    path = path.removeprefix(scope.get("root_path", "").rstrip("/"))
    return path.removesuffix("/")
