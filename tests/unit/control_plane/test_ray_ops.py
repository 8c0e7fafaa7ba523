"""What happens around an actor, with a stand-in for Ray."""

import asyncio

import pytest

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.child import child_environment
from control_plane.ray_ops import RayReplicas, WorkerSpec, ray_environment


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
        return "another-host", 1

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
    replicas = RayReplicas(
        object, config=Config(), on_exit=lambda worker_id, reason: ended.set_result((worker_id, reason))
    )
    replicas._ray = Ray(handle)
    spec = WorkerSpec(WorkerId("decode-0.1"), Role.DECODE, "", {})
    replicas.start(spec, threads=1)
    handle.died.set()
    worker_id, reason = await asyncio.wait_for(ended, 5)
    assert worker_id == spec.worker_id
    assert str(reason) == told
    await replicas.close()


@pytest.fixture
def no_ray_variables(monkeypatch):
    for name in (
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    ):
        monkeypatch.delenv(name, raising=False)


def test_a_ray_of_our_own_stays_on_loopback_and_wants_a_new_token(no_ray_variables):
    one, other = ray_environment(is_local=True), ray_environment(is_local=True)
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_a_ray_that_is_joined_is_as_its_operator_made_it(no_ray_variables, monkeypatch):
    joined = ray_environment(is_local=False)
    assert "RAY_AUTH_TOKEN" not in joined
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in joined
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert ray_environment(is_local=False)["RAY_AUTH_MODE"] == "token"


def test_what_opens_ray_is_not_given_to_children(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert "RAY_AUTH_TOKEN" not in child_environment(Config())
    assert "PATH" in child_environment(Config())
