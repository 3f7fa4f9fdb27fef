"""What a caller's key allows of what requests name. Looks nothing up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deployments.adapter_names import AdapterSelector, read_model_name
from deployments.api_keys import EVERYTHING, Grants
from deployments.http_errors import AdapterNotAllowedError, ModelNotAllowedError
from models.errors import InvalidRequestError, ModelNotFoundError

_MODEL_FIELD = "model"


def check_name(
    grants: Grants, name: str, selector: AdapterSelector | None, model_ids: Collection[str]
) -> None:
    """Check what a request names before anybody tells whether there is such a thing.

    So who may not use an adapter cannot find out that there is one. What names nothing is not
    refused here.

    Args:
        grants: the caller's.
        name: the field ``model``.
        selector: the field that names an adapter, if one does.
        model_ids: the base models.

    Raises:
        ModelNotAllowedError, AdapterNotAllowedError: the key does not allow it.
    """
    if grants is EVERYTHING:
        return
    _check_adapter(grants, selector)
    try:
        named = read_model_name(name, model_ids)
    except (ModelNotFoundError, InvalidRequestError):
        return
    if named.model_id is not None and not grants.allows_model(named.model_id):
        raise ModelNotAllowedError(named.model_id)
    if named.adapter_id is not None:
        _check_adapter(grants, AdapterSelector(field=_MODEL_FIELD, adapter_id=named.adapter_id))


def check_meaning(grants: Grants, model_id: str, selector: AdapterSelector | None) -> None:
    """Check what a request was found to mean.

    Args:
        grants: the caller's.
        model_id: the base model.
        selector: the adapter and the field that names it; None is the base model alone.

    Raises:
        ModelNotAllowedError, AdapterNotAllowedError: the key does not allow it.
    """
    if grants is EVERYTHING:
        return
    if not grants.allows_model(model_id):
        raise ModelNotAllowedError(model_id)
    _check_adapter(grants, selector)


def is_listed(grants: Grants, entry: Mapping[str, Any]) -> bool:
    """Whether a caller sees an entry of the list of models.

    Args:
        grants: the caller's.
        entry: with ``root``, and for an adapter its base model as ``parent``.
    """
    if entry["parent"] is None:
        return grants.allows_model(entry["root"])
    return grants.allows_model(entry["parent"]) and grants.allows_adapter(entry["root"])


def _check_adapter(grants: Grants, selector: AdapterSelector | None) -> None:
    if selector is not None and not grants.allows_adapter(selector.adapter_id):
        raise AdapterNotAllowedError(selector.adapter_id, selector.field)
