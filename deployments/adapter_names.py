"""How a request names a model and an adapter: grammar and contradictions. Looks nothing up."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from models.adapters.ids import check_adapter_id, is_adapter_id
from models.errors import InvalidAdapterIdError, InvalidRequestError, ModelNotFoundError

_MAX_SHOWN_CHARACTERS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSelector:
    """A field that names an adapter.

    Attributes:
        field: of the request.
        adapter_id: keeps the grammar.
    """

    field: str
    adapter_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """What the field ``model`` names.

    Attributes:
        model_id: a base model; None if the name can only be an adapter's.
        adapter_id: an adapter of it, or of some base model; None is the base model itself.
    """

    model_id: str | None
    adapter_id: str | None


def check_named_adapter(field: str, adapter_id: str) -> None:
    """Check what a field names an adapter by.

    Raises:
        InvalidRequestError: it breaks the grammar of adapter ids.
    """
    try:
        check_adapter_id(adapter_id)
    except InvalidAdapterIdError as error:
        raise InvalidRequestError(field, str(error)) from None


def read_selectors(values: Mapping[str, str]) -> AdapterSelector | None:
    """Return the one adapter that fields name, or None.

    Args:
        values: field -> id; "" names none.

    Raises:
        InvalidRequestError: an id breaks the grammar, or two fields disagree.
    """
    chosen: AdapterSelector | None = None
    for field, adapter_id in values.items():
        if not adapter_id:
            continue
        check_named_adapter(field, adapter_id)
        selector = AdapterSelector(field=field, adapter_id=adapter_id)
        chosen = agree(chosen, selector)
    return chosen


def agree(first: AdapterSelector | None, second: AdapterSelector) -> AdapterSelector:
    """Return what two selectors name together.

    Args:
        first: None agrees with everything.
        second: as it came later.

    Raises:
        InvalidRequestError: they name different adapters.
    """
    if first is not None and first.adapter_id != second.adapter_id:
        raise InvalidRequestError(
            second.field,
            f"names the adapter '{second.adapter_id}', but {first.field} names "
            f"'{first.adapter_id}'",
        )
    return first or second


def read_model_name(name: str, model_ids: Collection[str]) -> ModelName:
    """Read the field ``model``: a base model, ``<base>:<adapter>``, or an adapter.

    A base model goes before an adapter of the same name.

    Args:
        name: as the request has it.
        model_ids: the base models.

    Raises:
        ModelNotFoundError: it can be none of them.
        InvalidRequestError: what follows a base model's name is no adapter id.
    """
    if name in model_ids:
        return ModelName(model_id=name, adapter_id=None)
    # No adapter id has a ":", a base model's may.
    model_id, colon, adapter_id = name.rpartition(":")
    if colon and model_id in model_ids:
        check_named_adapter("model", adapter_id)
        return ModelName(model_id=model_id, adapter_id=adapter_id)
    if not is_adapter_id(name):
        raise ModelNotFoundError(name[:_MAX_SHOWN_CHARACTERS])
    return ModelName(model_id=None, adapter_id=name)
