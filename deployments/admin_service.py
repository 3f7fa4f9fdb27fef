"""What the admin routes do: actions on adapters, in every replica of a model. No transport."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol

from deployments.admin_key import AdminKey
from deployments.model_directory import ModelDirectory
from deployments.ray_errors import unwrap_ray_error
from models.errors import EngineDeadError, ModelNotFoundError

# A load may read from a slow disk; all else is a look into a table.
_LOAD_TIMEOUT_S = 120.0
_TIMEOUT_S = 5.0


class AdapterAction(enum.StrEnum):
    """What is done to an adapter.

    ``LOAD`` brings it into memory; ``PIN`` keeps it there, ``UNPIN`` ends that; ``UNLOAD`` drops
    it, once no request uses it, until its next request.
    """

    LOAD = "load"
    PIN = "pin"
    UNPIN = "unpin"
    UNLOAD = "unload"


class BroadcastHandle(Protocol):
    """What is used of a Serve handle."""

    def broadcast(self, method_name: str, *args: Any) -> Any:
        """Call every replica; the response's ``results_async`` gives what each said."""
        ...


class AdminService:
    """Acts on the adapters of the base models.

    An action goes to every replica that runs, as far as this ingress knows; the answer has one
    entry for each that was reached. It is not remembered: a replica that starts later, or after a
    failure, has nothing pinned. One that fails anywhere is answered with that failure, though the
    other replicas have done it; every action may be repeated.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self,
        key: AdminKey,
        adapter_model_ids: tuple[str, ...],
        handles: Mapping[str, BroadcastHandle],
        directory: ModelDirectory,
    ) -> None:
        """Do nothing yet.

        Args:
            key: what callers must have.
            adapter_model_ids: models that have a folder of adapters.
            handles: model id -> handle of its deployment.
            directory: looks up which model has an adapter.
        """
        self.key = key
        self._adapter_model_ids = adapter_model_ids
        self._handles = handles
        self._directory = directory

    async def act(self, action: AdapterAction, model_id: str, adapter_id: str) -> dict[str, Any]:
        """Act on one adapter of a base model.

        Args:
            action: which.
            model_id: the base model.
            adapter_id: keeps the grammar.

        Raises:
            ModelNotFoundError: no such base model is served.
            ModelServiceError: what a replica said, or that none answered in time.
        """
        if model_id not in self._handles:
            raise ModelNotFoundError(model_id[:256])
        timeout_s = _LOAD_TIMEOUT_S if action is AdapterAction.LOAD else _TIMEOUT_S
        replicas = await self._call(model_id, timeout_s, "act_on_adapter", action.value, adapter_id)
        return {
            "action": action.value,
            "model": model_id,
            "adapter_id": adapter_id,
            "replicas": replicas,
        }

    async def tell_status(self) -> dict[str, Any]:
        """Return what every replica of every model with adapters holds.

        A model whose replicas do not answer has an ``error`` instead of them.
        """
        models = []
        for model_id in self._adapter_model_ids:
            entry: dict[str, Any] = {"model": model_id, "replicas": [], "error": None}
            try:
                entry["replicas"] = await self._call(model_id, _TIMEOUT_S, "adapter_status")
            except EngineDeadError as error:
                entry["error"] = str(error)
            models.append(entry)
        return {"object": "list", "data": models}

    async def find_model(self, adapter_id: str) -> str:
        """Return the base model that is meant where only an adapter is named.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: several have it.
            EngineDeadError: a model does not tell which it has.
        """
        if len(self._adapter_model_ids) == 1:
            # Its replicas know better than a list whether there is such an adapter.
            return self._adapter_model_ids[0]
        return await self._directory.find_model(adapter_id)

    async def _call(self, model_id: str, timeout_s: float, method: str, *args: str) -> list[Any]:
        try:
            response = self._handles[model_id].broadcast(method, *args)
            results = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError:
            raise EngineDeadError(
                f"not every replica of {model_id} answered within {timeout_s:g} s"
            ) from None
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            raise unwrap_ray_error(error) from None
        for result in results:
            if isinstance(result, Exception):
                raise unwrap_ray_error(result)
        if not results:
            raise EngineDeadError(f"no replica of {model_id} can be reached")
        return list(results)
