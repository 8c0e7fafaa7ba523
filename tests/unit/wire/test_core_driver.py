"""The one driver of all cores: order, time, defects and the end."""

import asyncio
from dataclasses import dataclass

import pytest

from baton.wire.core_driver import PAUSE_S, TICK_MIN_S, CoreDriver, Timer, performer, performers
from baton.wire.crash import Crash, NativePanic
from tests.unit.wire.virtual_loop import run_virtual


@dataclass(frozen=True)
class Asked:
    name: str = ""


@dataclass(frozen=True)
class Drain:
    pass


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class Paused:
    for_s: float


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Ring:
    pass


class ScriptedCore:
    """Answers each type of event with the same actions, and remembers what it was given and when.

    `deadlines` says what follows a type of event: the next due time, or None.
    """

    def __init__(self, answers=None, *, next_tick_s=None, deadlines=None):
        self.answers, self.events, self.times_s = answers or {}, [], []
        self.next_tick_s, self.deadlines = next_tick_s, deadlines or {}

    def handle(self, event, *, now_s):
        self.events.append(event)
        self.times_s.append(now_s)
        self.next_tick_s = self.deadlines.get(type(event), self.next_tick_s)
        answer = self.answers.get(type(event), [])
        if isinstance(answer, Exception):
            raise answer
        return answer


ONCE = {Tick: None}
"""Deadlines of a core that wants one tick."""


def driver_of(core, perform=lambda action: None, **options):
    table = performers(Say | Ring, performer(Say, perform), performer(Ring, perform))
    options = {"crash": Crash(), "clock": asyncio.get_running_loop().time, **options}
    return CoreDriver(core, tick=Tick(), performers=table, **options)


# --- events and actions ---------------------------------------------------------------------------


async def test_each_action_goes_to_its_performer_in_order():
    did = []
    core = ScriptedCore({Asked: [Say("a"), Ring(), Say("b")]})
    table = performers(
        Say | Ring,
        performer(Ring, lambda _: did.append("ring")),
        performer(Say, lambda a: did.append(a.text)),
    )
    CoreDriver(core, tick=Tick(), performers=table, crash=Crash()).post(Asked())
    assert did == ["a", "ring", "b"]


async def test_events_raised_by_a_performer_wait_until_all_actions_are_done_and_keep_their_order():
    core = ScriptedCore({Drain: [Say("x"), Say("y")]})
    seen = []

    def perform(action):
        driver.post(Asked(action.text))
        driver.post(Paused(1.0))
        seen.append(len(core.events))

    driver = driver_of(core, perform)
    driver.post(Drain())
    assert seen == [1, 1]
    assert core.events == [Drain(), Asked("x"), Paused(1.0), Asked("y"), Paused(1.0)]


async def test_observers_see_an_event_before_and_an_action_as_it_is_performed():
    seen = []

    class Observer:
        def on_event(self, event):
            seen.append(event)

        def on_action(self, action):
            seen.append(action)

    core = ScriptedCore({Asked: [Say("a"), Say("b")]})
    driver = driver_of(core, lambda action: seen.append(action.text), observers=(Observer(),))
    driver.post(Asked())
    assert seen == [Asked(), Say("a"), "a", Say("b"), "b"]


async def test_on_handled_follows_each_event_and_its_actions():
    did = []
    driver = driver_of(
        ScriptedCore({Asked: [Ring()]}),
        lambda _: did.append("ring"),
        on_handled=lambda: did.append("handled"),
    )
    driver.post(Asked())
    driver.post(Paused(1.0))
    assert did == ["ring", "handled", "handled"]


def test_a_table_has_exactly_one_performer_for_each_action():
    say = performer(Say, lambda action: None)
    with pytest.raises(AssertionError, match="Ring"):
        performers(Say | Ring, say)
    with pytest.raises(AssertionError, match="Paused"):
        performers(Say | Ring, say, performer(Ring, print), performer(Paused, print))
    with pytest.raises(AssertionError, match="two performers"):
        performers(Say | Ring, say, say)


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("due_s", [-1.0, 0.0, 0.02, 30.0])
def test_a_tick_comes_when_it_is_due_and_no_earlier(due_s):
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=due_s, deadlines=ONCE)
        driver_of(core).post(Asked())
        await asyncio.sleep(60)
        assert core.times_s[-1] == pytest.approx(max(due_s, TICK_MIN_S))
        assert core.events == [Asked(), Tick()]

    run_virtual(scenario)


def test_a_core_that_is_always_overdue_leaves_the_loop_to_others():
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=-1.0)
        driver = driver_of(core)
        for _ in range(3):
            driver.post(Asked())
        await asyncio.sleep(0.01)
        assert 5 <= core.events.count(Tick()) <= 10  # one in TICK_MIN_S, and time passes

    run_virtual(scenario)


def test_deadlines_that_move_later_set_no_timer_and_cost_no_tick():
    async def scenario(loop):
        core = ScriptedCore(deadlines=ONCE)
        driver = driver_of(core)
        timers_set, call_later = [], loop.call_later
        loop.call_later = lambda *args: (timers_set.append(args), call_later(*args))[1]
        for i in range(100):
            core.next_tick_s = 5.0 + i / 100
            driver.post(Asked())
        assert len(timers_set) == 1
        await asyncio.sleep(5.5)
        assert Tick() not in core.events
        assert len(timers_set) == 3  # the sleep's own, and ours once more for where the deadline is now
        await asyncio.sleep(0.6)
        assert core.events[-1] == Tick()
        assert core.times_s[-1] == pytest.approx(5.99)

    run_virtual(scenario)


