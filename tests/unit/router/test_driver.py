"""The driver and its sessions: workers come, go, fall silent and come back; time passes on its own."""

import asyncio
import contextlib
from random import Random

import msgspec
import pytest
import uvloop

from baton.config.router import RouterConfig
from baton.core.errors import NoCapacity
from baton.core.ids import RequestId, RouterId, SequenceId, WorkerId
from baton.core.messages import LoadReport, Member, MembershipView, Role
from baton.core.sampling import SamplingParams
from baton.core.sharing import RouterMember
from baton.wire.link import LinkBroken
from router.decisions.core import RouterCore
from router.decisions.events import FailureKind, Submit, Tick, WorkerUpdated
from router.decisions.membership import FollowedMembership
from router.live import sessions
from router.live.driver import Driver
from router.live.drivers import Drivers
from router.live.sessions import Backoff, DirectoryWatch, WorkerSessions
from tests.unit.router.http_fakes import BOUND_S, FakeWorker, check_driver, soon


class Collected:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.tokens = []
        self.end = None
        self.ended = asyncio.Event()

    def on_tokens(self, tokens, *, cached_token_count):
        self.tokens += tokens

    def on_finished(self, finished):
        assert self.end is None
        self.end = finished
        self.ended.set()

    def on_failed(self, failed):
        self.on_finished(failed)


def submit(driver, name="s", *, deadline_s=60.0, max_tokens=8):
    sink = Collected()
    event = Submit(
        SequenceId(f"{name}/0"),
        RequestId(name),
        (5, 6, 7),
        SamplingParams(max_tokens=max_tokens, stop_token_ids=(1,)),
        b"",
        driver.now_s() + deadline_s,
    )
    driver.submit(event, sink)
    return sink


def make_driver(**config):
    now_s = asyncio.get_running_loop().time()
    return Driver(RouterCore(config=RouterConfig(**config), rng=Random(0), now_s=now_s))


@contextlib.asynccontextmanager
async def with_workers(*workers, membership=None, silence_s=60.0, model="tiny", **config):
    driver = make_driver(worker_silence_s=silence_s, **config)
    by_address = {f"{w.hello.worker_id}:1": w for w in workers}

    def dial(address, _):
        if address not in by_address:
            raise LinkBroken(f"nobody at {address}")
        return by_address[address].session()

    membership = FollowedMembership(by_address) if membership is None else membership
    drivers = Drivers({model: driver})
    sessions = WorkerSessions(drivers, membership, router_id=RouterId("r"), silence_s=silence_s, dial=dial)
    async with sessions:
        yield driver, sessions
    assert not driver.status().workers


async def test_tokens_arrive_in_order_and_once():
    worker = FakeWorker(reply=[10, 11, 12])
    async with with_workers(worker) as (driver, _):
        sink = submit(driver)  # It waits, since there is no worker yet.
        await soon(sink.ended)
        assert sink.tokens == [10, 11, 12, 1]
        assert sink.end.generated_count == 4
        assert driver.in_flight_count == 0
        check_driver(driver)


async def test_a_deadline_comes_without_any_other_event():
    driver = make_driver()
    sink = submit(driver, deadline_s=0.01)
    await soon(sink.ended)
    assert sink.end.kind is FailureKind.DEADLINE


async def test_after_client_gone_the_sink_hears_nothing():
    worker = FakeWorker(reply=[10])
    worker.gate.clear()
    async with with_workers(worker) as (driver, _):
        sink = submit(driver)
        await worker.until(lambda: worker.running)
        driver.client_gone(SequenceId("s/0"))
        driver.client_gone(SequenceId("s/0"))
        await worker.until(lambda: worker.cancelled)
        worker.gate.set()
        assert (sink.tokens, sink.end, driver.in_flight_count) == ([], None, 0)


async def test_a_broken_session_is_opened_again_and_the_sequence_goes_on():
    worker = FakeWorker(reply=list(range(10, 15)))
    worker.gate.clear()
    async with with_workers(worker) as (driver, _):
        sink = submit(driver, max_tokens=5)
        await worker.until(lambda: len(worker.started) == 1)
        worker.crash()
        await worker.until(lambda: len(worker.started) == 2)
        worker.gate.set()
        await soon(sink.ended)
        assert sink.tokens == [10, 11, 12, 13, 14]
        assert [s.epoch for s in worker.started] == sorted({s.epoch for s in worker.started})


