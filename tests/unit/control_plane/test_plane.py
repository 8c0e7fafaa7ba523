import asyncio
import logging

import msgspec

from baton.config import ClusterConfig
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.core.messages import INFO_NOTE, Member, Role
from baton.core.operate import DrainWorker, Order, Outcome, Pool, RollOut, Scale, SwitchRole, Version
from baton.core.sharing import RouterMember
from baton.wire.crash import Crash
from control_plane.plane import ControlPlane
from control_plane.reconcile_events import Adopted


class Replicas:
    def __init__(self):
        self.started, self.killed, self.drained, self.switched = [], [], [], []

    def start(self, start):
        self.started.append((start.worker_id, start.role))

    async def switch_role(self, worker_id, role, address):
        self.switched.append((worker_id, role, address))

    async def drain(self, worker_id):
        self.drained.append(worker_id)

    async def kill(self, worker_id):
        self.killed.append(worker_id)


def member(worker_id, role=Role.DECODE):
    return Member(worker_id=worker_id, role=role, address="h:1", model="m", fingerprint="f")


def plane_of(replicas, **settings):
    config = ClusterConfig(**{"restart_backoff_s": 0.01, "member_lease_s": 0.05, **settings})
    return ControlPlane(config, life="x", replicas=replicas, spawn=asyncio.create_task)


async def test_a_silent_worker_is_killed_and_replaced_once_it_is_dead():
    replicas = Replicas()
    plane = plane_of(replicas)
    plane.want([Pool("m", {Role.DECODE: 1})])
    ((first, _),) = replicas.started
    plane.renew(member(first))
    await asyncio.wait_for(plane.until_settled(), 5)
    watch = plane.watch(RouterMember(RouterId("r")))
    assert [m.worker_id for m in (await anext(watch)).members] == [first]
    view = await asyncio.wait_for(anext(watch), 5)  # the lease lapses, and the watcher is notified at once
    assert view.members == ()
    await asyncio.sleep(0)
    assert replicas.killed == [first]
    assert len(replicas.started) == 1
    plane.on_exit(first, "SIGKILL")
    async with asyncio.timeout(5):
        while len(replicas.started) < 2:
            await anext(watch)
    plane.close()


async def test_a_dead_process_leaves_the_view_at_once_and_its_last_renewal_does_not_bring_it_back():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    plane.want([Pool("m", {Role.PREFILL: 1})])
    worker_id = replicas.started[0][0]
    plane.renew(member(worker_id, Role.PREFILL))
    plane.on_exit(worker_id, "its process died")
    plane.renew(member(worker_id, Role.PREFILL))
    assert plane.book.view.members == ()
    plane.close()


async def test_a_life_that_is_being_killed_does_not_join_again(caplog):
    caplog.set_level("INFO")
    replicas = Replicas()
    plane = plane_of(replicas)
    plane.want([Pool("m", {Role.DECODE: 1})])
    worker_id = replicas.started[0][0]
    plane.renew(member(worker_id))
    watch = plane.watch(RouterMember(RouterId("r")))
    assert (await anext(watch)).members
    assert (await asyncio.wait_for(anext(watch), 5)).members == ()
    assert "its lease lapsed" in caplog.text
    caplog.clear()
    plane.renew(member(worker_id))
    assert plane.book.view.members == ()
    assert "joined" not in caplog.text
    plane.close()


async def test_what_a_worker_goes_without_is_logged_when_it_joins(caplog):
    plane = plane_of(Replicas())
    plane.renew(
        msgspec.structs.replace(member("decode-0.x1"), notes=("KV transfer without nixl: no plugin",))
    )
    assert "worker decode-0.x1: KV transfer without nixl: no plugin" in caplog.text
    plane.close()


