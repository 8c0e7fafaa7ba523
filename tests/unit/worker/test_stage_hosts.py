"""Actors of stages are ended when a worker's places cannot be used."""

import asyncio
import sys
import types

import pytest

from baton.config import Config, ModelConfig
from baton.core.errors import SetupError
from engine.execution.spread import FollowerSetup
from worker import stage_hosts
from worker.stage_hosts import placed_stages


class Actors:
    """What `placed_stages` uses of Ray. Actors are numbers; each says its node, or raises."""

    def __init__(self, nodes, here="here"):
        self.nodes, self.here = nodes, here
        self.made, self.killed = [], []

    def install(self, monkeypatch):
        ray = types.ModuleType("ray")
        util, strategies = types.ModuleType("ray.util"), types.ModuleType("ray.util.scheduling_strategies")
        bundles = [{"CPU": 1}] * (1 + len(self.nodes))
        group = types.SimpleNamespace(bundle_specs=bundles)
        util.get_current_placement_group = lambda: group
        strategies.PlacementGroupSchedulingStrategy = lambda *_, **__: None
        ray.util = util
        ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: self.here)
        ray.remote = lambda _: self
        ray.kill = lambda actor, *, no_restart: self.killed.append(actor)
        for name, module in (("ray", ray), ("ray.util", util), (strategies.__name__, strategies)):
            monkeypatch.setitem(sys.modules, name, module)

    def options(self, **_):
        return self

    def remote(self, environment):
        number = len(self.made)
        self.environment = environment

        async def node():
            if isinstance(self.nodes[number], BaseException):
                raise self.nodes[number]
            return self.nodes[number]

        actor = types.SimpleNamespace(node=types.SimpleNamespace(remote=node))
        self.made.append(actor)
        return actor


def config(**cluster):
    return Config.model_validate(
        {"engine": {"shape": "pp3"}, "cluster": {"worker_host": "127.0.0.1", **cluster}}
    )


async def test_only_the_actor_of_a_stage_of_this_host_is_ended(monkeypatch):
    ray = Actors(["there", "here"])
    ray.install(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    stages = await placed_stages("w.1", config(), "127.0.0.1:1")
    assert ray.environment["OMP_NUM_THREADS"] == "3", "followers elsewhere have as many threads"
    assert [host is None for host in stages.spread.hosts] == [True, False, True]
    assert ray.killed == ray.made[1:]
    own, far = (stages.parts.setup(FollowerSetup(rank, "", (), "", "", "", "")).part for rank in (2, 1))
    assert (own, far.link_rank, far.name) == (None, 1, "w.1/rank1")
    await stages.parts.close()


async def test_stages_on_gpus_stay_where_their_gpus_are_visible(monkeypatch):
    ray = Actors(["here", "there"])
    ray.install(monkeypatch)
    on_gpus = config().model_copy(update={"model": ModelConfig(device="cuda")})
    stages = await placed_stages("w.1", on_gpus, "127.0.0.1:1")
    assert [host is None for host in stages.spread.hosts] == [True, False, False]
    assert ray.killed == []
    await stages.parts.close()


async def test_stages_that_all_are_here_are_those_of_any_worker(monkeypatch):
    ray = Actors(["here", "here"])
    ray.install(monkeypatch)
    assert await placed_stages("w.1", config(), "127.0.0.1:1") is None
    assert ray.killed == ray.made


async def test_actors_are_ended_where_parts_cannot_be_handed_over(monkeypatch):
    ray = Actors(["there", "there"])
    ray.install(monkeypatch)
    checked = Config.model_validate({**config().model_dump(), "transfer": {"checksums": True}})
    with pytest.raises(SetupError, match=r"transfer\.checksums"):
        await placed_stages("w.1", checked, "127.0.0.1:1")
    assert len(ray.killed) == len(ray.made) == 2


async def test_a_stage_that_does_not_start_ends_the_others(monkeypatch):
    ray = Actors(["there", RuntimeError("no such place")])
    ray.install(monkeypatch)
    with pytest.raises(SetupError, match="no such place"):
        await placed_stages("w.1", config(), "127.0.0.1:1")
    assert sorted(map(id, ray.killed)) == sorted(map(id, ray.made))


async def test_a_worker_that_is_given_up_meanwhile_ends_its_stages(monkeypatch):
    ray = Actors(["there", asyncio.CancelledError()])
    ray.install(monkeypatch)
    with pytest.raises(asyncio.CancelledError):
        await placed_stages("w.1", config(), "127.0.0.1:1")
    assert len(ray.killed) == 2


async def test_no_actor_is_made_where_the_worker_cannot_be_reached(monkeypatch):
    ray = Actors(["there", "there"])
    ray.install(monkeypatch)

    def nowhere(*_, **__):
        raise SetupError("name the address")

    monkeypatch.setattr(stage_hosts, "reachable_host", nowhere)
    with pytest.raises(SetupError, match="name the address"):
        await placed_stages("w.1", config(), "127.0.0.1:1")
    assert len(ray.killed) == len(ray.made)
