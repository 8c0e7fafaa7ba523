"""How the leader and its followers read adapters, without models: the other end is played here."""

import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, cast

import pytest

from baton.core.errors import SetupError
from baton.core.messages import AdapterRef
from baton.core.shape import Shape
from engine.execution import team as team_module
from engine.execution.follower import Follower
from engine.execution.team import RankTeam
from engine.parallel.group import GroupBroken
from engine.parallel.order_channel import OrderReceiver, OrderSender
from engine.parallel.orders import AdapterRead, FollowerReport, InstallAdapter, RankOrder, ReadAdapter
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.team_state import AdapterFailed

DEADLINE_S = 60.0
SLOW, FAST = AdapterRef("slow", "/adapters/slow", "5eed"), AdapterRef("fast", "/adapters/fast", "f00d")


class Pair:
    """A leader's team, and the end of its follower."""

    def __init__(self) -> None:
        world = SharedMemoryGroup.create(2, deadline_s=DEADLINE_S)
        orders = OrderSender.create(2, deadline_s=DEADLINE_S)
        self.team = RankTeam(Shape.parse("tp2"), world, orders, None)
        self.follower = OrderReceiver.join(orders.address, 1, deadline_s=DEADLINE_S)
        self.team._listener.start()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.team.close()
    pair.follower.close()


def test_an_adapter_that_is_read_slowly_fails_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on, and a report that comes too late says nothing about the next adapter."""
    monkeypatch.setattr(team_module, "ADAPTER_S", 0.01)
    failed = pair.team.read_adapter(SLOW, lambda: None)
    assert failed == AdapterFailed(1, "it takes longer than 0.01 s")

    monkeypatch.setattr(team_module, "ADAPTER_S", DEADLINE_S)

    def report_both() -> None:
        pair.follower.report(AdapterRead(SLOW.key))
        pair.follower.report(AdapterRead(FAST.key, "it is torn"))

    assert pair.team.read_adapter(FAST, report_both) == AdapterFailed(1, "it is torn")
    assert pair.team.read_adapter(FAST, lambda: pair.follower.report(AdapterRead(FAST.key))) is None


def test_the_loss_of_a_follower_ends_the_wait_for_an_adapter(pair: Pair) -> None:
    with pytest.raises(GroupBroken, match="torn apart"):
        pair.team.read_adapter(SLOW, lambda: pair.follower.abort("torn apart"))


def test_what_the_leader_cannot_read_is_its_own_error(pair: Pair) -> None:
    def fail() -> None:
        pair.follower.report(AdapterRead(SLOW.key))
        raise SetupError("no such adapter")

    with pytest.raises(SetupError, match="no such adapter"):
        pair.team.read_adapter(SLOW, fail)


class Weights:
    pass


class PlayedLeader:
    """Orders for a follower, each after the report that the one before asks for. It plays the executor and
    its adapters, too."""

    def __init__(self, *orders: RankOrder) -> None:
        self.adapters = self
        self.read_ones: dict[str, weakref.ref[Weights]] = {}
        self.installed: list[object] = []
        self._orders = list(orders)
        self._reports: SimpleQueue[FollowerReport] = SimpleQueue()
        self._reads_left = 0

    def receive(self, *, timeout_s: float) -> RankOrder:
        while self._reads_left:
            self._reports.get(timeout=DEADLINE_S)
            self._reads_left -= 1
        if not self._orders:
            raise GroupBroken("the leader leaves")
        order = self._orders.pop(0)
        self._reads_left += isinstance(order, ReadAdapter)
        return order

    def be_strict(self) -> None:
        pass

    def report(self, report: FollowerReport) -> None:
        self._reports.put(report)

    def read(self, ref: AdapterRef) -> Weights:
        weights = Weights()
        self.read_ones[ref.key] = weakref.ref(weights)
        return weights

    def install(self, weights: object) -> None:
        self.installed.append(weights)


def test_a_follower_forgets_an_adapter_that_is_never_installed() -> None:
    """The leader leaves it at reading where all slots are in use."""
    leader = PlayedLeader(ReadAdapter(SLOW), ReadAdapter(FAST), InstallAdapter(FAST.key))
    follower = Follower(cast(Any, leader), cast(Any, leader), cast(Any, leader))
    with pytest.raises(GroupBroken):
        follower.run()
    assert leader.read_ones[SLOW.key]() is None
    assert leader.installed == [leader.read_ones[FAST.key]()]
