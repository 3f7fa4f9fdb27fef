"""The ingress's side of the budgets with a ledger that is away, slow, lost or full."""

import asyncio
import logging
import time

import pytest

from deployments import budget_client
from deployments.api_keys import ApiKey
from deployments.budget_actor import LedgerGoneError
from deployments.budget_client import BudgetClient
from deployments.budget_shares import BudgetShares, Seat
from deployments.budgets import GRACE_S, BudgetLedger
from deployments.http_errors import (
    BudgetSpentError,
    BudgetsUnavailableError,
    RequestOverBudgetError,
)
from deployments.spending import Unit

pytestmark = pytest.mark.anyio

KEY = ApiKey(
    name="team",
    digest=b"",
    tokens_per_minute=10_000,
    requests_per_minute=100,
    max_running_requests=16,
)


class FakeBudgets:
    """A ledger in this process, which can be away, or hang."""

    def __init__(self, grace_s=0.0):
        self.ledger = BudgetLedger(time.monotonic(), grace_s)
        self.is_away = False
        self.is_hanging = False
        self.is_gone_once = False
        self.num_asked = 0
        self.was_successor = []

    def connect(self, is_successor):
        self.was_successor.append(is_successor)
        return self

    async def answer(self, ask):
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_gone_once:
            self.is_gone_once = False
            raise LedgerGoneError
        if self.is_away:
            raise ConnectionError("away")
        if self.is_hanging:
            await asyncio.sleep(3600)
        return self.ledger.answer(ask, time.monotonic())

    def used(self, unit):
        return self.ledger.used(KEY.name, unit, time.monotonic())


@pytest.fixture
def budgets():
    return FakeBudgets()


@pytest.fixture
def quick(monkeypatch):
    """Hear and retry ten times as often."""
    monkeypatch.setattr(budget_client, "_INTERVAL_S", 0.1)
    monkeypatch.setattr(budget_client, "_RETRY_S", 0.02)
    monkeypatch.setattr(budget_client, "_ANSWER_TIMEOUT_S", 0.1)


def make_client(budgets, name="one", wait_s=5.0):
    return BudgetClient(BudgetShares(name), budgets.connect, wait_s=wait_s)


async def test_a_request_takes_its_part_and_gives_back_the_rest(budgets, quick):
    client = make_client(budgets)

    seat = await client.take(KEY, 600)
    assert (budgets.used(Unit.RUNNING), budgets.used(Unit.REQUESTS)) >= (1, 1)
    assert budgets.used(Unit.TOKENS) >= 600
    client.charge_tokens(seat, 50)
    client.end(seat, is_counted=True)
    await asyncio.sleep(0.35)

    assert budgets.used(Unit.TOKENS) == 50
    assert budgets.used(Unit.REQUESTS) == 1
    assert budgets.used(Unit.RUNNING) == 0
    await client.close()


async def test_what_does_not_count_leaves_nothing(budgets, quick):
    client = make_client(budgets)

    seat = await client.take(KEY, 600)
    client.end(seat, is_counted=False)
    await asyncio.sleep(0.35)

    assert [budgets.used(unit) for unit in Unit] == [0, 0, 0]
    await client.close()


async def test_a_hundred_requests_at_once_need_few_messages(budgets):
    client = make_client(budgets)
    key = ApiKey(name="team", digest=b"", requests_per_minute=150)

    seats = await asyncio.gather(*(client.take(key, 10) for _ in range(100)))

    assert len(seats) == 100
    assert budgets.num_asked <= 5
    await client.close()


async def test_two_ingresses_share_one_budget_to_the_last_request(budgets, quick):
    clients = [make_client(budgets, name) for name in ("one", "two")]

    async def take(number):
        client = clients[number % 2]
        client.end(await client.take(KEY, 1), is_counted=True)
        return number + 1

    async def take_all():
        for number in range(2 * KEY.requests_per_minute):
            nonlocal served
            served = await take(number)

    served = 0
    with pytest.raises(BudgetSpentError) as caught:
        await take_all()

    # What the other one still holds of a lease is not lost: it comes back with its next message.
    assert KEY.requests_per_minute - 5 <= served <= KEY.requests_per_minute
    assert "limit of 100 requests a minute" in str(caught.value)
    assert 50 < caught.value.retry_after_s <= 61
    for client in clients:
        await client.close()


async def test_what_never_fits_is_told_apart_from_what_does_not_fit_now(budgets):
    client = make_client(budgets)

    with pytest.raises(RequestOverBudgetError):
        await client.take(KEY, 10_001)
    seat = await client.take(KEY, 10_000)
    with pytest.raises(BudgetSpentError) as caught:
        await client.take(KEY, 1)

    assert "10000 tokens a minute" in str(caught.value)
    client.end(seat, is_counted=True)
    await client.close()


