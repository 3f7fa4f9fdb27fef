"""The budgets of all keys, over all ingress replicas: who may spend how much. Reads no clock.

A lease is an amount that an ingress may spend without asking; it counts as spent until the
ingress tells what became of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from deployments.budget_records import (
    AskRecord,
    ReplyRecord,
    UnitAskRecord,
    UnitReplyRecord,
)
from deployments.spending import SPAN_S, Unit, Window

# An ingress that is silent for so long is gone. It tells of itself every second while it has
# anything to tell.
SILENCE_S = 10.0
# After it was lost, the ledger grants nothing for two of these seconds: all tell meanwhile.
GRACE_S = 2.0
# Beyond what waiting requests need, an ingress gets at most this part of a budget, and at most this
# part of what is free: the nearer the end of a budget, the more exact it is.
_SLICE_PARTS = {Unit.TOKENS: 20, Unit.REQUESTS: 20, Unit.RUNNING: 4}
_FREE_PARTS = {Unit.TOKENS: 8, Unit.REQUESTS: 8, Unit.RUNNING: 4}
# When running requests end nobody knows.
_RUNNING_RETRY_S = 1.0


def slice_of(unit: Unit, limit: int) -> int:
    """Return the most that an ingress holds unspent: the slice that it may lease at once."""
    return limit // _SLICE_PARTS[unit]


def spare_of(unit: Unit, limit: int, free: int) -> int:
    """Return what an ingress may hold unspent while so much is free besides."""
    return max(0, min(slice_of(unit, limit), free // _FREE_PARTS[unit]))


class _Account:
    """What one ingress has spent and leased of one unit of one key."""

    __slots__ = ("leased", "spent")

    def __init__(self, span_s: float) -> None:
        self.spent = Window(span_s)
        self.leased = 0


class _Ingress:
    """What is known of one ingress."""

    __slots__ = ("accounts", "clock_lag_s", "is_gone", "number", "seen_s")

    def __init__(self) -> None:
        # (key name, unit) -> account
        self.accounts: dict[tuple[str, Unit], _Account] = {}
        self.number = 0
        self.seen_s = 0.0
        self.clock_lag_s = 0.0
        self.is_gone = False

    def clock(self, now_s: float) -> float:
        """Return its own time; never more than it is, as messages take a while."""
        return now_s - self.clock_lag_s


class BudgetLedger:
    """Counts what ingress replicas spend, and leases what is left.

    Invariant: of no unit of a key is more spent (within its span) and leased than its limit,
    except for what the ingresses spend without a lease that counts: prompts that are longer than
    foreseen, and the one slice that each may still hold after the ledger was lost or after the
    ingress could not reach it for long.

    Owner: the actor's event loop.
    """

    def __init__(self, start_s: float, grace_s: float = 0.0) -> None:
        """Know of nobody.

        Args:
            start_s: now, in seconds of a monotonic clock.
            grace_s: how long it grants nothing, because there was a ledger before it.
        """
        self._ready_s = start_s + grace_s
        self._ingresses: dict[str, _Ingress] = {}

    def answer(self, ask: AskRecord, now_s: float) -> ReplyRecord:
        """Note what an ingress tells and grant what it asks.

        Args:
            ask: its message.
            now_s: seconds of the ledger's clock.
        """
        self._forget_silent(now_s)
        ingress = self._ingresses.get(ask["ingress_id"])
        if not ask["is_whole"] and (ingress is None or ingress.is_gone):
            return ReplyRecord(is_known=False, is_ready=self._is_ready(now_s), keys={})
        if ingress is None:
            ingress = self._ingresses[ask["ingress_id"]] = _Ingress()
        if ask["number"] <= ingress.number:
            # Overtaken by a later one.
            return ReplyRecord(is_known=False, is_ready=False, keys={})
        self._note(ingress, ask, now_s)
        is_ready = self._is_ready(now_s)
        keys = {
            name: {
                unit: self._grant(ingress, name, Unit(unit), record, now_s)
                for unit, record in units.items()
            }
            for name, units in ask["keys"].items()
        }
        return ReplyRecord(is_known=True, is_ready=is_ready, keys=keys)

    def used(self, key_name: str, unit: Unit, now_s: float) -> int:
        """Return what of a unit of a key is spent and leased."""
        return sum(
            account.spent.total(ingress.clock(now_s)) + account.leased
            for ingress, account in self._accounts(key_name, unit)
        )

    def _is_ready(self, now_s: float) -> bool:
        return now_s >= self._ready_s

    def _note(self, ingress: _Ingress, ask: AskRecord, now_s: float) -> None:
        ingress.number = ask["number"]
        ingress.seen_s = now_s
        ingress.clock_lag_s = now_s - ask["clock_s"]
        ingress.is_gone = False
        if ask["is_whole"]:
            ingress.accounts.clear()
        for name, units in ask["keys"].items():
            for unit, record in units.items():
                account = ingress.accounts.setdefault(
                    (name, Unit(unit)), _Account(SPAN_S[Unit(unit)])
                )
                account.leased = record["leased"]
                for second, amount in record["spent"]:
                    account.spent.set(second, amount)

    def _grant(
        self, ingress: _Ingress, key_name: str, unit: Unit, record: UnitAskRecord, now_s: float
    ) -> UnitReplyRecord:
        limit = record["limit"]
        free = limit - self.used(key_name, unit, now_s)
        granted = 0
        if self._is_ready(now_s):
            granted = max(0, min(record["need"], free))
            if record["is_busy"] or record["need"]:
                # Who needs more than its lease is about to spend that.
                held = 0 if record["need"] else record["leased"]
                granted += max(0, spare_of(unit, limit, free - granted) - held)
        account = ingress.accounts[key_name, unit]
        account.leased += granted
        if not account.leased and not account.spent.amounts:
            del ingress.accounts[key_name, unit]
        free -= granted
        retry_after_s = 0.0
        if granted < record["need"]:
            endings = sorted(self._endings(key_name, unit, now_s))
            retry_after_s = _wait_s(endings, record["largest_need"] - free)
        windows = [
            (account.spent, other.clock(now_s)) for other, account in self._accounts(key_name, unit)
        ]
        next_s = min((spent.first_end_s() - clock_s for spent, clock_s in windows), default=0.0)
        reset_s = max((spent.last_end_s() - clock_s for spent, clock_s in windows), default=0.0)
        return UnitReplyRecord(
            granted=granted,
            free=free,
            next_s=max(0.0, next_s) if math.isfinite(next_s) else 0.0,
            reset_s=max(0.0, reset_s) if math.isfinite(reset_s) else 0.0,
            retry_after_s=retry_after_s,
        )

    def _accounts(self, key_name: str, unit: Unit) -> Iterator[tuple[_Ingress, _Account]]:
        for ingress in self._ingresses.values():
            account = ingress.accounts.get((key_name, unit))
            if account is not None:
                yield ingress, account

    def _endings(self, key_name: str, unit: Unit, now_s: float) -> Iterator[tuple[float, int]]:
        """Yield (seconds from now, amount) of what ends to count."""
        for ingress, account in self._accounts(key_name, unit):
            for time_s, amount in account.spent.endings():
                if math.isfinite(time_s):
                    yield max(0.0, time_s - ingress.clock(now_s)), amount

    def _forget_silent(self, now_s: float) -> None:
        """End the running requests of who is gone; what it had leased may have been spent."""
        for ingress_id, ingress in list(self._ingresses.items()):
            if now_s - ingress.seen_s <= SILENCE_S:
                continue
            ingress.is_gone = True
            clock_s = ingress.clock(now_s)
            for place, account in list(ingress.accounts.items()):
                second = math.floor(clock_s)
                account.spent.set(second, account.spent.get(second) + account.leased)
                account.leased = 0
                if place[1] is Unit.RUNNING or not account.spent.total(clock_s):
                    del ingress.accounts[place]
            if not ingress.accounts:
                del self._ingresses[ingress_id]


def _wait_s(endings: list[tuple[float, int]], amount: int) -> float:
    """Return the seconds until an amount more is free."""
    for time_s, ended in endings:
        amount -= ended
        if amount <= 0:
            return time_s
    return endings[-1][0] if endings else _RUNNING_RETRY_S