async def test_what_all_workers_say_is_logged_once_and_only_what_is_amiss_as_a_warning(caplog):
    caplog.set_level("INFO")
    plane = plane_of(Replicas())
    slow, fine = "kernels: torch, slower, because there is no compiler", "kernels: native (avx2, threads: 1)"
    for name in ("prefill-0.x1", "decode-0.x1"):
        plane.renew(msgspec.structs.replace(member(name), notes=(slow, INFO_NOTE + fine)))
    levels = {r.getMessage(): r.levelname for r in caplog.records if "kernels: " in r.getMessage()}
    assert levels == {f"worker prefill-0.x1: {slow}": "WARNING", f"worker prefill-0.x1: {fine}": "INFO"}
    plane.close()


async def test_what_the_operator_must_change_is_told_as_the_worker_told_it():
    replicas = Replicas()
    plane = plane_of(replicas)
    plane.want([Pool("m", {Role.DECODE: 2})])
    plane.on_exit(replicas.started[0][0], SetupError("no weights"))
    plane.on_exit(replicas.started[1][0], SetupError("no weights either"))
    assert plane.setup_error.result() == "no weights"
    plane.close()


async def test_a_watcher_hears_from_an_idle_directory():
    plane = plane_of(Replicas())
    watch = plane.watch(RouterMember(RouterId("r")))
    first = await anext(watch)
    again = await asyncio.wait_for(anext(watch), 5)
    assert again == first
    plane.close()


async def settled(plane, replicas, counts):
    plane.want([Pool("m", counts)])
    for worker_id, role in replicas.started:
        plane.renew(member(worker_id, role))
    await asyncio.wait_for(plane.until_settled(), 5)
    return [worker_id for worker_id, _ in replicas.started]


async def test_an_order_to_switch_is_followed_until_the_worker_has_the_role_and_kept_in_the_log():
    replicas, remembered = Replicas(), []
    plane = plane_of(replicas, member_lease_s=60)
    plane._remember = remembered.append
    _, two, _ = await settled(plane, replicas, {Role.PREFILL: 1, Role.DECODE: 2})
    decision = plane.order(Order(SwitchRole("decode-0", Role.PREFILL), "operator me", "more prompts"))
    assert decision.outcome is Outcome.ACCEPTED
    await asyncio.sleep(0)
    assert replicas.switched == [(two, Role.PREFILL, "h:1")]
    plane.renew(msgspec.structs.replace(member(two), is_draining=True))
    assert plane.state().decisions[-1].outcome is Outcome.ACCEPTED
    plane.renew(member(two, Role.PREFILL))
    last = plane.state().decisions[-1]
    assert (last.number, last.outcome, last.who) == (decision.number, Outcome.DONE, "operator me")
    assert "stayed loaded" in last.text
    assert len(replicas.started) == 3
    assert replicas.killed == replicas.drained == []
    assert remembered[-1].decisions[-1] == last
    assert remembered[-1].pools[0].counts == {Role.PREFILL: 2, Role.DECODE: 1}
    plane.close()


async def test_what_cannot_be_done_is_refused_with_a_reason_and_changes_nothing():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    await settled(plane, replicas, {Role.DECODE: 1})
    before = plane.state().pools

    def check(pool):
        assert (pool.model, pool.version.name) == ("m", "2")
        raise SetupError("no such model")

    plane._check = check
    for action in (Scale(Role.DECODE, -1), DrainWorker("nobody"), RollOut(Version("2"))):
        decision = plane.order(Order(action, "me"))
        assert decision.outcome is Outcome.REFUSED
        assert decision.text
    assert plane.state().pools == before
    assert [d.number for d in plane.state().decisions] == [1, 2, 3]
    plane.close()


async def test_workers_that_load_for_long_are_named_until_all_are_there(caplog, monkeypatch):
    monkeypatch.setattr("control_plane.plane.PROGRESS_S", 0.01)
    caplog.set_level(logging.INFO)
    told = asyncio.Event()
    log_progress = ControlPlane._log_progress
    monkeypatch.setattr(ControlPlane, "_log_progress", lambda plane: (log_progress(plane), told.set()))
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    plane.want([Pool("m", {Role.DECODE: 2})])
    all_there = asyncio.create_task(plane.until_settled())
    line = "2 of 2 workers are not ready: decode-0 (starting for 0 s), decode-1 (starting for 0 s)"
    await asyncio.wait_for(told.wait(), 10)
    assert line in caplog.messages
    assert not all_there.done()
    starts = [text for text in caplog.messages if text.endswith("starts and loads m")]
    assert len(starts) == 2
    all_there.cancel()
    plane.close()


