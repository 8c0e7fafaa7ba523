"""Generations of blocks in pools on other hosts: they rise there before any order writes new content."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from baton.core.shape import Shape
from baton.core.steps import StepPlan
from engine.execution.follower import Follower
from engine.execution.spread import Reach, Spread
from engine.execution.team import RankTeam
from engine.kv.generations import NotedGenerations
from engine.kv.pool import KVPool
from engine.parallel.group import GroupBroken
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import RaiseGenerations, RankOrder
from engine.scheduling.block_pool import BlockPool

BLOCKS = 8
GEOMETRY = KVGeometry(layer_count=1, kv_head_count=1, head_dim=8, block_tokens=4, dtype="float32")


def pool() -> KVPool:
    return KVPool(GEOMETRY, kv_bytes=BLOCKS * GEOMETRY.block_bytes, device=torch.device("cpu"))


class Orders:
    """Both ends of the orders, with bytes between them."""

    def __init__(self) -> None:
        self._encoder, self._decoder = OrderEncoder(), OrderDecoder()
        self.sent: list[RankOrder] = []

    def send(self, order: RankOrder) -> None:
        self.sent.append(self._decoder.decode(self._encoder.encode(order)))

    def be_strict(self) -> None:
        """It plays the ranks, too."""

    def receive(self, *, timeout_s: float) -> RankOrder:
        if not self.sent:
            raise GroupBroken("the leader has left")
        return self.sent.pop(0)


class FollowersExecutor:
    """It notes what the table is when a plan is executed."""

    def __init__(self) -> None:
        self.kv, self.tables = pool(), list[list[int]]()

    def execute(self, plan: StepPlan) -> None:
        self.tables.append(self.kv.generations.tolist())


def team_of(orders: Orders, *, is_spread: bool) -> RankTeam:
    spread = Spread(Reach("", ""), (None, cast(Any, object()))) if is_spread else None
    return RankTeam(Shape.parse("pp2"), cast(Any, None), cast(Any, orders), spread)


@given(st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=5), max_size=6))
def test_a_far_table_is_the_leaders_when_a_plan_is_executed(allocations: list[list[int]]) -> None:
    own, orders, executor = pool(), Orders(), FollowersExecutor()
    team = team_of(orders, is_spread=True)
    table = team.noted(own.generations)
    expected: list[list[int]] = []
    for number, blocks in enumerate(allocations):
        for block in blocks:
            table[block] += 1
        team.send(StepPlan((), number))
        expected.append(own.generations.tolist())
    with pytest.raises(GroupBroken):
        Follower(cast(Any, executor), cast(Any, orders), cast(Any, orders)).run()
    assert executor.tables == expected


def test_only_what_rose_is_sent_and_only_to_other_hosts() -> None:
    for is_spread in (True, False):
        own, orders = pool(), Orders()
        team = team_of(orders, is_spread=is_spread)
        blocks = BlockPool(BLOCKS, team.noted(own.generations))
        held = blocks.allocate(2)
        team.send(StepPlan((), 0))
        team.send(StepPlan((), 1))
        raised = [order for order in orders.sent if isinstance(order, RaiseGenerations)]
        assert len(orders.sent) == 2 + is_spread
        assert [sorted(order.blocks) for order in raised] == [sorted(held)] * is_spread
        assert [int(own.generations[block]) for block in held] == [blocks.generation(held[0])] * 2


def test_entries_never_fall() -> None:
    far = pool()
    far.raise_generations([3, 1], [7, 2])
    far.raise_generations([1, 3], [5, 6])
    assert far.generations[[1, 3]].tolist() == [5, 7]
    assert not far.generations[[0, 2]].any()


def test_entries_that_rise_while_notes_are_taken_are_noted() -> None:
    table = np.zeros(BLOCKS, np.uint64)
    noted, told = NotedGenerations(table), np.zeros(BLOCKS, np.uint64)
    over = threading.Event()

    def take() -> None:
        for block, generation in noted.take().items():
            told[block] = max(int(told[block]), generation)

    def take_on() -> None:
        while not over.is_set():
            take()

    taker = threading.Thread(target=take_on)
    taker.start()
    for count in range(20_000):
        noted[count % BLOCKS] += 1
    over.set()
    taker.join()
    take()
    assert told.tolist() == table.tolist() == [20_000 // BLOCKS] * BLOCKS


def test_the_table_is_written_one_by_one() -> None:
    noted = NotedGenerations(np.zeros(BLOCKS, np.uint64))
    assert len(noted) == BLOCKS
    assert noted[1:3] == [0, 0]
    with pytest.raises(TypeError):
        noted[1:3] = [1, 1]
    with pytest.raises(TypeError):
        del noted[0]
    with pytest.raises(TypeError):
        noted.append(1)
