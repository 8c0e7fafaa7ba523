"""Where expert ranks are started: beside their workers, or on cores and nodes of their own."""

import asyncio

import pytest

from baton.config import Config
from baton.config.served_models import apart_expert_ranks, expert_ranks
from baton.core.errors import SetupError
from baton.core.ids import ExpertRankId, WorkerId
from baton.core.messages import Role
from baton.core.operate import DrainExpertRank, Pool, RebalanceExperts, ScaleExperts, Version
from baton.wire.crash import Crash
from commands.settings import overlay
from control_plane.expert_groups import ExpertGroups
from control_plane.expert_orders import OrderRefused
from control_plane.expert_ranks import StartedExpertRanks
from control_plane.experts.group_values import StartExpertRank
from control_plane.plane import restart_policy
from control_plane.ray_experts import ExpertRankSpec, RayExpertRanks
from control_plane.ray_ops import RayReplicas, WorkerIdentity
from control_plane.reconcile_events import StartReplica
from control_plane.workers import RayWorkers
from tests.unit.control_plane.test_expert_orders import group
from tests.unit.control_plane.test_ray_ops import Handle, Ray, RayCluster
from tests.unit.control_plane.test_workers_of_models import Started


def config_of(parallel, *, ranks=0, device="cpu", **cluster):
    counts = {"prefill_workers": 0, "decode_workers": 2, **cluster}
    experts = {"parallel": parallel, "ranks": ranks}
    model = {"path": "a/m", "device": device}
    return Config.model_validate({"model": model, "cluster": counts, "experts": experts})


def started_workers(config, monkeypatch, *, is_local=True):
    monkeypatch.setattr("control_plane.workers.usable_cores", lambda: list(range(8)))
    ray = Started()
    ray.is_local = is_local
    workers = RayWorkers(ray, config, overlay=overlay)
    workers.control_address = "h:1"
    for number in range(2):
        worker_id = WorkerId(f"decode-{number}.1")
        workers.start(StartReplica(worker_id, Role.DECODE, "wanted", "m", Version("1")))
    return ray, workers


def rank_place(workers, number, role=Role.DECODE):
    return workers.expert_rank(ExpertRankId(f"experts-{role}-{number}.1"), number, "m", role)


def test_ranks_follow_the_workers_or_are_as_many_as_asked_for_each_pool():
    assert expert_ranks(config_of("off")) == {}
    assert expert_ranks(config_of("workers")) == {"decode": 2}
    both = config_of("ranks", ranks=3, prefill_workers=1)
    assert expert_ranks(both) == {"prefill": 3, "decode": 3}
    assert (apart_expert_ranks(both), apart_expert_ranks(config_of("workers"))) == (6, 0)


def test_a_rank_beside_a_worker_has_its_cores_and_threads(monkeypatch):
    ray, workers = started_workers(config_of("workers"), monkeypatch)
    places = [rank_place(workers, number) for number in range(3)]
    assert [place.cores for place in places] == [ray.specs[n][0].cores for n in (0, 1, 0)]
    assert [place.beside for place in places] == ["decode-0.1", "decode-1.1", "decode-0.1"]
    assert [place.threads for place in places] == [4, 4, 4]


def test_a_rank_of_its_own_has_cores_that_no_worker_has(monkeypatch):
    ray, workers = started_workers(config_of("ranks", ranks=2), monkeypatch)
    names = []
    workers.apart = lambda: names
    places = []
    for number in range(2):
        places.append(rank_place(workers, number))
        names.append(ExpertRankId(f"experts-decode-{number}.1"))
    cores = [*(spec.cores for spec, _ in ray.specs), *(place.cores for place in places)]
    assert sorted(core for share in cores for core in share) == list(range(8))
    assert [place.threads for place in places] == [2, 2]
    assert rank_place(workers, 0).cores == places[0].cores, "a rank that starts anew has the cores it had"
    assert all(place.beside is None for place in places)


def test_a_rollout_may_not_change_what_expert_ranks_hold(monkeypatch):
    _, workers = started_workers(config_of("workers"), monkeypatch)
    pool = Pool("m", {Role.DECODE: 2}, Version("2", ("engine.kv_bytes=1000000",)))
    workers.check(pool)
    for change in ("model.path=b/m", "experts.replicas=2"):
        with pytest.raises(SetupError, match="hold those of one version"):
            workers.check(Pool("m", {Role.DECODE: 2}, Version("3", (change, "model.name=m"))))


class StartedRanks:
    def __init__(self):
        self.started, self.has_started = [], asyncio.Event()

    def start(self, spec, place, *, node="", avoid=()):
        self.started.append((spec, node, avoid))
        self.has_started.set()

    async def kill(self, rank_id):
        raise AssertionError("it has no process")