async def test_a_silent_worker_is_lost_and_dialled_again():
    worker = FakeWorker(reply=[10])
    worker.gate.clear()  # The worker hangs, and its connection stays.
    sessions_seen = []
    async with with_workers(worker, silence_s=0.05) as (driver, _):
        sink = submit(driver, max_tokens=1)
        await worker.until(lambda: worker.started)
        sessions_seen.append(worker.link)
        await worker.until(lambda: len(worker.started) > 1)
        assert worker.link is not sessions_seen[0]
        worker.gate.set()
        await soon(sink.ended)
        assert sink.tokens == [10]


async def test_a_worker_that_cannot_be_told_anything_is_lost():
    worker = FakeWorker(reply=[10])
    async with with_workers(worker) as (driver, _):
        await worker.until(lambda: worker.is_heard)
        link = worker.link

        def broken(_):
            raise LinkBroken("4096 messages unread")

        driver._connections[worker.hello.worker_id].send = broken
        sink = submit(driver)
        await soon(sink.ended)  # This goes over a new session.
        assert worker.link is not link
        assert sink.tokens == [10, 1]


async def test_a_broken_session_ends_whatever_its_worker_still_says():
    worker = FakeWorker(reply=[10])
    async with with_workers(worker) as (driver, _):
        await worker.until(lambda: worker.is_heard)
        link = worker.link
        # A heartbeat arrives in the moment in which the session turns out to be broken.
        worker.tell(LoadReport(Role.AGGREGATED, False, 100_000, 0, 0, 0, 0.01))
        driver._connections[worker.hello.worker_id].break_off()
        await worker.until(lambda: worker.link is not None and worker.link is not link)


async def test_a_worker_with_another_model_is_never_used():
    other, right = FakeWorker("other", reply=[10]), FakeWorker("right", reply=[11])
    right.hello = msgspec.structs.replace(right.hello, model="wanted")
    async with with_workers(other, right, model="wanted") as (driver, _):
        await right.until(lambda: right.is_heard)
        sink = submit(driver, max_tokens=1)
        await soon(sink.ended)
        assert sink.tokens == [11]
        assert [w.worker_id for w in driver.status().workers] == [right.hello.worker_id]


async def test_a_defect_in_a_session_ends_the_router_instead_of_losing_the_worker_for_ever():
    driver = make_driver()

    def dial(address, _):
        raise ZeroDivisionError(address)

    membership = FollowedMembership(["a:1"])
    async with WorkerSessions(
        Drivers({"m": driver}), membership, router_id=RouterId("r"), silence_s=60.0, dial=dial
    ):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(driver.run(), BOUND_S)


async def test_draining_refuses_and_waits_for_what_runs():
    worker = FakeWorker(reply=[10])
    worker.gate.clear()
    async with with_workers(worker) as (driver, _):
        sink = submit(driver)
        await worker.until(lambda: worker.running)
        assert not await driver.drain(0.01)
        with pytest.raises(NoCapacity):
            submit(driver, "late")
        worker.gate.set()
        assert await driver.drain(BOUND_S)
        assert sink.tokens == [10, 1]


async def test_fail_all_tells_everybody_and_frees_the_workers():
    worker = FakeWorker(reply=[10])
    worker.gate.clear()
    async with with_workers(worker) as (driver, _):
        sinks = [submit(driver, name) for name in "abc"]
        await worker.until(lambda: len(worker.running) == 3)
        driver.fail_all("going")
        assert [s.end.message for s in sinks] == ["going"] * 3
        await worker.until(lambda: len(worker.cancelled) == 3)


async def test_a_defect_in_the_decisions_ends_the_router():
    class Wrong(RouterCore):
        def handle(self, event, *, now_s):
            raise AssertionError("accounts disagree")

    driver = Driver(Wrong(config=RouterConfig(), rng=Random(0), now_s=0.0))
    running = asyncio.create_task(driver.run())
    with pytest.raises(AssertionError, match="accounts"):
        submit(driver)
    with pytest.raises(AssertionError, match="accounts"):
        await running


async def test_one_session_per_worker_under_whatever_address():
    worker = FakeWorker(reply=[10])
    async with with_workers(worker) as (driver, _):
        await worker.until(lambda: worker.is_heard)
        known = driver._connections[worker.hello.worker_id]
        twin = type(known)(worker.hello, "other:1", lambda _: None, lambda: None)
        assert not driver.connected(twin)
        driver.disconnected(twin, "the twin ended")  # Nothing else is lost with it.
        assert len(driver.status().workers) == 1


# --- membership -----------------------------------------------------------------------------------


