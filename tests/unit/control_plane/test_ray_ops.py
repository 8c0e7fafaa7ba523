"""The handling of Ray actors, with a stand-in for Ray."""

import asyncio
from types import SimpleNamespace

import pytest

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.child import child_environment
from control_plane.ray_cluster import RayCluster, namespace_of, ray_environment
from control_plane.ray_ops import RayReplicas, WorkerIdentity, WorkerSpec


class Method:
    def __init__(self, answer):
        self._answer = answer

    async def remote(self):
        return await self._answer()


class ActorDiedError(Exception):
    """An exception with the name of Ray's own."""


class Handle:
    def __init__(self, error):
        self.error = error
        self.died = asyncio.Event()
        self.identity, self.serve = Method(self._identity), Method(self._serve)

    async def _identity(self):
        return WorkerIdentity("another-host", 1, "m", Role.DECODE, "1")

    async def _serve(self):
        await self.died.wait()
        raise self.error


class Ray:
    """`remote(actor_class).options(…).remote(spec, environment)` gives the handle."""

    def __init__(self, handle):
        self._handle = handle

    def remote(self, what, environment=None):
        if not isinstance(what, WorkerSpec):
            return self
        self.environment = environment
        return self._handle

    def options(self, **options):
        self.chosen = options
        return self

    def kill(self, handle, *, no_restart):
        raise RuntimeError("Ray has lost its head")

    def is_initialized(self):
        return False


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("its device broke"), "its device broke"),
        (ActorDiedError("a paragraph"), "its process died"),
    ],
)
async def test_the_end_of_a_worker_is_told_even_when_ray_is_in_trouble(error, expected):
    handle = Handle(error)
    ended = asyncio.get_running_loop().create_future()
    home = RayCluster("")
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
    assert str(reason) == expected
    await replicas.close()


async def test_workers_spread_over_nodes_with_their_labels_and_resources_and_avoid_drained_ones():
    labels, resources = {"decode": {"gpu": "in(H100, H200)"}}, {"decode": {"rdma": 1}}
    config = Config(cluster={"node_labels": labels, "node_resources": resources})
    home = RayCluster("h:1")
    ray = home._ray = Ray(Handle(RuntimeError()))
    replicas = RayReplicas(object, config=config, home=home, is_local=False, on_exit=lambda *_: None)
    replicas.start(WorkerSpec(WorkerId("decode-0.1"), Role.DECODE, "", {}), threads=2, avoid=("a1", "b2"))
    assert ray.chosen["label_selector"] == {"gpu": "in(H100, H200)", "ray.io/node-id": "!in(a1,b2)"}
    assert ray.chosen["resources"] == {"rdma": 1}
    assert (ray.chosen["scheduling_strategy"], ray.chosen["num_cpus"]) == ("SPREAD", 2)
    assert ray.chosen["lifetime"] == "detached"
    replicas.start(WorkerSpec(WorkerId("prefill-0.1"), Role.PREFILL, "", {}), threads=2)
    assert "label_selector" not in ray.chosen
    await replicas.close()


async def test_only_workers_of_this_control_planes_address_are_adopted_or_killed():
    home = RayCluster("h:1")
    ray = home._ray = Ray(Handle(RuntimeError()))
    found = {"decode-0.1": "h:7", "decode-0.2": "h:8"}
    listed = [{"name": name, "namespace": namespace_of(address)} for name, address in found.items()]
    ray.util = SimpleNamespace(list_named_actors=lambda all_namespaces: listed)
    asked = []
    ray.get_actor = lambda name, namespace: asked.append((name, namespace)) or Handle(RuntimeError())
    replicas = RayReplicas(object, config=Config(), home=home, is_local=False, on_exit=lambda *_: None)
    assert [worker_id for worker_id, _ in await replicas.survivors("h:7")] == ["decode-0.1"]
    assert asked == [("decode-0.1", namespace_of("h:7"))], "others on this Ray are not even asked"
    await replicas.close(leaves_workers=True)


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
