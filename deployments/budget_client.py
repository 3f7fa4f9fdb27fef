"""Takes budgets for requests: of this ingress's leases at once, or else of the ledger by a message.

Knows no Ray: how the ledger is reached is passed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from deployments.api_keys import ApiKey
from deployments.budget_actor import Budgets, LedgerGoneError
from deployments.budget_records import ReplyRecord
from deployments.budget_shares import BudgetShares, Needs, Refusal, Seat, Standing
from deployments.http_errors import (
    BudgetSpentError,
    BudgetsUnavailableError,
    RequestOverBudgetError,
)
from deployments.spending import Unit

# Serve writes this logger to the replica's log file.
_logger = logging.getLogger("ray.serve")

# How often the ledger hears of this ingress, and how soon it is tried again after it was away.
_INTERVAL_S = 1.0
_RETRY_S = 0.25
_ANSWER_TIMEOUT_S = 1.0
# What a request waits at most while the ledger is away: about what a new one takes to start.
_WAIT_S = 5.0

# Called in a thread; whether there was a ledger before is the argument.
Connect = Callable[[bool], Budgets]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A request that found too little in the leases."""

    key: ApiKey
    needs: Needs
    seat: asyncio.Future[Seat]


class BudgetClient:
    """One ingress's way to the budgets.

    While the ledger is away, requests go on as far as the last leases reach.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self,
        shares: BudgetShares,
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = _WAIT_S,
    ) -> None:
        """Ask nobody yet.

        Args:
            shares: of this ingress, new.
            connect: reaches the ledger.
            clock: seconds, never going back.
            wait_s: what a request waits at most for an answer.
        """
        self._shares = shares
        self._connect = connect
        self._clock = clock
        self._wait_s = wait_s
        self._ledger: Budgets | None = None
        self._connecting = threading.Lock()
        self._has_met_ledger = False
        self._is_away = False
        self._waiters: list[_Waiter] = []
        self._has_waiters = asyncio.Event()
        self._rested_s = clock()
        self._task: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Reach the ledger in a thread, so that it stands when the first request comes."""
        threading.Thread(target=self._reach_early, name="budgets", daemon=True).start()

    async def take(self, key: ApiKey, num_tokens: int) -> Seat:
        """Take what one request needs of its key's budgets.

        Args:
            key: of the caller, with limits.
            num_tokens: how many the prompt and the answer may have.

        Raises:
            RequestOverBudgetError: the key never has so many.
            BudgetSpentError: the key has too little left.
            BudgetsUnavailableError: the ledger does not answer, and the lease is too small.
        """
        limit = key.limits.get(Unit.TOKENS, num_tokens)
        if num_tokens > limit:
            raise RequestOverBudgetError(num_tokens, limit)
        needs = {Unit.TOKENS: num_tokens, Unit.REQUESTS: 1, Unit.RUNNING: 1}
        now_s = self._clock()
        seat = self._shares.try_take(key, needs, now_s)
        if self._task is None:
            # In a context of its own: what it logs has nothing to do with this request's id.
            self._task = asyncio.create_task(self._keep_telling(), context=contextvars.Context())
        if seat is not None:
            return seat
        refusal = self._shares.recall_refusal(key, needs, now_s)
        if refusal is not None:
            raise _to_error(refusal)
        return await self._wait(key, needs)

    def charge_tokens(self, seat: Seat, num_tokens: int) -> None:
        """Make it so many tokens that a request is charged for."""
        self._shares.charge(seat, Unit.TOKENS, num_tokens, self._clock())

    def end(self, seat: Seat, *, is_counted: bool) -> None:
        """Tell that a request does not run any more.

        Args:
            seat: of the request.
            is_counted: it counts as a request; else it has never been.
        """
        now_s = self._clock()
        self._shares.charge(seat, Unit.RUNNING, 0, now_s)
        if not is_counted:
            self._shares.charge(seat, Unit.REQUESTS, 0, now_s)
            self._shares.charge(seat, Unit.TOKENS, 0, now_s)

    def standing(self, key: ApiKey, unit: Unit) -> Standing | None:
        """Return how a key's budget stands; None if it has no limit of the unit."""
        return self._shares.standing(key, unit, self._clock())

    async def close(self) -> None:
        """Tell the ledger nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _wait(self, key: ApiKey, needs: Needs) -> Seat:
        waiter = _Waiter(key, needs, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._has_waiters.set()
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(waiter.seat)
        except TimeoutError:
            if waiter.seat.done():
                return waiter.seat.result()
            raise BudgetsUnavailableError from None
        except asyncio.CancelledError:
            # The seat may have come in the same moment.
            if waiter.seat.done() and waiter.seat.exception() is None:
                self.end(waiter.seat.result(), is_counted=False)
            raise
        finally:
            waiter.seat.cancel()
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    async def _keep_telling(self) -> None:
        """Ask for who waits, and tell every second, until there is nothing to tell."""
        try:
            while self._waiters or not self._shares.is_idle:
                is_answered = await self._tell()
                self._rest()
                if not is_answered:
                    await asyncio.sleep(_RETRY_S)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_S):
                        await self._has_waiters.wait()
                self._has_waiters.clear()
        finally:
            self._task = None

    def _rest(self) -> None:
        now_s = self._clock()
        if now_s - self._rested_s >= _INTERVAL_S:
            self._rested_s = now_s
            self._shares.rest(now_s)

    async def _tell(self) -> bool:
        """Send one message and serve who waited for it; return whether it was answered."""
        waiters = list(self._waiters)
        waiting = [(waiter.key, waiter.needs) for waiter in waiters]
        for is_whole in (False, True):
            ask = self._shares.ask(waiting, self._clock(), is_whole=is_whole)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    reply = await (await self._reach()).answer(ask)
            except Exception as error:  # noqa: BLE001 - whatever it is, the ledger is away
                self._shares.miss()
                self._note_absence(error)
                return False
            except asyncio.CancelledError:
                self._shares.miss()
                raise
            if reply["is_known"]:
                return self._hear(reply, waiters)
            self._shares.miss()
        return False

    def _hear(self, reply: ReplyRecord, waiters: list[_Waiter]) -> bool:
        now_s = self._clock()
        self._has_met_ledger = True
        self._shares.hear(reply, now_s)
        if not reply["is_ready"]:
            return False
        if self._is_away:
            self._is_away = False
            _logger.warning("the budgets of keys are counted again")
        for waiter in waiters:
            if waiter.seat.done():
                continue
            seat = self._shares.try_take(waiter.key, waiter.needs, now_s)
            if seat is None:
                refusal = self._shares.refuse(waiter.key, waiter.needs, now_s)
                waiter.seat.set_exception(_to_error(refusal))
            else:
                waiter.seat.set_result(seat)
            self._waiters.remove(waiter)
        self._shares.trim()
        return True

    async def _reach(self) -> Budgets:
        if self._ledger is not None:
            return self._ledger
        return await asyncio.to_thread(self._reach_once)

    def _reach_once(self) -> Budgets:
        # In a thread, and never twice: a second handle in the place of the first would end an
        # actor that was made with the first.
        with self._connecting:
            if self._ledger is None:
                self._ledger = self._connect(self._has_met_ledger)
            return self._ledger

    def _reach_early(self) -> None:
        try:
            self._reach_once()
        except Exception as error:  # noqa: BLE001 - the first request tries again, and tells
            _logger.info("the budgets of keys cannot be reached yet: %s", type(error).__name__)

    def _note_absence(self, error: Exception) -> None:
        if isinstance(error, LedgerGoneError):
            self._ledger = None
        if not self._is_away:
            self._is_away = True
            _logger.warning(
                "the budgets of keys cannot be reached (%s); what was leased last is used on",
                type(error).__name__,
            )


def _to_error(refusal: Refusal) -> BudgetSpentError:
    unit = {
        Unit.TOKENS: "tokens a minute",
        Unit.REQUESTS: "requests a minute",
        Unit.RUNNING: "running requests",
    }[refusal.unit]
    return BudgetSpentError(unit, refusal.limit, refusal.retry_after_s)
