"""The base of every pydantic model of a request."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """What all parts of a request share: strict types, unknown fields kept aside, immutable."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
