import asyncio
import threading

import pytest

from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.messages import KVReleased, PeerRef, ResyncBlocks, Role, SequenceFailed
from baton.core.steps import StepPlan, StepResult
from kv_transfer.read import BlockRead
from worker import events as e
from worker.driver import CoreDriver
from worker.engine_thread import EngineThread

ROUTER = RouterId("r")
PLAN = StepPlan((), 7)
HEARD = SequenceFailed("s/0", 1, "internal", "x")


class ScriptedCore:
    """Answers events by a table; remembers what it was told."""

    def __init__(self, answers=None):
        self.answers, self.told, self.ticks_s = answers or {}, [], []
        self.is_idle, self.next_tick_s = True, None
        self.ticked = asyncio.Event()

    def handle(self, event, *, now_s):
        self.told.append(event)
        if isinstance(event, e.Tick):
            self.ticks_s.append(now_s)
            self.ticked.set()
            self.next_tick_s = None
        answer = self.answers.get(type(event), [])
        if isinstance(answer, Exception):
            raise answer
        return answer


class Ports:
    def __init__(self):
        self.did, self.on_router = [], None

    def to_router(self, router_id, message):
        self.did.append((router_id, message))
        if self.on_router:
            self.on_router()

    def to_reader(self, reader, message):
        self.did.append((reader, message))

    def to_source(self, source, message):
        self.did.append((source, message))

    def start_read(self, read):
        self.did.append(read)


async def no_step(plan):
    raise AssertionError("no step was asked for")


def driver_of(core, step=no_step, observers=(), step_timeout_s=60.0):
    driver = CoreDriver(
        core, step=step, spawn=asyncio.create_task, step_timeout_s=step_timeout_s, observers=observers
    )
    driver.ports = Ports()
    return driver


async def test_actions_go_where_they_belong_in_order():
    source = PeerRef(WorkerId("p.1"), "h:1")
    released = KVReleased(SequenceId("s/0"), 1, True)
    read = BlockRead(1, WorkerId("p.1"), (1,), (2,), (3,), 1.0, 64)
    core = ScriptedCore({e.Drain: [e.ToRouter(ROUTER, HEARD), e.ToSource(source, released), read]})
    driver = driver_of(core)
    driver.post(e.Drain())
    assert driver.ports.did == [(ROUTER, HEARD), (source, released), read]
    driver.close()


async def test_an_event_caused_by_an_action_waits_until_all_actions_are_done():
    core = ScriptedCore({e.Drain: [e.ToRouter(ROUTER, HEARD), e.ToRouter(ROUTER, HEARD)]})
    driver = driver_of(core)
    seen = []
    driver.ports.on_router = lambda: (driver.post(e.RouterLost(ROUTER)), seen.append(len(core.told)))
    driver.post(e.Drain())
    assert seen == [1, 1]
    assert core.told == [e.Drain(), e.RouterLost(ROUTER), e.RouterLost(ROUTER)]
    driver.close()


async def test_a_step_that_never_ends_is_the_end_of_the_worker():
    core = ScriptedCore({e.SetRole: [e.RunStep(PLAN)]})

    async def step(plan):
        await asyncio.Event().wait()

    driver = driver_of(core, step, step_timeout_s=0.01)
    driver.post(e.SetRole(Role.AGGREGATED))
    cause = await asyncio.wait_for(driver.crashed, 5)
    assert "the device hangs" in str(cause)
    assert any("step 7" in note for note in cause.__notes__)


async def test_a_step_is_computed_and_its_result_comes_back():
    done = asyncio.Event()
    core = ScriptedCore({e.SetRole: [e.RunStep(PLAN)]})

    async def step(plan):
        done.set()
        return StepResult(plan.step_number, (), 0.1)

    driver = driver_of(core, step)
    driver.post(e.SetRole(Role.AGGREGATED))
    await asyncio.wait_for(done.wait(), 5)
    await asyncio.sleep(0)
    assert core.told[-1] == e.StepDone(StepResult(7, (), 0.1))
    driver.close()


async def test_two_steps_stand_in_the_engine_threads_line_and_their_results_come_in_order():
    """The second one begins while the event loop is still busy."""
    engine, began = EngineThread(), [threading.Event(), threading.Event()]
    plans = [StepPlan((), 7), StepPlan((), 8)]
    core = ScriptedCore({e.SetRole: [e.RunStep(plan) for plan in plans]})
    both_done = asyncio.Event()

    def compute(plan):
        began[plan.step_number - 7].set()
        return StepResult(plan.step_number, (), 0.1)

    async def step(plan):
        result = await engine.run(compute, plan)
        if plan.step_number == 8:
            both_done.set()
        return result

    driver = driver_of(core, step)
    driver.post(e.SetRole(Role.AGGREGATED))
    await asyncio.sleep(0)  # the steps are handed over; from here on the loop does nothing
    assert began[1].wait(5)
    await asyncio.wait_for(both_done.wait(), 5)
    await asyncio.sleep(0)
    results = [event.result.step_number for event in core.told if isinstance(event, e.StepDone)]
    assert results == [7, 8]
    driver.close()
    assert await engine.close(timeout_s=5)


async def test_a_step_that_fails_ends_the_process_with_its_record():
    async def step(plan):
        raise RuntimeError("device lost")

    driver = driver_of(ScriptedCore({e.SetRole: [e.RunStep(PLAN)]}), step)
    driver.post(e.SetRole(Role.AGGREGATED))
    error = await asyncio.wait_for(driver.crashed, 5)
    assert isinstance(error, RuntimeError)
    assert "in step 7" in error.__notes__[0]


async def test_a_bug_in_the_core_ends_the_process_and_nothing_is_handled_afterwards():
    core = ScriptedCore({e.Drain: AssertionError("blocks held by nobody")})
    driver = driver_of(core)
    driver.post(e.Drain())
    driver.post(e.SetRole(Role.AGGREGATED))
    assert isinstance(await driver.crashed, AssertionError)
    assert core.told == [e.Drain()]


@pytest.mark.parametrize("delay_s", [-1.0, 0.02])
async def test_the_core_is_called_no_earlier_than_it_asked(delay_s):
    loop = asyncio.get_running_loop()
    core = ScriptedCore()
    driver = CoreDriver(core, step=no_step, spawn=asyncio.create_task, step_timeout_s=60.0, now=loop.time)
    driver.ports = Ports()
    due_s = core.next_tick_s = loop.time() + delay_s
    driver.post(e.FromRouter(ROUTER, ResyncBlocks()))
    await asyncio.wait_for(core.ticked.wait(), 5)
    assert core.ticks_s[0] >= due_s - 0.001
    driver.close()


async def test_idle_follows_the_core():
    core = ScriptedCore()
    driver = driver_of(core)
    core.is_idle = False
    driver.post(e.Drain())
    assert not driver.idle.is_set()
    core.is_idle = True
    driver.post(e.Drain())
    assert driver.idle.is_set()
    driver.close()


async def test_observers_see_events_and_actions_in_order():
    class Observer:
        def __init__(self):
            self.seen = []

        def saw(self, event):
            self.seen.append(event)

        def did(self, action):
            self.seen.append(action)

    observer = Observer()
    action = e.ToRouter(ROUTER, HEARD)
    driver = driver_of(ScriptedCore({e.Drain: [action]}), observers=(observer,))
    driver.post(e.Drain())
    assert observer.seen == [e.Drain(), action]
    driver.close()
