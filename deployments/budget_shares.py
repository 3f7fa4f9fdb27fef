"""One ingress's part of the budgets: what it has leased, spent, and must tell. Reads no clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from deployments.api_keys import ApiKey
from deployments.budget_records import AskRecord, ReplyRecord, UnitAskRecord, UnitReplyRecord
from deployments.budgets import SILENCE_S, slice_of, spare_of
from deployments.spending import SPAN_S, Unit, Window

Needs = Mapping[Unit, int]

# What was refused a moment ago is refused again without asking.
_REFUSAL_MEMORY_S = 1.0
# Silence after which the ledger may have forgotten this ingress, so that it tells all.
_WHOLE_AFTER_S = SILENCE_S / 2


@dataclasses.dataclass(slots=True)
class Seat:
    """What one request has taken of its key's budgets.

    Attributes:
        key_name: whose.
        second: in which it was taken, by the clock of the ingress.
        taken: unit -> amount that counts for it.
    """

    key_name: str
    second: int
    taken: dict[Unit, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a budget stands, as far as this ingress knows.

    Attributes:
        limit: what may be spent within the span.
        remaining: what is left, at least 0.
        next_s: seconds until some of it comes back; 0 if all is there.
        reset_s: seconds until all of it is back.
    """

    limit: int
    remaining: int
    next_s: float
    reset_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request may not run now.

    Attributes:
        unit: whose budget is spent.
        limit: how much there is of it.
        retry_after_s: seconds until there may be enough.
    """

    unit: Unit
    limit: int
    retry_after_s: float


class _Share:
    """One unit of one key."""

    __slots__ = (
        "asked_lease",
        "balance",
        "changed",
        "is_busy",
        "limit",
        "refused",
        "reply",
        "reply_s",
        "spent",
        "told_lease",
        "unit",
    )

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.spent = Window(SPAN_S[unit])
        self.limit = 0
        self.balance = 0
        # Seconds whose amounts the ledger does not know yet.
        self.changed: set[int] = set()
        self.asked_lease = 0
        # What the ledger counts as our lease; None if that is not known.
        self.told_lease: int | None = 0
        self.is_busy = False
        self.reply: UnitReplyRecord | None = None
        self.reply_s = -math.inf
        # The smallest need that the last reply could not serve; 0 if none.
        self.refused = 0

    @property
    def is_told(self) -> bool:
        """Whether the ledger knows all of it and has nothing to give."""
        return not self.changed and not self.is_busy and self.told_lease == self.balance

    @property
    def slice(self) -> int:
        return slice_of(self.unit, self.limit)

    def spend(self, second: int, amount: int) -> None:
        self.spent.set(second, self.spent.get(second) + amount)
        self.changed.add(second)
        self.balance = max(0, self.balance - amount)
        self.is_busy = True

    def give_back(self, second: int, amount: int) -> None:
        self.spent.set(second, max(0, self.spent.get(second) - amount))
        self.changed.add(second)
        # What is not kept is the ledger's again once it is told.
        free = 0 if self.reply is None else self.reply["free"]
        kept = spare_of(self.unit, self.limit, free)
        self.balance = min(max(self.balance, kept), self.balance + amount)

    def settle_down(self, now_s: float) -> bool:
        """Let go of a lease that nobody used; return whether anything is left to tell of."""
        if not self.is_busy:
            self.balance = 0
        self.is_busy = False
        return bool(self.spent.total(now_s) or not self.is_told or self.told_lease)


class BudgetShares:
    """What this ingress has leased and spent, key by key.

    Invariants: what it has spent and still holds of a unit is never more than what the ledger
    counts for it, forced charges apart (see ``charge``); after ``trim`` a lease is at most a slice.

    Owner: the ingress replica's event loop.
    """

    def __init__(self, ingress_id: str) -> None:
        """Hold nothing.

        Args:
            ingress_id: different for every process.
        """
        self._ingress_id = ingress_id
        self._shares: dict[str, dict[Unit, _Share]] = {}
        self._number = 0
        self._told_s = -math.inf
        self._in_flight: dict[tuple[str, Unit], set[int]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the ledger need not hear of this ingress."""
        return not self._shares

    def try_take(self, key: ApiKey, needs: Needs, now_s: float) -> Seat | None:
        """Spend of the leases; None if one of them has too little.

        Args:
            key: whose.
            needs: unit -> amount; a unit that the key has no limit of does not count.
            now_s: of this ingress's clock, never going back.
        """
        shares = {unit: self._share(key, unit) for unit in key.limits}
        if any(share.balance < needs[unit] for unit, share in shares.items()):
            return None
        second = math.floor(now_s)
        for unit, share in shares.items():
            share.spend(second, needs[unit])
        return Seat(key.name, second, {unit: needs[unit] for unit in shares})

    def charge(self, seat: Seat, unit: Unit, amount: int, now_s: float) -> None:
        """Make a seat's part of a unit this much: give the rest back, or take more.

        To take more is never refused: it has been used, and the next requests wait for it.

        Args:
            seat: as ``try_take`` gave it.
            unit: one that the key has no limit of changes nothing.
            amount: at least 0.
            now_s: as for ``try_take``.
        """
        before = seat.taken.get(unit)
        share = self._shares.get(seat.key_name, {}).get(unit)
        if before is None or before == amount:
            return
        seat.taken[unit] = amount
        if share is None or share.spent.is_over(seat.second, now_s):
            return
        if amount > before:
            share.spend(seat.second, amount - before)
        else:
            share.give_back(seat.second, before - amount)

    def recall_refusal(self, key: ApiKey, needs: Needs, now_s: float) -> Refusal | None:
        """Return why the ledger would refuse this, if it refused no more a moment ago."""
        for unit in key.limits:
            share = self._share(key, unit)
            is_recent = now_s - share.reply_s < _REFUSAL_MEMORY_S
            if is_recent and share.refused and needs[unit] >= share.refused > share.balance:
                return _refuse(share, unit, now_s)
        return None

    def refuse(self, key: ApiKey, needs: Needs, now_s: float) -> Refusal:
        """Return why a request that asked the ledger may still not run, and remember it."""
        shares = {unit: self._share(key, unit) for unit in key.limits}
        short = {unit: share for unit, share in shares.items() if share.balance < needs[unit]}
        for unit, share in short.items():
            share.refused = min(share.refused or needs[unit], needs[unit])
        refusals = [_refuse(share, unit, now_s) for unit, share in short.items()]
        return max(refusals, key=lambda refusal: refusal.retry_after_s)

    def ask(
        self, waiting: Iterable[tuple[ApiKey, Needs]], now_s: float, *, is_whole: bool = False
    ) -> AskRecord:
        """Return what to tell the ledger.

        Until ``hear`` or ``miss`` has been called there is no second message.

        Args:
            waiting: the requests that found too little.
            now_s: as for ``try_take``.
            is_whole: the ledger knows nothing of this ingress.
        """
        wanted: dict[tuple[str, Unit], list[int]] = {}
        for key, needs in waiting:
            for unit in key.limits:
                self._share(key, unit)
                wanted.setdefault((key.name, unit), []).append(needs[unit])
        is_whole = is_whole or now_s - self._told_s > _WHOLE_AFTER_S
        self._number += 1
        keys: dict[str, dict[str, UnitAskRecord]] = {}
        for name, shares in self._shares.items():
            is_told = all(
                share.is_told and (name, unit) not in wanted for unit, share in shares.items()
            )
            if is_told and not is_whole:
                continue
            keys[name] = {}
            for unit, share in shares.items():
                share.spent.total(now_s)
                seconds = set(share.spent.amounts) if is_whole else share.changed
                self._in_flight[name, unit] = share.changed
                share.changed = set()
                share.asked_lease = share.balance
                needs_of_all = wanted.get((name, unit), [])
                keys[name][unit.value] = UnitAskRecord(
                    limit=share.limit,
                    spent=[[second, share.spent.get(second)] for second in sorted(seconds)],
                    leased=share.balance,
                    need=max(0, sum(needs_of_all) - share.balance),
                    largest_need=max(needs_of_all, default=0),
                    is_busy=share.is_busy,
                )
        return AskRecord(
            ingress_id=self._ingress_id,
            number=self._number,
            clock_s=now_s,
            is_whole=is_whole,
            keys=keys,
        )

    def hear(self, reply: ReplyRecord, now_s: float) -> None:
        """Take in the answer to the last message of a ledger that knows this ingress."""
        self._told_s = now_s
        self._in_flight.clear()
        for name, units in reply["keys"].items():
            for unit, record in units.items():
                share = self._shares[name][Unit(unit)]
                share.balance += record["granted"]
                share.told_lease = share.asked_lease + record["granted"]
                share.reply = record
                share.reply_s = now_s
                share.refused = 0

    def miss(self) -> None:
        """Take in that the last message had no answer: whether it arrived nobody knows."""
        for (name, unit), seconds in self._in_flight.items():
            share = self._shares[name][unit]
            share.changed |= seconds
            share.told_lease = None
        self._in_flight.clear()

    def trim(self) -> None:
        """Let go of what is held beyond a slice; the next message tells it."""
        for shares in self._shares.values():
            for share in shares.values():
                share.balance = min(share.balance, share.slice)

    def rest(self, now_s: float) -> None:
        """Let go of leases that nobody has used since the last call, and of keys at rest."""
        for name, shares in list(self._shares.items()):
            # All of them: each has something to let go.
            is_told_of = [share.settle_down(now_s) for share in shares.values()]
            if not any(is_told_of):
                del self._shares[name]

    def standing(self, key: ApiKey, unit: Unit, now_s: float) -> Standing | None:
        """Return how a budget stands; None if the key has no limit of the unit."""
        limit = key.limits.get(unit)
        if limit is None:
            return None
        share = self._shares.get(key.name, {}).get(unit)
        reply = None if share is None else share.reply
        if share is None or reply is None:
            return Standing(limit=limit, remaining=limit, next_s=0.0, reset_s=0.0)
        age_s = now_s - share.reply_s
        next_s = reply["next_s"] - age_s
        if next_s <= 0:
            next_s = share.spent.first_end_s() - now_s
        reset_s = max(0.0, reply["reset_s"] - age_s, share.spent.last_end_s() - now_s)
        return Standing(
            limit=limit,
            remaining=min(limit, max(0, reply["free"] + share.balance)),
            next_s=max(0.0, next_s) if math.isfinite(next_s) else 0.0,
            reset_s=reset_s if math.isfinite(reset_s) else 0.0,
        )

    def _share(self, key: ApiKey, unit: Unit) -> _Share:
        shares = self._shares.setdefault(key.name, {})
        share = shares.get(unit)
        if share is None:
            share = shares[unit] = _Share(unit)
        share.limit = key.limits[unit]
        return share


def _refuse(share: _Share, unit: Unit, now_s: float) -> Refusal:
    told_s = 0.0 if share.reply is None else share.reply["retry_after_s"]
    return Refusal(
        unit=unit, limit=share.limit, retry_after_s=max(1.0, told_s - (now_s - share.reply_s))
    )