async def test_a_refused_key_does_not_ask_again_at_once(budgets):
    client = make_client(budgets)
    await client.take(KEY, 10_000)
    with pytest.raises(BudgetSpentError):
        await client.take(KEY, 1)
    num_asked = budgets.num_asked

    for _ in range(50):
        with pytest.raises(BudgetSpentError):
            await client.take(KEY, 1)

    assert budgets.num_asked <= num_asked + 1
    await client.close()


async def test_while_the_ledger_is_away_the_last_lease_is_used_on_and_that_is_logged(
    budgets, quick, caplog
):
    client = make_client(budgets, wait_s=0.3)
    client.end(await client.take(KEY, 10), is_counted=True)
    budgets.is_away = True
    with caplog.at_level(logging.WARNING, "ray.serve"):
        await asyncio.sleep(0.15)
        client.end(await client.take(KEY, 10), is_counted=True)
        started_s = time.monotonic()
        results = await asyncio.gather(
            *(client.take(KEY, 10) for _ in range(20)), return_exceptions=True
        )
        assert {type(result) for result in results} == {Seat, BudgetsUnavailableError}
        assert time.monotonic() - started_s < 2
        budgets.is_away = False
        seat = await client.take(KEY, 400)

    messages = [line.message for line in caplog.records]
    assert len(messages) == 2, messages
    assert "what was leased last is used on" in messages[0]
    assert "counted again" in messages[1]
    assert seat.taken[Unit.TOKENS] == 400
    # It is the same one, so nobody let go of it.
    assert budgets.was_successor == [False]
    await client.close()


async def test_a_ledger_that_is_gone_is_made_anew_as_a_successor(budgets, quick):
    client = make_client(budgets)
    client.end(await client.take(KEY, 10), is_counted=True)
    budgets.is_gone_once = True

    assert await client.take(KEY, 9_000)

    assert budgets.was_successor == [False, True]
    await client.close()


async def test_a_ledger_is_reached_once_however_many_begin_to(budgets, quick):
    client = make_client(budgets)
    client.prepare()
    client.prepare()

    await asyncio.gather(client.take(KEY, 10), client.take(KEY, 10))

    assert budgets.was_successor == [False]
    await client.close()


async def test_a_ledger_that_comes_back_in_time_makes_requests_wait_and_not_fail(budgets, quick):
    client = make_client(budgets)
    budgets.is_away = True
    waiting = asyncio.create_task(client.take(KEY, 10))
    await asyncio.sleep(0.2)

    budgets.is_away = False

    assert (await waiting).taken[Unit.TOKENS] == 10
    await client.close()


async def test_a_ledger_that_hangs_is_away(budgets, quick):
    client = make_client(budgets, wait_s=0.4)
    budgets.is_hanging = True

    with pytest.raises(BudgetsUnavailableError):
        await client.take(KEY, 10)

    budgets.is_hanging = False
    assert await client.take(KEY, 10)
    await client.close()


async def test_a_new_ledger_learns_what_was_spent_and_grants_after_its_grace_time(
    budgets, quick, monkeypatch
):
    client = make_client(budgets)
    await client.take(KEY, 9_000)

    budgets.ledger = BudgetLedger(time.monotonic(), GRACE_S / 4)
    with pytest.raises(BudgetSpentError):
        await client.take(KEY, 2_000)

    assert budgets.used(Unit.TOKENS) >= 9_000
    await client.close()


async def test_a_request_that_is_cancelled_while_it_waits_takes_nothing(budgets, quick):
    client = make_client(budgets)
    for delay_s in (0.0, 0.0, 0.001, 0.01):
        waiting = asyncio.create_task(client.take(KEY, 900))
        await asyncio.sleep(delay_s)
        waiting.cancel()
        result = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if not isinstance(result, asyncio.CancelledError):
            client.end(result, is_counted=False)

    await asyncio.sleep(0.4)

    assert [budgets.used(unit) for unit in Unit] == [0, 0, 0]
    await client.close()


async def test_a_client_at_rest_says_nothing(budgets, quick, monkeypatch):
    client = make_client(budgets)
    seat = await client.take(KEY, 10)
    client.end(seat, is_counted=False)
    await asyncio.sleep(0.5)
    num_asked = budgets.num_asked

    await asyncio.sleep(0.5)

    assert budgets.num_asked == num_asked
    assert client._task is None
