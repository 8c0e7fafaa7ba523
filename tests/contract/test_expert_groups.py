"""The control plane's side of expert ranks over real gRPC, with ranks and callers as tasks here."""

import asyncio
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.config import Config
from baton.core.experts import (
    ExpertCallerHello,
    ExpertEpochUsed,
    ExpertRankHello,
    ExpertRankPhase,
    ExpertRankRef,
    ExpertRankSuspected,
)
from baton.core.ids import ExpertRankId, WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    DrainExpertRank,
    Order,
    Outcome,
    Pool,
    RebalanceExperts,
    Scale,
    ScaleExperts,
)
from baton.wire.background import Background
from baton.wire.crash import Crash
from baton.wire.experts import CallerStream
from baton.wire.link import LinkBroken
from baton.wire.server import start_server
from control_plane.expert_groups import ExpertGroups
from control_plane.plane import ControlPlane, restart_policy
from tests.unit.control_plane.test_plane import Replicas
from tests.unit.worker.test_expert_rank import Engine
from worker.expert_rank import ExpertRankService

GROUP = "decode of m"
LAYERS, EXPERTS = Engine.layer_count, Engine.expert_count


class Ranks:
    """Processes of expert ranks as tasks."""

    def __init__(self):
        self.address, self.on_exit = "", None
        self.tasks, self.engines = {}, {}
        self.threads = ThreadPoolExecutor(4)

    def start(self, start, model, role):
        rank_id = start.rank_id
        engine = self.engines[rank_id] = Engine()
        ref = ExpertRankRef(rank_id, "host", f"@{rank_id}", "h:1", "s")
        slots = -(-EXPERTS // start.ranks)
        hello = ExpertRankHello(ref, f"{role} of {model}", "n1", 1, LAYERS, EXPERTS, 100, slots)
        service = ExpertRankService(engine, hello, self.address, self.threads)
        self.tasks[rank_id] = asyncio.create_task(self._run(rank_id, service))

    async def _run(self, rank_id, service):
        reason = "killed"
        try:
            reason = await service.run(retry_s=0.01)
        finally:
            del self.tasks[rank_id], self.engines[rank_id]
            self.on_exit(rank_id, reason)

    async def kill(self, rank_id):
        if (task := self.tasks.get(rank_id)) is not None:
            task.cancel()

    def worker_count(self, model, role):
        return 0


class Caller:
    """A caller that uses every map at once."""

    def __init__(self, address, epoch=0):
        self.said = queue.SimpleQueue()
        self.said.put(ExpertCallerHello("w0/0", WorkerId("w0"), GROUP, epoch))
        self.maps, self.loop, self.latest = asyncio.Queue(), asyncio.get_running_loop(), {}
        self.stream = CallerStream(address, iter(self.said.get, None))
        self.reading = self.loop.run_in_executor(None, self._read)

    def _read(self):
        try:
            for update in self.stream:
                self.said.put(ExpertEpochUsed(update.epoch))
                self.loop.call_soon_threadsafe(self.maps.put_nowait, update)
        except LinkBroken:
            pass

    async def until(self, is_it):
        """The latest map, or the first after it that is as wanted."""
        while not is_it(self.latest):
            self.latest = {one.ref.rank_id: set(one.experts) for one in (await self.maps.get()).ranks}
        return self.latest

    async def close(self):
        self.stream.close()
        self.said.put(None)
        await self.reading


def is_whole(found):
    return set().union(*found.values()) == set(range(LAYERS * EXPERTS)) if found else False


class World:
    def __init__(self, ranks, *, life, **experts):
        self.ranks = ranks
        self.config = Config.model_validate(
            {
                "model": {"path": "m", "name": "m"},
                "cluster": {"prefill_workers": 0, "decode_workers": 2, "restart_backoff_s": 0.01},
                "experts": {"parallel": "ranks", "ranks": 2, **experts},
            }
        )
        self.crash = Crash()
        self.background = Background(self.crash.report)
        cluster = self.config.cluster
        self.plane = ControlPlane(cluster, life=life, replicas=Replicas(), spawn=self.background.spawn)
        self.groups = self.plane.experts = ExpertGroups(
            {"m": self.config},
            life=life,
            processes=ranks,
            spawn=self.background.spawn,
            crash=self.crash,
            restart=restart_policy(cluster),
            on_changed=self.plane.on_experts,
        )
        ranks.on_exit = self.plane.on_expert_rank_exit

    async def open(self, port=0):
        self.server, port = await start_server("127.0.0.1", port, experts=self.groups, operate=self.plane)
        self.address = self.ranks.address = f"127.0.0.1:{port}"
        return port

    def begin(self):
        self.groups.begin()
        self.plane.want([Pool("m", {Role.DECODE: 2})])

    async def state(self, is_it):
        async for found in self.plane.changes():
            if found.experts and is_it(found.experts[0]):
                return found.experts[0]
            if self.crash.error is not None:
                raise self.crash.error
        raise AssertionError

    def order(self, action):
        return self.plane.order(Order(action, "a test"))

    async def done(self, decision):
        async for found in self.plane.changes():
            now = next(one for one in found.decisions if one.number == decision.number)
            if now.outcome is not Outcome.ACCEPTED:
                return now
        raise AssertionError

    async def close(self):
        self.plane.close()
        await self.background.cancel()
        await self.server.stop(0)


@pytest.fixture
async def world():
    ranks = Ranks()
    world = World(ranks, life="a")
    await world.open()
    world.begin()
    async with asyncio.timeout(60):
        yield world
    await world.close()
    for task in list(ranks.tasks.values()):
        task.cancel()
    await asyncio.gather(*ranks.tasks.values(), return_exceptions=True)
    ranks.threads.shutdown()


async def test_a_caller_gets_the_map_of_all_experts_and_a_new_one_when_a_rank_is_lost(world):
    caller = Caller(world.address)
    first = await caller.until(is_whole)
    assert len(first) == 2
    lost = min(first)
    world.ranks.tasks[lost].cancel()
    after = await caller.until(lambda found: is_whole(found) and lost not in found)
    assert set(first) - {lost} <= set(after), "the successor may have come already"
    again = await caller.until(lambda found: is_whole(found) and len(found) == 2)
    assert lost not in again
    state = await world.state(lambda one: one.is_ready and not one.loads_running)
    assert (state.group, state.losses, state.callers, state.missing) == (GROUP, 1, 1, 0)
    await caller.close()


async def test_a_rank_that_its_caller_saw_go_is_killed_and_replaced(world):
    caller = Caller(world.address)
    first = await caller.until(is_whole)
    gone = min(first)
    caller.said.put(ExpertRankSuspected(ExpertRankId(gone), True, "connection closed"))
    await caller.until(lambda found: is_whole(found) and gone not in found)
    assert gone not in world.ranks.tasks
    await caller.close()


async def test_orders_are_followed_until_they_are_done(world):
    state = await world.state(lambda one: one.is_ready)
    assert (await world.done(world.order(RebalanceExperts()))).outcome is Outcome.DONE
    assert (await world.done(world.order(ScaleExperts(3, GROUP)))).outcome is Outcome.DONE
    state = await world.state(lambda one: len(one.ranks) == 3)
    assert all(one.phase is ExpertRankPhase.READY for one in state.ranks)
    drained = state.ranks[0]
    assert (await world.done(world.order(DrainExpertRank(drained.name)))).text == f"{drained.rank_id} is gone"
    smaller = world.order(DrainExpertRank((await world.state(lambda _: True)).ranks[0].rank_id, False))
    assert (await world.done(smaller)).outcome is Outcome.DONE
    state = await world.state(lambda one: one.wanted_ranks == 2)
    assert (len(state.ranks), state.missing, state.losses) == (2, 0, 0)


async def test_a_pool_without_workers_has_no_expert_ranks(world):
    await world.state(lambda one: one.is_ready)
    world.order(Scale(Role.DECODE, 0))
    async for state in world.plane.changes():
        if not state.experts:
            break
    world.order(Scale(Role.DECODE, 1))
    await world.state(lambda one: one.is_ready and len(one.ranks) == 2)


async def test_orders_that_cannot_be_followed_say_why(world):
    def refusal(action):
        decision = world.order(action)
        assert decision.outcome is Outcome.REFUSED
        return decision.text

    assert "no placement yet" in refusal(RebalanceExperts())
    await world.state(lambda one: one.is_ready)
    assert "there is no group 'x'" in refusal(RebalanceExperts("x"))
    assert "there is no expert rank 'x'; the expert ranks are: experts-decode-0" in refusal(
        DrainExpertRank("x")
    )
    assert "1 to 1024" in refusal(ScaleExperts(0))


async def test_a_new_control_plane_at_the_same_address_goes_on_with_ranks_and_callers():
    ranks = Ranks()
    first = World(ranks, life="a")
    port = await first.open()
    first.begin()
    async with asyncio.timeout(60):
        caller = Caller(first.address)
        await caller.until(is_whole)
        state = await first.state(lambda one: one.is_ready and not one.loads_running)
        held = {rank_id: engine.held for rank_id, engine in ranks.engines.items()}
        await caller.close()
        await first.close()

        second = World(ranks, life="b")
        await second.open(port)
        for rank_id in ranks.tasks:
            second.groups.adopt(rank_id, "m", Role.DECODE)
        second.begin()
        again = Caller(second.address, epoch=state.epoch)
        await again.until(is_whole)
        after = await second.state(lambda one: one.is_ready)
        assert after.epoch > state.epoch
        assert {rank_id: engine.held for rank_id, engine in ranks.engines.items()} == held
        await again.close()
    await second.close()
    for task in list(ranks.tasks.values()):
        task.cancel()
    await asyncio.gather(*ranks.tasks.values(), return_exceptions=True)
    ranks.threads.shutdown()


async def test_a_rank_or_caller_of_a_group_that_is_not_there_is_sent_away(world):
    ref = ExpertRankRef(ExpertRankId("x.1"), "host", "@x", "h:1", "s")
    hello = ExpertRankHello(ref, "prefill of other", "n1", 1, LAYERS, EXPERTS, 100, 2)
    service = ExpertRankService(Engine(), hello, world.address, world.ranks.threads)
    assert "no group 'prefill of other'" in await service.run(retry_s=0.01)
    stray = ExpertRankHello(ref, GROUP, "n1", 1, LAYERS, EXPERTS, 100, 2)
    service = ExpertRankService(Engine(), stray, world.address, world.ranks.threads)
    assert "does not know this rank" in await service.run(retry_s=0.01)
