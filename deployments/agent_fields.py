"""DigitalOcean's extensions for agents: accepted, without effect, answered with empty reports.

There are no knowledge bases, guardrails or functions of an agent here. Their clients send these
fields all the same, the filled-in example with its zeros too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.wire_model import WireModel

_MAX_FILTERS = 64
_MAX_INSTRUCTION_CHARACTERS = 65_536
# A client that fills in the example of DigitalOcean's page asks for nothing with these.
_ZERO_IS_ABSENT = ("max_tokens", "max_completion_tokens", "k")


class KnowledgeBaseFilter(WireModel):
    """One of ``kb_filters``."""

    index: str | None = None
    path: str | None = None


class AgentFields(WireModel):
    """Fields that a live agent's endpoint has."""

    k: Annotated[int, Field(ge=0)] | None = None
    retrieval_method: Literal["rewrite", "step_back", "sub_queries", "none"] | None = None
    kb_filters: Annotated[list[KnowledgeBaseFilter], Field(max_length=_MAX_FILTERS)] | None = None
    filter_kb_content_by_query_metadata: bool | None = None
    instruction_override: Annotated[str, Field(max_length=_MAX_INSTRUCTION_CHARACTERS)] | None = (
        None
    )
    include_retrieval_info: bool | None = None
    include_functions_info: bool | None = None
    include_guardrails_info: bool | None = None
    provide_citations: bool | None = None

    @property
    def agent_reports(self) -> dict[str, Any]:
        """The reports that are asked for, with nothing in them."""
        reports: dict[str, Any] = {}
        if self.include_retrieval_info:
            reports["retrieval"] = {"retrieved_data": []}
        if self.include_functions_info:
            reports["functions"] = {"called_functions": []}
        if self.include_guardrails_info:
            reports["guardrails"] = {"triggered_guardrails": []}
        return reports

    @property
    def agent_fields_without_effect(self) -> tuple[str, ...]:
        """Those of them that ask for something which is not done here."""
        return tuple(
            name
            for name in AgentFields.model_fields
            if not name.startswith("include_") and getattr(self, name) not in (None, 0, "none", [])
        )


def read_agent_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an agent's request as those of a chat request.

    Without the zeros that stand for "not given"; ``model`` may be missing, since an agent has one.
    """
    given = {
        name: value
        for name, value in body.items()
        if not (name in _ZERO_IS_ABSENT and type(value) is int and value == 0)
    }
    return given if given.get("model") is not None else {**given, "model": ""}
