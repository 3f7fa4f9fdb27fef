"""The admin routes: bodies, keys, answers. They exist only if the configuration has a key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deployments.adapter_names import check_named_adapter
from deployments.admin_service import AdapterAction, AdminService
from deployments.http_io import make_json_response, read_json
from deployments.wire_values import explain
from models.errors import AdapterNotFoundError, InvalidRequestError, ModelNotFoundError

Endpoint = Callable[[Request], Awaitable[Response]]

ModelId = Annotated[str, Field(max_length=512)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """One route, whose endpoint checks the key."""

    method: str
    path: str
    endpoint: Endpoint


class _AdminBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ActionBody(_AdminBody):
    """Body of POST /admin/adapters/{action}."""

    model: ModelId
    adapter_id: str


class LoadLoraBody(_AdminBody):
    """Body of POST /v1/load_lora_adapter, as vLLM has it.

    Adapters lie in the configured folder under their names, so ``lora_path`` can say nothing but
    the name again. What is served is always the files' current version: ``load_inplace`` changes
    nothing. ``model`` is an extension, for names that several models have.
    """

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False
    model: ModelId | None = None


class UnloadLoraBody(_AdminBody):
    """Body of POST /v1/unload_lora_adapter, as vLLM has it; ``model`` as in LoadLoraBody."""

    lora_name: str
    model: ModelId | None = None


_Body = TypeVar("_Body", bound=_AdminBody)


class AdminRoutes:
    """The routes over an AdminService."""

    def __init__(self, admin: AdminService, max_body_bytes: int) -> None:
        """Make no route yet.

        Args:
            admin: does the work.
            max_body_bytes: largest request body.
        """
        self._admin = admin
        self._max_body_bytes = max_body_bytes

    def all(self) -> list[AdminRoute]:
        """Return every route; what an endpoint raises becomes an answer elsewhere."""
        actions = [
            self._route("POST", f"/admin/adapters/{action}", functools.partial(self._act, action))
            for action in AdapterAction
        ]
        return [
            *actions,
            self._route("GET", "/admin/adapters", self._tell_status),
            self._route("POST", "/v1/load_lora_adapter", self._load_lora),
            self._route("POST", "/v1/unload_lora_adapter", self._unload_lora),
        ]

    def _route(self, method: str, path: str, endpoint: Endpoint) -> AdminRoute:
        async def locked(request: Request) -> Response:
            # Before the body: who has no key learns nothing of it.
            self._admin.key.check(request.headers.get("authorization"))
            return await endpoint(request)

        return AdminRoute(method=method, path=path, endpoint=locked)

    async def _act(self, action: AdapterAction, request: Request) -> Response:
        body = await self._read(request, ActionBody)
        check_named_adapter("adapter_id", body.adapter_id)
        return make_json_response(await self._admin.act(action, body.model, body.adapter_id))

    async def _tell_status(self, _request: Request) -> Response:
        return make_json_response(await self._admin.tell_status())

    async def _load_lora(self, request: Request) -> Response:
        body = await self._read(request, LoadLoraBody)
        if body.lora_path not in ("", body.lora_name):
            raise InvalidRequestError(
                "lora_path",
                "adapters come from the configured folder, under their names; leave this out",
            )
        await self._act_on_lora(AdapterAction.LOAD, body.lora_name, body.model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_lora(self, request: Request) -> Response:
        body = await self._read(request, UnloadLoraBody)
        await self._act_on_lora(AdapterAction.UNLOAD, body.lora_name, body.model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _act_on_lora(self, action: AdapterAction, name: str, model_id: str | None) -> None:
        check_named_adapter("lora_name", name)
        if model_id is None:
            try:
                model_id = await self._admin.find_model(name)
            except ModelNotFoundError:
                raise AdapterNotFoundError(name) from None
        await self._admin.act(action, model_id, name)

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        body = await read_json(request, self._max_body_bytes)
        if not isinstance(body, dict):
            raise InvalidRequestError("", "the request body must be a JSON object")
        try:
            return kind.model_validate({k: v for k, v in body.items() if v is not None})
        except ValidationError as error:
            raise explain(error) from None
