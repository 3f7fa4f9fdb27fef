"""Which models and adapters there are, and which of them a request means."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from deployments.access_rules import check_meaning, check_name, is_listed
from deployments.adapter_catalogues import AdapterCatalogues
from deployments.adapter_names import AdapterSelector, agree, read_model_name
from deployments.api_keys import EVERYTHING, Grants
from models.errors import InvalidRequestError, ModelNotFoundError

# Of all base models together; about 2 MB of JSON.
MAX_LISTED_ADAPTERS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one request runs on.

    Attributes:
        model_id: the base model.
        adapter_id: the adapter on top of it; None is the base model alone.
        is_default: the request named no model that there is.
    """

    model_id: str
    adapter_id: str | None
    is_default: bool = False


class ModelDirectory:
    """The base models and their adapters.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self, model_ids: Sequence[str], catalogues: AdapterCatalogues, created_s: int
    ) -> None:
        """Look nothing up yet.

        Args:
            model_ids: the base models; the first one is an agent's.
            catalogues: which adapters they have.
            created_s: Unix time in seconds that is told of every model.
        """
        self._model_ids = model_ids
        self._catalogues = catalogues
        self._created_s = created_s

    async def select(
        self,
        name: str,
        selector: AdapterSelector | None,
        *,
        is_agent: bool = False,
        grants: Grants = EVERYTHING,
    ) -> Selection:
        """Return what a request means.

        Only a bare adapter id as ``name`` is looked up here; whether a base model has an adapter
        is its replica's to say.

        Args:
            name: the field ``model``.
            selector: the field that names an adapter, if one does.
            is_agent: the request is for an agent, which has one model whatever ``name`` says:
                what names nothing here means the first model.
            grants: what the caller may name.

        Raises:
            ModelNotFoundError: ``name`` is neither a base model nor an adapter.
            InvalidRequestError: the two disagree, or ``name`` is an adapter of several models.
            EngineDeadError: a model that may have the adapter does not answer.
            ModelNotAllowedError, AdapterNotAllowedError: it is not for this caller.
        """
        if not is_agent:
            check_name(grants, name, selector, self._model_ids)
        try:
            named = read_model_name(name, self._model_ids)
            model_id = named.model_id or await self.find_model(name)
        except ModelNotFoundError:
            if not is_agent:
                raise
            check_meaning(grants, self._model_ids[0], selector)
            return Selection(
                model_id=self._model_ids[0],
                adapter_id=None if selector is None else selector.adapter_id,
                is_default=True,
            )
        if named.adapter_id is not None:
            in_name = AdapterSelector(field="model", adapter_id=named.adapter_id)
            selector = agree(selector, in_name)
        check_meaning(grants, model_id, selector)
        return Selection(
            model_id=model_id, adapter_id=None if selector is None else selector.adapter_id
        )

    async def list_models(self, grants: Grants = EVERYTHING) -> dict[str, Any]:
        """Return the list of base models and of their adapters.

        An adapter bears the name that selects it: its id, or ``<base>:<id>`` where its id alone
        would mean something else.

        Args:
            grants: what the caller may name; nothing else is listed.
        """
        catalogues = await self._catalogues.read()
        times = Counter(itertools.chain(self._model_ids, *catalogues.values()))

        def adapters() -> Iterator[dict[str, Any]]:
            for model_id, adapter_ids in catalogues.items():
                for adapter_id in adapter_ids:
                    is_clear = times[adapter_id] == 1
                    name = adapter_id if is_clear else f"{model_id}:{adapter_id}"
                    yield self._describe_adapter(name, model_id, adapter_id)

        bases = (self._describe_base(model_id) for model_id in self._model_ids)
        data = [base for base in bases if is_listed(grants, base)]
        listed = (adapter for adapter in adapters() if is_listed(grants, adapter))
        data += itertools.islice(listed, MAX_LISTED_ADAPTERS)
        return {"object": "list", "data": data}

    async def get_model(self, name: str, grants: Grants = EVERYTHING) -> dict[str, Any]:
        """Return one base model or adapter.

        Args:
            name: as in the field ``model`` of a request.
            grants: what the caller may name.

        Raises:
            ModelNotFoundError: there is none.
            InvalidRequestError: it names an adapter of several models.
            EngineDeadError: a model that may have the adapter does not answer.
            ModelNotAllowedError, AdapterNotAllowedError: it is not for this caller.
        """
        check_name(grants, name, None, self._model_ids)
        named = read_model_name(name, self._model_ids)
        if named.adapter_id is None:
            return self._describe_base(name)
        if named.model_id is None:
            model_id = await self.find_model(name)
            check_meaning(grants, model_id, None)
            return self._describe_adapter(name, model_id, name)
        if named.model_id not in await self._catalogues.find_models(named.adapter_id):
            raise ModelNotFoundError(name)
        return self._describe_adapter(name, named.model_id, named.adapter_id)

    async def find_model(self, adapter_id: str) -> str:
        """Return the one base model that has an adapter.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: several have it.
            EngineDeadError: none is known to have it, and one does not answer.
        """
        found = await self._catalogues.find_models(adapter_id)
        if not found:
            raise ModelNotFoundError(adapter_id)
        if len(found) > 1:
            names = " and ".join(f"'{model_id}:{adapter_id}'" for model_id in found)
            raise InvalidRequestError("model", f"'{adapter_id}' may mean {names}; name one of them")
        return found[0]

    def _describe_base(self, model_id: str) -> dict[str, Any]:
        return self._describe(model_id, root=model_id, parent=None)

    def _describe_adapter(self, name: str, model_id: str, adapter_id: str) -> dict[str, Any]:
        return self._describe(name, root=adapter_id, parent=model_id)

    def _describe(self, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "medley",
            "root": root,
            "parent": parent,
        }