async def test_on_a_ray_cluster_a_rank_waits_for_the_node_of_its_worker(monkeypatch):
    ray, workers = started_workers(config_of("workers"), monkeypatch, is_local=False)
    nodes = {"decode-0.1": asyncio.get_running_loop().create_future()}

    async def identity(worker_id, *, timeout_s):
        node = await nodes[worker_id]
        return WorkerIdentity("h", 1, "m", Role.DECODE, "1", 0.0, node)

    ray.identity = identity
    ranks, exits = StartedRanks(), []
    started = StartedExpertRanks(ranks, workers, spawn=asyncio.create_task, is_local=False)
    started.on_exit = lambda rank_id, reason: exits.append(rank_id)
    start = StartExpertRank(ExpertRankId("experts-decode-0.a1"), 2, "wanted", ("n9",))
    started.start(start, "m", Role.DECODE)
    await asyncio.sleep(0)
    assert ranks.started == []
    nodes["decode-0.1"].set_result("n1")
    await ranks.has_started.wait()
    ((spec, node, avoid),) = ranks.started
    assert (spec.group, spec.ranks, node, avoid) == ("decode of m", 2, "n1", ("n9",))

    nodes["decode-1.1"] = asyncio.get_running_loop().create_future()
    other = StartExpertRank(ExpertRankId("experts-decode-1.a2"), 2, "wanted")
    started.start(other, "m", Role.DECODE)
    await started.kill(other.rank_id)
    assert exits == [other.rank_id]

    nodes["decode-1.1"] = asyncio.get_running_loop().create_future()
    nodes["decode-1.1"].set_result("")  # its process has ended: the rank is not started just anywhere
    third = StartExpertRank(ExpertRankId("experts-decode-1.a3"), 2, "wanted")
    has_ended = asyncio.Event()
    started.on_exit = lambda rank_id, reason: (exits.append(rank_id), has_ended.set())
    started.start(third, "m", Role.DECODE)
    await has_ended.wait()
    assert exits == [other.rank_id, third.rank_id]
    assert len(ranks.started) == 1


@pytest.mark.parametrize(
    ("parallel", "device", "node", "cpus", "gpus", "labels"),
    [
        ("workers", "cpu", "n1", 0, 0.0, {"ray.io/node-id": "in(n1)"}),
        ("workers", "cuda", "", 0, 1.0, {"ray.io/node-id": "!in(n9)"}),
        ("ranks", "cpu", "", 3, 0.0, {"ray.io/node-id": "!in(n9)"}),
    ],
)
async def test_what_ray_is_asked_for(monkeypatch, parallel, device, node, cpus, gpus, labels):
    config = config_of(parallel, ranks=2, device=device)
    _, workers = started_workers(config, monkeypatch, is_local=False)
    home = RayCluster("h:1")
    fake = home._ray = Ray(Handle(RuntimeError()))
    made = []

    def remote(what, *environment):
        made.extend(environment)
        return fake._handle if isinstance(what, ExpertRankSpec) else fake

    fake.remote = remote
    replicas = RayReplicas(object, config=config, home=home, is_local=False, on_exit=lambda *_: None)
    ranks = RayExpertRanks(object, workers=replicas, home=home, is_local=False, on_exit=lambda *_: None)
    spec = ExpertRankSpec(ExpertRankId("e.1"), "g", "m", Role.DECODE, "h:1", config.model_dump(), 2, 3)
    ranks.start(spec, rank_place(workers, 0), node=node, avoid=("n9",))
    assert (fake.chosen["num_cpus"], fake.chosen["num_gpus"]) == (cpus, gpus)
    assert fake.chosen["label_selector"] == labels
    assert fake.chosen["namespace"] == "baton h:1 experts"
    assert [one["OMP_NUM_THREADS"] for one in made] == ["3"]
    assert ranks.rank_ids == ("e.1",)
    await ranks.close(leaves_ranks=True)


class NoRanks:
    def __init__(self):
        self.starts, self.workers = [], 0

    def start(self, start, model, role):
        self.starts.append(start.rank_id)

    def worker_count(self, model, role):
        return self.workers if role is Role.DECODE else 0

    async def kill(self, rank_id):
        self.on_exit(rank_id, "killed")


def groups_of(config, processes):
    return ExpertGroups(
        {"m": config},
        life="a",
        processes=processes,
        spawn=asyncio.create_task,
        crash=Crash(),
        restart=restart_policy(config.cluster),
    )


async def test_ranks_beside_workers_follow_the_pool_and_workers_that_changed_their_role():
    processes = NoRanks()
    groups = groups_of(config_of("workers"), processes)
    processes.on_exit = groups.on_exit

    def wanted(count):
        groups.follow([Pool("m", {Role.DECODE: count})], frozenset(), {})
        return [one.wanted_ranks for one in groups.states()]

    assert wanted(0) == []
    assert wanted(2) == [2]
    assert wanted(3) == [3]
    processes.workers = 2
    assert wanted(0) == [2], "two workers were started in this role and go on using its ranks"
    processes.workers = 0
    ended = asyncio.Event()
    groups.on_changed = lambda: None if groups.states() else ended.set()
    wanted(0)
    async with asyncio.timeout(30):
        await ended.wait()
    groups.close()


async def test_a_number_of_ranks_that_was_ordered_holds_for_ranks_of_their_own_only():
    for parallel, expected in (("workers", 2), ("ranks", 5)):
        groups = groups_of(config_of(parallel, ranks=2), NoRanks())
        groups.follow([Pool("m", {Role.DECODE: 2})], frozenset(), {"decode of m": 5})
        assert [one.wanted_ranks for one in groups.states()] == [expected]
        groups.close()


async def test_ranks_beside_workers_are_scaled_with_them():
    groups = groups_of(config_of("workers"), NoRanks())
    for action in (ScaleExperts(3), DrainExpertRank("experts-decode-0", False)):
        with pytest.raises(OrderRefused, match="scale the workers"):
            groups.check(action, group())
    groups.check(DrainExpertRank("experts-decode-0"), group())
    groups.check(RebalanceExperts(), group())
    apart = groups_of(config_of("ranks", ranks=2), NoRanks())
    apart.check(ScaleExperts(3), group())
