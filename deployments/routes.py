"""The HTTP routes over a GenerationService."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.admin_routes import AdminRoutes
from deployments.admin_service import AdminService
from deployments.exchange import GenerationExchange
from deployments.http_errors import MethodNotAllowedError, RouteNotFoundError
from deployments.http_io import (
    get_request_id,
    make_error_response,
    make_json_response,
    read_json,
)
from deployments.service import GenerationService

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def build_http_app(service: GenerationService, admin: AdminService | None = None) -> Starlette:
    """Return the ASGI application.

    Args:
        service: does the work; owned by the same event loop.
        admin: does that of the admin routes; without it there are none.
    """
    routes = _Routes(service)
    admin_routes = [] if admin is None else AdminRoutes(admin, service.limits.max_body_bytes).all()
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _guard(routes.post_chat), methods=["POST"]),
            Route("/v1/completions", _guard(routes.post_completion), methods=["POST"]),
            Route("/v1/models", _guard(routes.get_models), methods=["GET"]),
            Route("/v1/models/{model_id:path}", _guard(routes.get_model), methods=["GET"]),
            Route("/health", _guard(routes.get_health), methods=["GET"]),
            *(
                Route(route.path, _guard(route.endpoint), methods=[route.method])
                for route in admin_routes
            ),
        ],
        exception_handlers={HTTPException: _answer_http_exception},
    )


class _Routes:
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def post_chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, is_chat=True)

    async def post_completion(self, request: Request) -> ASGIApp:
        return await self._generate(request, is_chat=False)

    async def get_models(self, _request: Request) -> ASGIApp:
        return make_json_response(await self._service.directory.list_models())

    async def get_model(self, request: Request) -> ASGIApp:
        name = request.path_params["model_id"]
        return make_json_response(await self._service.directory.get_model(name))

    async def get_health(self, _request: Request) -> ASGIApp:
        await self._service.check_health()
        return make_json_response({"status": "ok"})

    async def _generate(self, request: Request, *, is_chat: bool) -> ASGIApp:
        body = await read_json(request, self._service.limits.max_body_bytes)
        job = await self._service.make_job(body, is_chat=is_chat)
        return GenerationExchange(self._service, job, get_request_id(request, job.response_id))


def _guard(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with its errors as answers."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            # Nobody reads this.
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - the last resort: everything becomes an answer
            return make_error_response(error, get_request_id(request))

    return guarded


async def _answer_http_exception(request: Request, exception: Exception) -> Response:
    """Tell what Starlette's router refuses in the shape of every other error."""
    headers = getattr(exception, "headers", None) or {}
    if allowed := headers.get("Allow"):
        error: Exception = MethodNotAllowedError(request.method, allowed)
    else:
        error = RouteNotFoundError(request.url.path[:256])
    return make_error_response(error, get_request_id(request))