async def test_what_should_be_known_about_a_version_is_in_the_decision():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    await settled(plane, replicas, {Role.DECODE: 2})
    plane._check = lambda pool: f"its {pool.count(Role.DECODE)} workers share a core"
    for is_advice in (True, False):
        decision = plane.order(Order(RollOut(Version("2")), "me", is_advice=is_advice))
        assert decision.outcome is (Outcome.ADVISED if is_advice else Outcome.ACCEPTED)
        assert decision.text.endswith("; but its 2 workers share a core")
    plane.close()


async def test_advice_is_logged_and_not_followed():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    await settled(plane, replicas, {Role.DECODE: 1})
    decision = plane.order(Order(Scale(Role.DECODE, 3), "autoscaler", "a burst", is_advice=True))
    assert (decision.outcome, len(replicas.started)) == (Outcome.ADVISED, 1)
    plane.close()


async def test_a_drained_worker_is_replaced_and_the_order_is_done_when_it_is_gone():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    (worker_id,) = await settled(plane, replicas, {Role.DECODE: 1})
    plane.order(Order(DrainWorker("decode-0"), "me"))
    await asyncio.sleep(0)
    assert replicas.drained == [worker_id]
    plane.on_exit(worker_id, "drained")
    assert plane.state().decisions[-1].outcome is Outcome.DONE
    assert len(replicas.started) == 2
    plane.close()


async def test_watchers_hear_of_every_change():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    await settled(plane, replicas, {Role.DECODE: 1})
    changes = plane.changes()
    assert (await anext(changes)).is_settled
    plane.order(Order(Scale(Role.DECODE, 2), "me"))
    state = await asyncio.wait_for(anext(changes), 5)
    assert not state.is_settled
    assert state.pool("").counts == {Role.DECODE: 2}
    plane.close()


async def test_what_was_ordered_outlives_the_control_plane():
    replicas, remembered = Replicas(), []
    plane = plane_of(replicas, member_lease_s=60)
    plane._remember = remembered.append
    await settled(plane, replicas, {Role.DECODE: 1})
    plane.order(Order(Scale(Role.DECODE, 2), "me"))
    plane.close()
    again = plane_of(replicas, member_lease_s=60)
    again.want([Pool("m", {Role.DECODE: 1})], record=remembered[-1])
    assert again.state().pool("m").counts == {Role.DECODE: 2}
    assert [d.outcome for d in again.state().decisions] == [Outcome.FAILED]  # it was not finished in time
    assert again.order(Order(Scale(Role.DECODE, 1), "me")).number == 2
    again.close()


async def test_a_worker_that_renewed_its_lease_before_it_was_adopted_serves():
    """The directory serves before Ray has listed the workers, and later renewals change nothing."""
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    plane.renew(member("decode-0.y1"))
    plane.adopt(Adopted("decode-0.y1", "m", Role.DECODE, "1"))
    plane.adopt(Adopted("decode-1.y2", "m", Role.DECODE, "1"))
    plane.want([Pool("m", {Role.DECODE: 2})])
    assert not plane.reconciler.is_settled
    plane.renew(member("decode-1.y2"))
    assert plane.reconciler.is_settled
    assert replicas.started == []
    plane.close()


async def test_a_defect_while_orders_are_followed_ends_the_control_plane_and_starts_nothing_more():
    class Broken(Replicas):
        def start(self, start):
            super().start(start)
            raise ZeroDivisionError(start.worker_id)

    replicas, crash = Broken(), Crash()
    plane = ControlPlane(ClusterConfig(), life="x", replicas=replicas, spawn=asyncio.create_task, crash=crash)
    plane.want([Pool("m", {Role.DECODE: 2})])
    assert isinstance(await asyncio.wait_for(crash.wait(), 5), ZeroDivisionError)
    plane.on_exit(replicas.started[0][0], "it died")
    assert len(replicas.started) == 1
