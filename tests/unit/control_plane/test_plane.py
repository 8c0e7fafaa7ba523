import asyncio

import msgspec

from baton.config import ClusterConfig
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.core.messages import INFO_NOTE, Member, Role
from baton.core.sharing import RouterMember
from control_plane.plane import ControlPlane


class Replicas:
    def __init__(self):
        self.started, self.killed, self.drained = [], [], []

    def start(self, worker_id, role):
        self.started.append((worker_id, role))

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
    plane.want({Role.DECODE: 1})
    ((first, _),) = replicas.started
    plane.renew(member(first))
    await asyncio.wait_for(plane.until_settled(), 5)
    watch = plane.watch(RouterMember(RouterId("r")))
    assert [m.worker_id for m in (await anext(watch)).members] == [first]
    view = await asyncio.wait_for(anext(watch), 5)  # the lease lapses, and the watcher hears at once
    assert view.members == ()
    await asyncio.sleep(0)
    assert replicas.killed == [first]
    assert len(replicas.started) == 1
    plane.exited(first, "SIGKILL")
    async with asyncio.timeout(5):
        while len(replicas.started) < 2:
            await anext(watch)
    plane.close()


async def test_a_dead_process_leaves_the_view_at_once_and_its_last_renewal_does_not_bring_it_back():
    replicas = Replicas()
    plane = plane_of(replicas, member_lease_s=60)
    plane.want({Role.PREFILL: 1})
    worker_id = replicas.started[0][0]
    plane.renew(member(worker_id, Role.PREFILL))
    plane.exited(worker_id, "its process died")
    plane.renew(member(worker_id, Role.PREFILL))
    assert plane.book.view.members == ()
    plane.close()


async def test_a_life_that_is_being_killed_does_not_join_again(caplog):
    caplog.set_level("INFO")
    replicas = Replicas()
    plane = plane_of(replicas)
    plane.want({Role.DECODE: 1})
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
    plane.want({Role.DECODE: 2})
    plane.exited(replicas.started[0][0], SetupError("no weights"))
    plane.exited(replicas.started[1][0], SetupError("no weights either"))
    assert plane.setup_error.result() == "no weights"
    plane.close()


async def test_a_watcher_hears_from_an_idle_directory():
    plane = plane_of(Replicas())
    watch = plane.watch(RouterMember(RouterId("r")))
    first = await anext(watch)
    again = await asyncio.wait_for(anext(watch), 5)
    assert again == first
    plane.close()
