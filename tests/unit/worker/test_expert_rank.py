"""An expert rank's process over real gRPC, with a stand-in for its engine."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.core.errors import SetupError
from baton.core.experts import (
    ExpertDropOrder,
    ExpertLoaded,
    ExpertLoadFailed,
    ExpertLoadOrder,
    ExpertRankBeat,
    ExpertRankHello,
    ExpertRankRef,
    ExpertRankRetired,
)
from baton.core.ids import ExpertRankId
from baton.wire.server import start_server
from engine.experts.memory import RankFull
from worker.expert_rank import ExpertRankFailed, ExpertRankService

REF = ExpertRankRef(ExpertRankId("experts-decode-0.a1"), "host", "@s", "h:1", "secret")
HELLO = ExpertRankHello(REF, "decode of m", "n1", 7, 2, 4, 100, 2, (), 1, 3)


class Engine:
    """Loads wait while `gate` is closed; experts of `broken` cannot be loaded, and those of `full` find no
    memory. One with a source is copied."""

    layer_count, expert_count, expert_bytes, group_count, slots, slots_max = 2, 4, 100, 1, 2, 3

    def __init__(self):
        self.now_held, self.broken, self.full, self.log = set(), set(), set(), []
        self.rows, self.busy_s, self.failure = 0, 0.0, None
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def held(self):
        return tuple(sorted(self.now_held))

    def load_expert(self, expert, source=None):
        self.begun.set()
        self.gate.wait(30)
        self.log.append(("load", expert, source))
        if expert in self.broken:
            raise SetupError("no such file")
        if expert in self.full:
            raise RankFull("no memory")
        self.now_held.add(expert)
        return source is not None

    def drop_expert(self, expert):
        self.log.append(("drop", expert))
        self.now_held.discard(expert)


class Control:
    """Each stream of the rank comes with a queue of its reports."""

    def __init__(self):
        self.streams = asyncio.Queue()

    async def serve_rank(self, hello, link):
        reports = asyncio.Queue()
        end = asyncio.Event()
        self.streams.put_nowait((hello, link, reports, end))

        async def read():
            async for report in link:
                if not isinstance(report, ExpertRankBeat):
                    reports.put_nowait(report)

        reading = asyncio.create_task(read())
        ending = asyncio.create_task(end.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reading, ending):
            task.cancel()
        await asyncio.gather(reading, ending, return_exceptions=True)

    async def serve_caller(self, hello, link):
        raise AssertionError


@pytest.fixture
async def world():
    control, engine = Control(), Engine()
    server, port = await start_server("127.0.0.1", 0, experts=control)
    threads = ThreadPoolExecutor(2)
    service = ExpertRankService(engine, HELLO, f"127.0.0.1:{port}", threads)
    async with asyncio.timeout(60):
        running = asyncio.create_task(service.run(retry_s=0.01))
        yield control, engine, running
        engine.gate.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)
        threads.shutdown()


async def test_orders_are_done_and_answered_and_the_rank_ends_when_it_is_retired(world):
    control, engine, running = world
    engine.broken, engine.full = {3}, {2}
    hello, link, reports, _ = await control.streams.get()
    assert hello == HELLO
    link.send(ExpertLoadOrder(1, 0))
    assert await reports.get() == ExpertLoaded(1, 0)
    link.send(ExpertLoadOrder(2, 5, REF))
    assert await reports.get() == ExpertLoaded(2, 5, is_copied=True)
    link.send(ExpertLoadOrder(3, 3))
    assert await reports.get() == ExpertLoadFailed(3, 3, "no such file")
    link.send(ExpertLoadOrder(4, 2))
    assert await reports.get() == ExpertLoadFailed(4, 2, "no memory", is_full=True)
    link.send(ExpertDropOrder(0))
    link.send(ExpertRankRetired("not needed"))
    assert await running == "not needed"
    assert engine.log[:3] == [("load", 0, None), ("load", 5, REF), ("load", 3, None)]


async def test_orders_for_one_expert_are_done_in_order(world):
    control, engine, _ = world
    _, link, reports, _ = await control.streams.get()
    engine.gate.clear()
    link.send(ExpertLoadOrder(1, 0))
    link.send(ExpertDropOrder(0))
    link.send(ExpertLoadOrder(2, 0))
    await asyncio.to_thread(engine.begun.wait, 30)
    engine.gate.set()
    assert [await reports.get(), await reports.get()] == [ExpertLoaded(1, 0), ExpertLoaded(2, 0)]
    assert engine.log == [("load", 0, None), ("drop", 0), ("load", 0, None)]
    assert engine.held == (0,)


async def test_another_control_plane_hears_what_is_held_and_not_what_was_being_loaded(world):
    control, engine, _ = world
    _, link, reports, end = await control.streams.get()
    link.send(ExpertLoadOrder(1, 0))
    assert await reports.get() == ExpertLoaded(1, 0)
    engine.gate.clear()
    engine.begun.clear()
    link.send(ExpertLoadOrder(2, 1))
    await asyncio.to_thread(engine.begun.wait, 30)
    end.set()
    hello, link, reports, _ = await control.streams.get()
    assert hello.held == (0,)
    engine.gate.set()
    link.send(ExpertLoadOrder(2, 6))
    assert await reports.get() == ExpertLoaded(2, 6), "the answer to the other one's load 2 never comes"
    link.send(ExpertLoadOrder(3, 1))
    assert await reports.get() == ExpertLoaded(3, 1)
    drops = [one for one in engine.log if one[0] == "drop"]
    assert drops == [("drop", 1)]
    assert engine.held == (0, 1, 6)


async def test_a_rank_whose_engine_failed_ends(world):
    control, engine, running = world
    await control.streams.get()
    engine.failure = RuntimeError("device lost")
    with pytest.raises(ExpertRankFailed, match="device lost"):
        await running


async def test_a_rank_ends_when_nobody_is_there_and_nobody_uses_it():
    threads = ThreadPoolExecutor(1)
    service = ExpertRankService(Engine(), HELLO, "127.0.0.1:1", threads)
    assert "no control plane" in await service.run(away_s=0.05, retry_s=0.01)
    threads.shutdown()


async def test_a_rank_that_gets_rows_stays_while_the_control_plane_is_away():
    class Used(Engine):
        asked = 0

        @property
        def rows(self):
            Used.asked += 1
            return Used.asked if Used.asked < 40 else 40

        @rows.setter
        def rows(self, value):
            pass

    threads = ThreadPoolExecutor(1)
    service = ExpertRankService(Used(), HELLO, "127.0.0.1:1", threads)
    await service.run(away_s=0.0001, retry_s=0.001)
    assert Used.asked >= 40
    threads.shutdown()