def test_an_earlier_deadline_comes_first():
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=9.0, deadlines=ONCE)
        driver = driver_of(core)
        driver.post(Asked())
        core.next_tick_s = 1.0
        driver.post(Asked())
        await asyncio.sleep(20)
        assert core.times_s[2:] == [pytest.approx(1.0)]

    run_virtual(scenario)


@pytest.mark.parametrize("held_s", [0.9 * PAUSE_S, 1.1 * PAUSE_S])
def test_a_pause_of_the_process_is_told_before_its_tick(held_s):
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=1.0, deadlines=ONCE)
        driver_of(core, paused=Paused).post(Asked())
        loop.call_at(0.999999, loop.hold_up, held_s)
        await asyncio.sleep(3)
        told = [event.for_s for event in core.events if isinstance(event, Paused)]
        assert told == ([pytest.approx(held_s, abs=1e-5)] if held_s > PAUSE_S else [])
        assert core.events[-1] == Tick()

    run_virtual(scenario)


def test_a_core_whose_deadlines_were_moved_by_a_pause_gets_no_tick_for_the_old_ones():
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=1.0, deadlines={Paused: 100.0})
        driver_of(core, paused=Paused).post(Asked())
        loop.call_at(0.999999, loop.hold_up, 5.0)
        await asyncio.sleep(50)
        assert len(core.events) == 2

    run_virtual(scenario)


def test_a_closed_timer_never_fires():
    async def scenario(loop):
        fired = []
        timer = Timer(fired.append, clock=loop.time)
        timer.need(1.0)
        timer.close()
        timer.need(0.5)
        await asyncio.sleep(5)
        assert fired == []

    run_virtual(scenario)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["core", "performer", "on_handled"])
async def test_a_defect_goes_to_the_crash_and_nothing_is_handled_afterwards(place):
    defect, crash = AssertionError("blocks held by nobody"), Crash()

    def fail(*_):
        raise defect

    core = ScriptedCore({Asked: defect if place == "core" else [Ring()]})
    driver = driver_of(
        core,
        fail if place == "performer" else lambda action: driver.post(Asked("left")),
        crash=crash,
        on_handled=fail if place == "on_handled" else None,
    )
    driver.post(Asked())
    driver.post(Paused(1.0))
    assert await crash.wait() is defect
    assert core.events == [Asked()]


class PanicException(BaseException):
    """What a library in Rust raises, as pyo3 makes it."""


async def test_a_panic_of_a_library_is_a_defect_too_and_leaves_no_half_event_behind():
    panic, crash, done = PanicException("index out of bounds"), Crash(), []

    def fail(action):
        done.append(action)
        raise panic

    core = ScriptedCore({Asked: [Say("a"), Say("b")]})
    driver = driver_of(core, fail, crash=crash)
    driver.post(Asked())
    driver.post(Asked("later"))
    assert core.events == [Asked()]
    assert done == [Say("a")]
    error = await crash.wait()
    assert isinstance(error, NativePanic)
    assert error.__cause__ is panic
    with pytest.raises(NativePanic, match="PanicException: index out of bounds"):
        await crash.race(asyncio.Event())


async def test_what_ends_the_process_is_not_swallowed():
    crash = Crash()

    def fail(_):
        raise KeyboardInterrupt

    driver = driver_of(ScriptedCore({Asked: [Say("a")]}), fail, crash=crash)
    with pytest.raises(KeyboardInterrupt):
        driver.post(Asked())
    assert crash.error is not None


async def test_a_defect_elsewhere_in_the_process_stops_every_core_that_shares_its_crash():
    crash, cores = Crash(), [ScriptedCore(), ScriptedCore()]
    drivers = [driver_of(core, crash=crash) for core in cores]
    crash.report(RuntimeError("device lost"))
    for driver in drivers:
        driver.post(Asked())
    assert [core.events for core in cores] == [[], []]


def test_a_closed_driver_neither_ticks_nor_handles():
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=1.0)
        driver = driver_of(core)
        driver.post(Asked())
        driver.close()
        driver.post(Asked())
        await asyncio.sleep(5)
        assert core.events == [Asked()]

    run_virtual(scenario)


def test_without_ticks_other_events_are_still_handled():
    async def scenario(loop):
        core = ScriptedCore(next_tick_s=1.0)
        driver = driver_of(core)
        driver.post(Asked())
        driver.stop_ticks()
        await asyncio.sleep(5)
        driver.post(Asked())
        await asyncio.sleep(5)
        assert core.events == [Asked(), Asked()]

    run_virtual(scenario)


async def test_the_first_error_counts():
    crash, first = Crash(), RuntimeError("device lost")
    crash.report(first)
    crash.report(RuntimeError("its consequence"))
    assert await crash.wait() is first


def test_a_race_ends_with_an_event_the_time_or_the_crash():
    async def scenario(loop):
        crash, event = Crash(), asyncio.Event()
        await crash.race(event, timeout_s=2.0)
        assert loop.time() == pytest.approx(2.0)
        loop.call_later(1.0, event.set)
        await crash.race(event)
        assert loop.time() == pytest.approx(3.0)
        loop.call_later(1.0, crash.report, RuntimeError("device lost"))
        with pytest.raises(RuntimeError, match="device lost"):
            await crash.race(asyncio.Event())
        with pytest.raises(RuntimeError, match="device lost"):  # whatever else has come
            await crash.race(event)

    run_virtual(scenario)
