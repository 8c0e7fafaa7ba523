"""Budgets are settled once for every request, where it took, and with what it used."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.budgets import LEASES_SWEPT_MIN, SETTLE_S, WINDOW_S, Ask, Ledger, Settle
from kv_store.directory.interface import DirectoryLost
from router.tenants.budgets import LocalBudgets, SharedBudgets

PER_MINUTE = 6000


def ask(tokens, lease="r", *, lease_s=600.0, concurrent_max=0):
    return Ask("t", lease, lease_s, tokens, tokens_per_minute=PER_MINUTE, concurrent_max=concurrent_max)


def settle(refund, lease="r"):
    return Settle("t", lease, refund, PER_MINUTE)


def charged(ledger, now_s=0.0):
    """Return the tokens that are charged now, by what a request of none is told."""
    return ledger.take(ask(0, "look"), now_s=now_s).tokens_left_s * PER_MINUTE / WINDOW_S


def test_a_second_settlement_and_one_of_nothing_give_nothing_back():
    ledger = Ledger()
    ledger.take(ask(1000), now_s=0.0)
    ledger.take(ask(1000, "other"), now_s=0.0)
    for lease in ("r", "r", "unknown", "r"):
        ledger.settle(settle(1000, lease), now_s=0.0)
    assert charged(ledger) == pytest.approx(1000)


def test_a_request_is_settled_after_its_lease_for_a_while():
    for late_s, left in ((SETTLE_S - 1.0, 0.0), (SETTLE_S + 1.0, 1000.0)):
        ledger = Ledger()
        ledger.take(ask(1000, lease_s=1.0, concurrent_max=1), now_s=0.0)
        assert ledger.take(ask(0, "next", concurrent_max=1), now_s=1.5).is_granted
        ledger.settle(settle(0, "next"), now_s=1.5)
        at_s = 1.0 + late_s
        ledger.take(ask(1000, "second"), now_s=at_s)
        ledger.settle(settle(1000), now_s=at_s)
        assert charged(ledger, at_s) == pytest.approx(left)


def test_leases_that_nobody_settles_are_dropped():
    ledger = Ledger()
    for i in range(10 * LEASES_SWEPT_MIN):
        ledger.take(ask(0, f"r{i}", lease_s=1.0), now_s=i * SETTLE_S)
    assert len(ledger._accounts["t"].leases) <= 2 * LEASES_SWEPT_MIN


class Place(LocalBudgets):
    """A shared place that may be away, and that may lose the answer to what it did."""

    is_away = False
    loses_answer = False

    async def take(self, ask):
        return await self._answer(super().take, ask)

    async def settle(self, settle):
        return await self._answer(super().settle, settle)

    async def _answer(self, do, message):
        if self.is_away:
            raise DirectoryLost("away")
        answer = await do(message)
        if self.loses_answer:
            raise DirectoryLost("no answer in time")
        return answer


class Settlements(RuleBasedStateMachine):
    """Requests take, use some and are settled, in a time that does not pass, while the place comes and goes.
    In the end exactly what was used is charged, at the place and at this router together."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self.loop.time = lambda: self.now_s
        self.place = Place()
        self.budgets = SharedBudgets(self.place)
        self.open = {}
        self.used = 0
        self.count = 0

    def do(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    @rule(is_away=st.booleans(), loses_answer=st.booleans())
    def change(self, is_away, loses_answer):
        self.place.is_away, self.place.loses_answer = is_away, loses_answer
        self.budgets._away_until_s = -1.0  # It asks again at once.

    @rule(tokens=st.integers(1, 200))
    def take(self, tokens):
        self.count += 1
        lease = f"r{self.count}"
        if self.do(self.budgets.take(ask(tokens, lease))).is_granted:
            self.open[lease] = tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(-200, 20), twice=st.booleans())
    def end(self, data, more, twice):
        lease = data.draw(st.sampled_from(sorted(self.open)))
        tokens = self.open.pop(lease)
        used = max(0, tokens + more)
        self.used += used
        for _ in range(1 + twice):
            self.do(self.budgets.settle(settle(tokens - used, lease)))

    @invariant()
    def nothing_is_charged_for_less_than_was_used(self):
        if not self.open and not self.budgets._unsettled:
            places = (self.place._ledger, self.budgets._local._ledger)
            assert sum(map(charged, places)) >= self.used - 1e-3

    def teardown(self):
        for lease, tokens in self.open.items():
            self.do(self.budgets.settle(settle(tokens, lease)))
        self.place.is_away = self.place.loses_answer = False
        for _ in range(1 + self.count // 64):
            self.budgets._away_until_s = -1.0
            self.do(self.budgets.settle(settle(0, "last")))
        places = (self.place._ledger, self.budgets._local._ledger)
        assert sum(map(charged, places)) == pytest.approx(self.used, abs=1e-3)
        assert not self.budgets._own
        self.loop.close()


TestSettlements = Settlements.TestCase
TestSettlements.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


async def test_a_take_whose_answer_nobody_awaited_is_given_back():
    place = Place()
    budgets = SharedBudgets(place)
    asked = asyncio.Event()

    async def take(ask):
        grant = await LocalBudgets.take(place, ask)
        asked.set()
        await asyncio.Event().wait()
        return grant

    place.take = take
    taking = asyncio.create_task(budgets.take(ask(500)))
    await asked.wait()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    del place.take
    await budgets.settle(settle(0, "another"))
    now_s = asyncio.get_running_loop().time()
    assert charged(place._ledger, now_s) == 0.0
