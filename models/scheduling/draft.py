"""What the scheduler keeps of a request, and a plan in the making. Decides nothing."""

from __future__ import annotations

import dataclasses

from models.kv_cache.prefix_index import ChainNamespace
from models.scheduling.sequence import Sequence
from models.scheduling.step_plan import JoiningSequence, ScheduledSequence


@dataclasses.dataclass(slots=True)
class RequestGroup:
    """The unfinished choices of one request.

    Attributes:
        members: by seq_id, lowest choice first.
        namespace: where their prompt KV is shared.
        is_leader_needed: the others wait until one of them has computed the prompt.
        leader_seq_id: who is computing the prompt now.
    """

    members: dict[int, Sequence]
    namespace: ChainNamespace
    is_leader_needed: bool
    leader_seq_id: int | None = None


@dataclasses.dataclass(slots=True)
class DraftPlan:
    """A plan in the making: what it may still take and what it has taken."""

    num_tokens_left: int
    num_scored_left: int
    rows: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    joining: list[JoiningSequence] = dataclasses.field(default_factory=list)
