"""The arithmetic of budgets: one ledger, several ingresses, any interleaving, lost messages."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api_keys import ApiKey
from deployments.budget_shares import BudgetShares
from deployments.budgets import GRACE_S, SILENCE_S, BudgetLedger, slice_of
from deployments.spending import SPAN_S, Unit, Window

NUM_INGRESSES = 3
KEY = ApiKey(
    name="team",
    digest=b"",
    tokens_per_minute=1000,
    requests_per_minute=40,
    max_running_requests=8,
)
ONE_EACH = {Unit.TOKENS: 1, Unit.REQUESTS: 1, Unit.RUNNING: 1}


def needs(tokens, requests=1, running=1):
    return {Unit.TOKENS: tokens, Unit.REQUESTS: requests, Unit.RUNNING: running}


class Fleet:
    """Ingresses and their ledger, and all that was ever spent, kept beside by slow means.

    The clocks of the ingresses differ.
    """

    def __init__(self, num_ingresses=NUM_INGRESSES):
        self.now_s = 1000.3
        self.ledger = BudgetLedger(self.now_s)
        self.clocks_s = [37.7 * index for index in range(num_ingresses)]
        self.shares = [BudgetShares(f"ingress-{index}") for index in range(num_ingresses)]
        self.seats = [[] for _ in self.shares]
        self.spent = []  # [time, seat, ingress]

    def clock(self, index):
        return self.now_s + self.clocks_s[index]

    def sync(self, index, waiting=(), lost=""):
        """Ask, and hear the answer unless the message or its answer is lost."""
        shares, key_needs = self.shares[index], [(KEY, need) for need in waiting]
        for is_whole in (False, True):
            ask = shares.ask(key_needs, self.clock(index), is_whole=is_whole)
            if lost == "ask":
                shares.miss()
                return False
            reply = self.ledger.answer(ask, self.now_s)
            if lost == "reply":
                shares.miss()
                return False
            if reply["is_known"]:
                shares.hear(reply, self.clock(index))
                return reply["is_ready"]
            shares.miss()
        raise AssertionError("a whole message makes an ingress known")

    def try_take(self, index, need):
        seat = self.shares[index].try_take(KEY, need, self.clock(index))
        if seat is not None:
            self.seats[index].append(seat)
            self.spent.append([self.now_s, seat, index])
        return seat

    def take(self, index, need, lost=""):
        """As the client does: of the lease, or else the ledger is asked first."""
        if (seat := self.try_take(index, need)) is not None:
            return seat
        self.sync(index, [need], lost)
        seat = self.try_take(index, need)
        self.shares[index].trim()
        return seat

    def charge(self, index, seat, unit, amount):
        self.shares[index].charge(seat, unit, amount, self.clock(index))

    def end(self, index, tokens):
        """The oldest request of an ingress ends; it has used that many tokens."""
        seat = self.seats[index].pop(0)
        self.charge(index, seat, Unit.TOKENS, tokens)
        self.charge(index, seat, Unit.RUNNING, 0)

    def truth(self, unit):
        """What was really spent within the last span."""
        return sum(
            seat.taken[unit] for time_s, seat, _ in self.spent if self.now_s - time_s < SPAN_S[unit]
        )


@dataclasses.dataclass(frozen=True)
class Step:
    kind: str
    ingress: int
    amount: int
    lost: str


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["take", "take", "take", "end", "sync", "rest", "wait", "wait_long"]),
    ingress=st.integers(0, NUM_INGRESSES - 1),
    amount=st.integers(0, 300),
    lost=st.sampled_from(["", "", "", "ask", "reply"]),
)


def run(fleet, step):
    if step.kind == "take":
        fleet.take(step.ingress, needs(step.amount), step.lost)
    elif step.kind == "end" and fleet.seats[step.ingress]:
        reserved = fleet.seats[step.ingress][0].taken[Unit.TOKENS]
        fleet.end(step.ingress, min(reserved, step.amount))
    elif step.kind == "sync":
        fleet.sync(step.ingress, lost=step.lost)
    elif step.kind == "rest":
        fleet.shares[step.ingress].rest(fleet.clock(step.ingress))
    elif step.kind.startswith("wait"):
        fleet.now_s += step.amount / (300 if step.kind == "wait" else 5)


def heartbeat(fleet):
    """What the clients do every second while they have anything to tell."""
    for index in range(len(fleet.shares)):
        fleet.sync(index)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=120)
def test_within_no_span_is_more_spent_than_the_budget(steps):
    fleet = Fleet()

    for step in steps:
        run(fleet, step)
        if step.kind == "wait_long":
            heartbeat(fleet)

        for unit, limit in KEY.limits.items():
            assert fleet.truth(unit) <= limit + NUM_INGRESSES * slice_of(unit, limit)


@given(st.lists(STEPS.filter(lambda step: step.kind != "wait_long"), max_size=60))
@settings(max_examples=80)
def test_while_nobody_is_silent_for_long_not_even_a_slice_more_is_spent(steps):
    fleet = Fleet()

    for step in steps:
        run(fleet, step)
        if step.kind == "wait":
            heartbeat(fleet)

        for unit, limit in KEY.limits.items():
            assert fleet.truth(unit) <= fleet.ledger.used(KEY.name, unit, fleet.now_s) <= limit


@given(st.lists(STEPS, max_size=40), st.lists(STEPS, max_size=40))
@settings(max_examples=80)
def test_after_the_ledger_is_lost_a_slice_per_ingress_more_is_spent_at_most(before, after):
    fleet = Fleet()
    for step in before:
        run(fleet, step)

    fleet.ledger = BudgetLedger(fleet.now_s, GRACE_S)
    for index in range(NUM_INGRESSES):  # within the grace time each of them tells of itself
        fleet.now_s += GRACE_S / (NUM_INGRESSES + 1)
        assert not fleet.sync(index)
    for step in after:
        run(fleet, step)

        for unit, limit in KEY.limits.items():
            assert fleet.truth(unit) <= limit + NUM_INGRESSES * slice_of(unit, limit)


BURSTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # seconds before it
        st.integers(0, NUM_INGRESSES - 1),
        st.integers(20, 400),  # tokens of each request
    ),
    min_size=5,
    max_size=25,
)


@given(BURSTS)
@settings(max_examples=60)
def test_callers_who_take_all_they_can_get_never_get_more_than_a_minutes_budget(bursts):
    fleet = Fleet()
    for seconds, index, tokens in bursts:
        for _ in range(seconds):
            fleet.now_s += 0.997
            heartbeat(fleet)
        while fleet.take(index, needs(tokens)) is not None:
            fleet.end(index, tokens)

            for unit, limit in KEY.limits.items():
                assert fleet.truth(unit) <= limit


def test_a_new_ledger_learns_what_was_spent_before_it():
    fleet = Fleet()
    assert fleet.take(0, needs(600))
    assert fleet.take(1, needs(300))

    fleet.ledger = BudgetLedger(fleet.now_s, GRACE_S)
    fleet.sync(0)
    fleet.now_s += GRACE_S
    fleet.sync(1)

    assert fleet.take(2, needs(200)) is None
    assert fleet.take(2, needs(40))


def test_a_lone_ingress_can_spend_the_whole_budget_and_no_more():
    fleet = Fleet(1)

    taken = [fleet.take(0, needs(24, running=0)) for _ in range(60)]

    # The requests end first: 40 of them.
    assert sum(seat is not None for seat in taken) == KEY.requests_per_minute


def test_what_ended_to_count_can_be_spent_again():
    fleet = Fleet()
    assert fleet.take(0, needs(1000))
    assert fleet.take(1, needs(1)) is None

    fleet.now_s += 59
    heartbeat(fleet)
    assert fleet.take(1, needs(1)) is None
    fleet.now_s += 2.1
    assert fleet.take(1, needs(1))


def test_a_refusal_tells_when_there_may_be_enough():
    fleet = Fleet()
    assert fleet.take(0, needs(500))
    fleet.now_s += 20
    assert fleet.take(0, needs(400))
    heartbeat(fleet)
    fleet.now_s += 5

    assert fleet.take(1, needs(200)) is None

    refusal = fleet.shares[1].refuse(KEY, needs(200), fleet.clock(1))
    assert (refusal.unit, refusal.limit) == (Unit.TOKENS, 1000)
    assert 60 - 25 <= refusal.retry_after_s <= 60 - 25 + 1.5
    fleet.now_s += refusal.retry_after_s
    assert fleet.take(1, needs(200))


def test_a_refusal_is_remembered_for_a_second_and_only_for_as_much():
    fleet = Fleet()
    assert fleet.take(0, needs(900))
    assert fleet.take(1, needs(200)) is None
    shares, clock = fleet.shares[1], fleet.clock(1)
    shares.refuse(KEY, needs(200), clock)

    assert shares.recall_refusal(KEY, needs(200), clock).unit is Unit.TOKENS
    assert shares.recall_refusal(KEY, needs(201), clock)
    assert shares.recall_refusal(KEY, needs(50), clock) is None
    assert shares.recall_refusal(KEY, needs(200), clock + 1.1) is None


def test_running_requests_count_until_they_end_however_long():
    fleet = Fleet()
    for index in range(KEY.max_running_requests):
        assert fleet.take(index % NUM_INGRESSES, needs(1))

    for _ in range(400):
        fleet.now_s += 1
        heartbeat(fleet)
    assert fleet.take(0, needs(1)) is None
    fleet.end(1, 1)
    heartbeat(fleet)
    assert fleet.take(0, needs(1))


def test_what_a_request_did_not_use_is_there_for_other_ingresses_after_a_message():
    fleet = Fleet()
    assert fleet.take(0, needs(1000))
    assert fleet.take(1, needs(500)) is None

    fleet.end(0, 100)
    fleet.sync(0)

    assert fleet.take(1, needs(500))


def test_what_is_used_beyond_the_reservation_is_charged_to_the_next_requests():
    fleet = Fleet()
    seat = fleet.take(0, needs(10))
    fleet.charge(0, seat, Unit.TOKENS, 1200)
    fleet.sync(0)

    assert fleet.take(1, needs(1)) is None
    assert fleet.shares[1].standing(KEY, Unit.TOKENS, fleet.clock(1)).remaining == 0


def test_what_is_given_back_after_it_ended_to_count_gives_nothing():
    fleet = Fleet()
    seat = fleet.take(0, needs(400))
    fleet.now_s += 61.1
    assert fleet.take(0, needs(500))

    fleet.charge(0, seat, Unit.TOKENS, 0)
    fleet.sync(0)

    assert fleet.ledger.used(KEY.name, Unit.TOKENS, fleet.now_s) >= 500


def test_an_ingress_that_is_gone_gives_back_what_runs_but_not_what_it_may_have_spent():
    fleet = Fleet()
    for _ in range(KEY.max_running_requests):
        assert fleet.take(0, needs(100))
    assert fleet.take(1, needs(1)) is None

    fleet.now_s += SILENCE_S + 0.1
    assert fleet.take(1, needs(150))
    assert fleet.take(1, needs(100)) is None


def test_an_ingress_that_comes_back_tells_all_again():
    fleet = Fleet()
    assert fleet.take(0, needs(100))
    fleet.now_s += SILENCE_S + 5
    fleet.sync(1)

    fleet.sync(0)

    for unit in (Unit.RUNNING, Unit.REQUESTS):
        used = fleet.ledger.used(KEY.name, unit, fleet.now_s)
        assert 1 <= used <= 1 + slice_of(unit, KEY.limits[unit])


def test_most_requests_of_a_steady_load_ask_nobody():
    key = dataclasses.replace(KEY, tokens_per_minute=60_000, requests_per_minute=600)
    ledger, shares = BudgetLedger(0.0), BudgetShares("one")
    num_asked = num_served = 0
    for tick in range(600):  # a minute of five requests a second, with a message every second
        now_s = tick / 10
        if tick % 10 == 0:
            shares.hear(ledger.answer(shares.ask((), now_s), now_s), now_s)
        if tick % 2:
            continue
        key_needs = {**ONE_EACH, Unit.TOKENS: 150}
        seat = shares.try_take(key, key_needs, now_s)
        if seat is None:
            num_asked += 1
            shares.hear(ledger.answer(shares.ask([(key, key_needs)], now_s), now_s), now_s)
            seat = shares.try_take(key, key_needs, now_s)
        num_served += seat is not None
        shares.charge(seat, Unit.RUNNING, 0, now_s)

    assert num_served == 300
    assert num_asked <= 75


def test_a_key_at_rest_is_forgotten_and_its_lease_with_it():
    fleet = Fleet()
    assert fleet.take(0, needs(5))
    fleet.end(0, 5)
    assert not fleet.shares[0].is_idle

    for _ in range(70):
        fleet.now_s += 1
        fleet.sync(0)
        fleet.shares[0].rest(fleet.clock(0))

    assert fleet.shares[0].is_idle
    assert all(fleet.ledger.used(KEY.name, unit, fleet.now_s) == 0 for unit in Unit)


def test_a_message_that_was_overtaken_changes_nothing():
    ledger, shares = BudgetLedger(0.0), BudgetShares("one")
    old = shares.ask([(KEY, ONE_EACH)], 0.0)
    shares.miss()
    new = shares.ask([(KEY, ONE_EACH)], 0.1)

    assert ledger.answer(new, 0.2)["keys"]
    used = ledger.used(KEY.name, Unit.TOKENS, 0.2)
    assert ledger.answer(old, 0.3)["keys"] == {}
    assert ledger.used(KEY.name, Unit.TOKENS, 0.3) == used


@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 50)), max_size=30),
    st.floats(0, 260),
)
def test_a_window_never_tells_less_than_was_spent_within_its_span(spends, now_s):
    window = Window(60.0)
    for time_s, amount in spends:
        second = math.floor(time_s)
        window.set(second, window.get(second) + amount)

    total = window.total(now_s)

    assert total >= sum(amount for time_s, amount in spends if now_s - 60 < time_s)
    assert total <= sum(amount for time_s, amount in spends if now_s - 61 < time_s)
    assert total == sum(window.amounts.values())


@pytest.mark.parametrize("unit", [Unit.TOKENS, Unit.REQUESTS])
def test_a_standing_tells_what_is_left_and_when_it_comes_back(unit):
    fleet = Fleet()
    shares = fleet.shares[0]
    assert shares.standing(KEY, unit, fleet.clock(0)).remaining == KEY.limits[unit]
    assert fleet.take(0, {**ONE_EACH, unit: 30})
    fleet.now_s += 10
    assert fleet.take(0, {**ONE_EACH, unit: 5})

    standing = shares.standing(KEY, unit, fleet.clock(0))

    assert standing.limit == KEY.limits[unit]
    assert standing.remaining == KEY.limits[unit] - 35
    assert 50 <= standing.next_s <= 51
    assert 60 <= standing.reset_s <= 61
