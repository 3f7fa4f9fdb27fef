"""The HTTP routes over a GenerationService."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.access import Access, get_grants, make_access_layers, make_exchange
from deployments.admin_routes import AdminRoutes
from deployments.admin_service import AdminService
from deployments.cors import make_cors_layers
from deployments.docs_page import make_docs_response
from deployments.http_errors import MethodNotAllowedError, RouteNotFoundError
from deployments.http_io import (
    get_request_id,
    make_error_response,
    make_json_response,
    read_json,
)
from deployments.openapi import build_openapi
from deployments.paths import (
    AGENT_PATHS,
    CHAT_PATHS,
    COMPLETION_PATH,
    DETOKENIZE_PATH,
    DOCS_PATH,
    HEALTH_PATH,
    MODELS_PATH,
    OPENAPI_PATH,
    TOKENIZE_PATH,
    VERSION_PATH,
)
from deployments.release import VERSION
from deployments.response_headers import ResponseHeaders
from deployments.service import GenerationService
from deployments.tokenizer_service import TokenizerService
from models.errors import InvalidRequestError

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def build_http_app(
    service: GenerationService,
    tokenizers: TokenizerService,
    admin: AdminService | None = None,
    *,
    access: Access | None = None,
    cors_origins: Sequence[str] = (),
    is_behind_serve: bool = False,
) -> Starlette:
    """Return the ASGI application.

    Every path may end with one slash more: a redirect would name a host, which only the proxies
    in front know.

    Args:
        service: does the work; owned by the same event loop.
        tokenizers: that of /tokenize and /detokenize.
        admin: does that of the admin routes; without it there are none.
        access: who may ask; None lets everybody.
        cors_origins: web pages that may ask from a browser.
        is_behind_serve: see ``ResponseHeaders``.
    """
    routes = _Routes(service, tokenizers, access, has_admin=admin is not None)
    admin_routes = [] if admin is None else AdminRoutes(admin, service.limits.max_body_bytes).all()
    endpoints: list[tuple[str, str, Endpoint]] = [
        *(
            ("POST", path, functools.partial(routes.post_chat, is_agents=path in AGENT_PATHS))
            for path in CHAT_PATHS
        ),
        ("POST", COMPLETION_PATH, routes.post_completion),
        ("POST", TOKENIZE_PATH, routes.post_tokenize),
        ("POST", DETOKENIZE_PATH, routes.post_detokenize),
        ("GET", MODELS_PATH, routes.get_models),
        ("GET", HEALTH_PATH, routes.get_health),
        ("GET", VERSION_PATH, routes.get_version),
        ("GET", OPENAPI_PATH, routes.get_openapi),
        ("GET", DOCS_PATH, routes.get_docs),
        *((route.method, route.path, route.endpoint) for route in admin_routes),
    ]
    status = service.limits.validation_status
    app = Starlette(
        routes=[
            *(route for endpoint in endpoints for route in _make_routes(*endpoint, status)),
            # Its parameter takes whatever follows, slashes too.
            Route(
                f"{MODELS_PATH}/{{model_id:path}}",
                _guard(routes.get_model, status),
                methods=["GET"],
            ),
        ],
        # The outermost first.
        middleware=[
            *make_cors_layers(cors_origins),
            Middleware(ResponseHeaders, is_behind_serve=is_behind_serve),
            *make_access_layers(access, [route.path for route in admin_routes]),
        ],
        exception_handlers={HTTPException: _answer_http_exception},
    )
    app.router.redirect_slashes = False
    return app


def _make_routes(
    method: str, path: str, endpoint: Endpoint, validation_status: int
) -> Iterator[Route]:
    guarded = _guard(endpoint, validation_status)
    for spelling in (path, f"{path}/"):
        yield Route(spelling, guarded, methods=[method])


class _Routes:
    def __init__(
        self,
        service: GenerationService,
        tokenizers: TokenizerService,
        access: Access | None,
        *,
        has_admin: bool,
    ) -> None:
        self._service = service
        self._tokenizers = tokenizers
        self._access = access
        self._has_admin = has_admin

    async def post_chat(self, request: Request, *, is_agents: bool) -> ASGIApp:
        is_agent = _read_flag(request, "agent", default=is_agents)
        return await self._generate(request, is_chat=True, is_agent=is_agent)

    async def post_completion(self, request: Request) -> ASGIApp:
        return await self._generate(request, is_chat=False)

    async def post_tokenize(self, request: Request) -> ASGIApp:
        body = await read_json(request, self._service.limits.max_body_bytes)
        return make_json_response(await self._tokenizers.tokenize(body, get_grants(request)))

    async def post_detokenize(self, request: Request) -> ASGIApp:
        body = await read_json(request, self._service.limits.max_body_bytes)
        return make_json_response(await self._tokenizers.detokenize(body, get_grants(request)))

    async def get_models(self, request: Request) -> ASGIApp:
        return make_json_response(await self._service.directory.list_models(get_grants(request)))

    async def get_model(self, request: Request) -> ASGIApp:
        name = request.path_params["model_id"].removesuffix("/")
        grants = get_grants(request)
        return make_json_response(await self._service.directory.get_model(name, grants))

    async def get_health(self, _request: Request) -> ASGIApp:
        await self._service.check_health()
        return make_json_response({"status": "ok"})

    async def get_version(self, _request: Request) -> ASGIApp:
        return make_json_response({"version": VERSION})

    async def get_openapi(self, request: Request) -> ASGIApp:
        document = await asyncio.to_thread(build_openapi, has_admin=self._has_admin)
        root = request.scope.get("root_path") or "/"
        return make_json_response({**document, "servers": [{"url": root}]})

    async def get_docs(self, _request: Request) -> ASGIApp:
        return make_docs_response()

    async def _generate(
        self, request: Request, *, is_chat: bool, is_agent: bool = False
    ) -> ASGIApp:
        body = await read_json(request, self._service.limits.max_body_bytes)
        job = await self._service.make_job(
            body, is_chat=is_chat, is_agent=is_agent, grants=get_grants(request)
        )
        return make_exchange(request, self._service, self._access, job)


def _read_flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a true or false of the query.

    Raises:
        InvalidRequestError: it is neither.
    """
    value = request.query_params.get(name)
    if value is None:
        return default
    flag = _FLAGS.get(value.lower())
    if flag is None:
        raise InvalidRequestError(name, "must be true or false")
    return flag


def _guard(endpoint: Endpoint, validation_status: int) -> Endpoint:
    """Return the endpoint with its errors as answers."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            # Nobody reads this.
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            return make_error_response(
                error, get_request_id(request), validation_status=validation_status
            )

    return guarded


async def _answer_http_exception(request: Request, exception: Exception) -> Response:
    """Tell what Starlette's router refuses in the shape of every other error."""
    headers = getattr(exception, "headers", None) or {}
    if allowed := headers.get("Allow"):
        error: Exception = MethodNotAllowedError(request.method, allowed)
    else:
        error = RouteNotFoundError(request.url.path[:256])
    return make_error_response(error, get_request_id(request))