def member(worker, **changes):
    fields = {
        "worker_id": worker.hello.worker_id,
        "role": worker.hello.role,
        "address": f"{worker.hello.worker_id}:1",
        "model": "tiny",
        "fingerprint": "f",
    }
    return Member(**(fields | changes))


def view(version, *members, life="a"):
    return MembershipView(life, version, tuple(members))


async def test_workers_join_as_the_directory_lists_them_and_survive_its_restart():
    first, second = FakeWorker("a", reply=[10]), FakeWorker("b", reply=[10])
    async with with_workers(first, second, membership=FollowedMembership()) as (driver, sessions):
        sessions.on_view(view(1, member(first)))
        await first.until(lambda: first.is_heard)
        sessions.on_view(view(0, life="b"))  # The worker restarted and knows no sequence.
        assert len(driver.status().workers) == 1
        sessions.on_view(view(1, member(second), life="b"))
        await second.until(lambda: second.is_heard)
        assert len(driver.status().workers) == 2
        second.tell(LoadReport(Role.AGGREGATED, False, 10, 0, 0, 0, 0.01))
        sink = submit(driver)
        await soon(sink.ended)


async def test_a_worker_no_longer_listed_is_not_dialled_again():
    first, second = FakeWorker("a", reply=[10]), FakeWorker("b", reply=[10])
    async with with_workers(first, second, membership=FollowedMembership()) as (driver, sessions):
        sessions.on_view(view(1, member(first), member(second)))
        await first.until(lambda: first.is_heard)
        await second.until(lambda: second.is_heard)
        sessions.on_view(view(2, member(second)))
        first.crash()
        second.crash()
        await second.until(lambda: second.is_heard)
        assert [w.worker_id for w in driver.status().workers] == [second.hello.worker_id]


def test_a_roster_reports_changes_of_known_workers_only():
    a = Member(WorkerId("a.1"), Role.PREFILL, "a:1", "m", "f")
    membership = FollowedMembership(["hand:1"])
    assert membership.on_view(view(5, a)) == []
    assert membership.addresses == {"hand:1", "a:1"}
    switched = Member(WorkerId("a.1"), Role.DECODE, "a:1", "m", "f", is_draining=True)
    assert membership.on_view(view(6, switched)) == [WorkerUpdated(WorkerId("a.1"), Role.DECODE, True)]
    assert membership.on_view(view(4, a)) == []  # This view is outdated.
    assert membership.on_view(view(6, switched)) == []
    assert membership.on_view(view(1, life="b")) == []
    assert membership.addresses == {"hand:1"}


def test_backoff_is_bounded_and_begins_anew():
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(20)]
    assert waits == sorted(waits)
    assert waits[-1] == 2.0
    backoff.succeeded()
    assert backoff.next_s() == waits[0]


async def test_the_directory_is_followed_through_its_absence(caplog):
    views, seen, away = [view(1), view(2)], [], asyncio.Event()

    class Flaky:
        address = "d:1"

        async def watch(self, _):
            if away.is_set():
                away.clear()
                raise LinkBroken("refused")
            yield views[len(seen)]
            away.set()
            raise LinkBroken("it died")

    watch = DirectoryWatch(Flaky(), RouterMember(RouterId("r")))
    both = asyncio.Event()

    def on_view(one):
        assert watch.is_current
        seen.append(one)
        if len(seen) == 2:
            both.set()

    following = asyncio.create_task(watch.run(on_view))
    await soon(both)
    assert seen == views
    assert not caplog.records, "an absence of a moment is none to tell of"
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


async def test_an_absence_of_the_directory_that_lasts_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(sessions, "DIRECTORY_ABSENCE_TOLD_S", 0.0)
    attempts, many = [], asyncio.Event()

    class Gone:
        address = "d:1"

        async def watch(self, _):
            attempts.append(len(attempts))
            if len(attempts) == 2:
                yield view(1)
            if len(attempts) == 5:
                many.set()
            raise LinkBroken("refused")

    watch = DirectoryWatch(Gone(), RouterMember(RouterId("r")))
    following = asyncio.create_task(watch.run(lambda _: None))
    await soon(many)
    assert [record.getMessage() for record in caplog.records] == ["directory d:1 is away: refused"]
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


class OverdueCore:
    """A core whose next tick is always overdue."""

    next_tick_s = -1.0

    def handle(self, event, *, now_s):
        return []


def test_a_tick_that_is_overdue_stops_nobody():
    async def feed_it():
        driver = Driver(OverdueCore())
        for _ in range(3):
            driver.feed(Tick())

    uvloop.run(feed_it())
