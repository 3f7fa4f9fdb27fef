"""What ingress replicas and the actor of the budgets tell each other: the one written schema.

Plain dicts, so that both sides may run different versions. Every amount is absolute, so that a
message that is lost, or told twice, counts nothing twice. Seconds are of the ingress's own clock.
"""

from __future__ import annotations

from typing import TypedDict


class UnitAskRecord(TypedDict):
    """One unit of one key, as an ingress sees it.

    ``spent`` has [second, amount] of every second that has changed. ``leased`` is what the ingress
    holds and has not spent, ``need`` what its waiting requests want beyond that, ``largest_need``
    the most that one of them wants; ``is_busy`` asks for some more besides.
    """

    limit: int
    spent: list[list[int]]
    leased: int
    need: int
    largest_need: int
    is_busy: bool


class AskRecord(TypedDict):
    """What one ingress tells and asks; ``keys`` is key name -> unit -> record.

    With ``is_whole`` it holds all that the ingress has spent and leased. ``number`` rises with
    every message of an ingress.
    """

    ingress_id: str
    number: int
    clock_s: float
    is_whole: bool
    keys: dict[str, dict[str, UnitAskRecord]]


class UnitReplyRecord(TypedDict):
    """What the ingress may spend besides (``granted``), and how the budget stands.

    ``free`` is what nobody has spent or leased, below 0 where more was spent than foreseen.
    ``next_s`` and ``reset_s`` are the seconds until the first and the last of what was spent
    ends to count, ``retry_after_s`` those until ``largest_need`` may be free.
    """

    granted: int
    free: int
    next_s: float
    reset_s: float
    retry_after_s: float


class ReplyRecord(TypedDict):
    """The answer to an AskRecord.

    Without ``is_known`` the actor knows nothing of this ingress and wants a whole message; without
    ``is_ready`` it has begun just now and waits for what others tell. Either way nothing is
    granted.
    """

    is_known: bool
    is_ready: bool
    keys: dict[str, dict[str, UnitReplyRecord]]
