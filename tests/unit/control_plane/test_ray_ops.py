"""What happens around an actor, with a stand-in for Ray."""

import asyncio

import pytest

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.ray_home import RayHome
from control_plane.ray_ops import RayReplicas, WorkerIdentity, WorkerSpec


class Method:
    def __init__(self, answer):
        self._answer = answer

    async def remote(self):
        return await self._answer()


class ActorDiedError(Exception):
    """Named like Ray's."""


class Handle:
    def __init__(self, error):
        self.error = error
        self.died = asyncio.Event()
        self.identity, self.serve = Method(self._identity), Method(self._serve)

    async def _identity(self):
        return WorkerIdentity("another-host", 1, "m", Role.DECODE, "1", "h:1")

    async def _serve(self):
        await self.died.wait()
        raise self.error


class Ray:
    """`remote(actor_class).options(…).remote(spec)` gives the handle."""

    def __init__(self, handle):
        self._handle = handle

    def remote(self, what):
        return self._handle if isinstance(what, WorkerSpec) else self

    def options(self, **_):
        return self

    def kill(self, handle, *, no_restart):
        raise RuntimeError("Ray has lost its head")

    def is_initialized(self):
        return False


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("its device broke"), "its device broke"),
        (ActorDiedError("a paragraph"), "its process died"),
    ],
)
async def test_the_end_of_a_worker_is_told_even_when_ray_is_in_trouble(error, told):
    handle = Handle(error)
    ended = asyncio.get_running_loop().create_future()
    home = RayHome("")
    home._ray = Ray(handle)
    replicas = RayReplicas(
        object,
        config=Config(),
        home=home,
        is_local=True,
        on_exit=lambda worker_id, reason: ended.set_result((worker_id, reason)),
    )
    spec = WorkerSpec(WorkerId("decode-0.1"), Role.DECODE, "", {})
    replicas.start(spec, threads=1)
    handle.died.set()
    worker_id, reason = await asyncio.wait_for(ended, 5)
    assert worker_id == spec.worker_id
    assert str(reason) == told
    await replicas.close()
