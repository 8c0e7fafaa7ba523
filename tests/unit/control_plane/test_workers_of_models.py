"""The specification of a worker of one of several models, and the checks before any is started."""

import pytest

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import Pool, Version
from commands.settings import overlay
from control_plane.launch import check_setup
from control_plane.ray_ops import RayReplicas, WorkerSpec
from control_plane.reconcile_events import StartReplica
from control_plane.workers import RayWorkers, first_pools
from engine.model_files import check as model_check
from tests.models import make_model
from tests.unit.control_plane.test_ray_ops import Handle, Ray, RayCluster


def config_of(**models):
    return Config.model_validate({"models": models, "router": {"port": 0}})


CONFIG = config_of(
    chat={
        "model": {"path": "a/chat", "device": "cuda"},
        "engine": {"threads": 3},
        "cluster": {"node_labels": {"decode": {"gpu": "H200"}}},
    },
    small={"model": {"path": "a/small"}, "cluster": {"aggregated_workers": 2}},
)


def small_pool(*sets, count=2):
    return Pool("small", {Role.AGGREGATED: count}, Version("2", sets))


class Started:
    is_local = True

    def __init__(self):
        self.specs = []
        self.worker_ids = []

    def start(self, spec, *, threads, avoid):
        self.specs.append((spec, threads))
        self.worker_ids.append(spec.worker_id)


def test_every_model_has_its_pool_and_its_workers_know_nothing_of_others():
    assert first_pools(CONFIG) == [
        Pool("chat", {Role.PREFILL: 1, Role.DECODE: 1}),
        Pool("small", {Role.AGGREGATED: 2}),
    ]
    ray = Started()
    workers = RayWorkers(ray, CONFIG, overlay=overlay)
    version = Version("2", ("engine.block_tokens=64",))
    for name, model, role in (
        ("chat-decode-0", "chat", Role.DECODE),
        ("small-aggregated-0", "small", Role.AGGREGATED),
    ):
        workers.start(StartReplica(WorkerId(f"{name}.1"), role, "wanted", model, version))
    (chat, threads), (small, _) = ray.specs
    assert (chat.model, chat.config["model"]["name"], chat.config["model"]["path"]) == (
        "chat",
        "chat",
        "a/chat",
    )
    assert (small.config["model"]["path"], small.config["engine"]["block_tokens"]) == ("a/small", 64)
    assert threads == 3
    assert chat.config["models"] == small.config["models"] == {}


def test_a_version_is_checked_against_its_model():
    workers = RayWorkers(Started(), CONFIG, overlay=overlay)
    assert workers.check(small_pool("model.path=b/small")) == ""
    with pytest.raises(SetupError, match=r"model\.name=small"):
        workers.check(small_pool("model.name=chat"))


def test_a_version_with_a_shape_brings_it_to_every_role():
    config = config_of(
        chat={"model": {"path": "a/chat"}, "cluster": {"shapes": {"prefill": "pp2", "decode": "tp2"}}}
    )
    ray = Started()
    workers = RayWorkers(ray, config, overlay=overlay)
    for sets in ((), ("engine.shape=tp4",), ("engine.block_tokens=64",)):
        for role in (Role.PREFILL, Role.DECODE):
            worker_id = WorkerId(f"chat-{role}-0.1")
            workers.start(StartReplica(worker_id, role, "wanted", "chat", Version("2", sets)))
    shapes = [(spec.config["engine"]["shape"], spec.rank_count) for spec, _ in ray.specs]
    assert shapes == [("pp2", 2), ("tp2", 2), ("tp4", 4), ("tp4", 4), ("pp2", 2), ("tp2", 2)]


async def test_labels_and_devices_are_of_the_model():
    home = RayCluster("h:1")
    ray = home._ray = Ray(Handle(RuntimeError()))
    replicas = RayReplicas(object, config=CONFIG, home=home, is_local=False, on_exit=lambda *_: None)
    found = {}
    for model, role in (("chat", Role.DECODE), ("small", Role.AGGREGATED)):
        replicas.start(WorkerSpec(WorkerId(f"{model}.1"), role, "", {}, model=model), threads=1)
        found[model] = (ray.chosen.get("label_selector"), ray.chosen["num_gpus"])
    assert found == {"chat": ({"gpu": "H200"}, 1.0), "small": (None, 0.0)}
    await replicas.close()


def test_every_model_is_looked_at_before_anything_is_started(tmp_path, monkeypatch):
    good = {"path": str(make_model(tmp_path / "good", "llama"))}
    check_setup(config_of(a={"model": good}, b={"model": good}), with_router=True)
    with pytest.raises(SetupError, match="gone"):
        check_setup(config_of(a={"model": good}, b={"model": {"path": f"{tmp_path}/gone"}}), with_router=True)
    none = {"prefill_workers": 0, "decode_workers": 0}
    with pytest.raises(SetupError, match="no workers"):
        check_setup(config_of(a={"model": good, "cluster": none}), with_router=True)
    half = model_check.psutil.virtual_memory().total // 3  # two workers each: one model fits, two do not
    large = {"model": good, "engine": {"kv_bytes": half}}
    check_setup(config_of(a=large), with_router=True)
    with pytest.raises(SetupError, match="all models' workers"):
        check_setup(config_of(a=large, b=large), with_router=True)


async def test_a_worker_has_the_shape_of_its_role_with_devices_cores_and_threads_for_all_ranks(monkeypatch):
    monkeypatch.setattr("control_plane.workers.usable_cores", lambda: list(range(12)))
    config = Config.model_validate(
        {
            "model": {"path": "a/m", "device": "cuda"},
            "engine": {"shape": "tp2"},
            "cluster": {"prefill_workers": "1xtp4", "decode_workers": 2, "aggregated_workers": "1x1"},
        }
    )
    ray = Started()
    workers = RayWorkers(ray, config, overlay=overlay)
    started = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE), ("decode-1", Role.DECODE))
    for name, role in (*started, ("aggregated-0", Role.AGGREGATED), ("decode-0", Role.DECODE)):
        workers.start(StartReplica(WorkerId(f"{name}.1"), role, "wanted", "m", Version("1")))
    specs = [spec for spec, _ in ray.specs]
    assert [spec.config["engine"]["shape"] for spec in specs] == ["tp4", "tp2", "tp2", "1", "tp2"]
    assert [spec.rank_count for spec in specs] == [4, 2, 2, 1, 2]
    assert [len(spec.cores) for spec in specs] == [5, 3, 2, 2, 3]
    assert sorted(core for spec in specs[:4] for core in spec.cores) == list(range(12))
    assert specs[4].cores == specs[1].cores, "a worker that starts anew has the cores that it had"
    assert [threads for _, threads in ray.specs] == [1, 1, 1, 2, 1]

    home = RayCluster("h:1")
    fake = home._ray = Ray(Handle(RuntimeError()))
    replicas = RayReplicas(object, config=config, home=home, is_local=False, on_exit=lambda *_: None)
    replicas.start(specs[0], threads=3)
    assert (fake.chosen["num_gpus"], fake.chosen["num_cpus"]) == (4, 12)
    assert fake.environment["OMP_NUM_THREADS"] == "3", "threads are those of one rank"
    await replicas.close()


def test_a_rollout_to_another_shape_is_counted_by_the_autoscaler_and_in_the_shares_of_cores(monkeypatch):
    monkeypatch.setattr("control_plane.workers.usable_cores", lambda: list(range(8)))
    counts = {"prefill_workers": 0, "decode_workers": 0, "aggregated_workers": 2}
    config = Config.model_validate({"model": {"path": "a/m"}, "cluster": counts})
    ray, wide = Started(), Version("2", ("engine.shape=tp2",))
    workers = RayWorkers(ray, config, overlay=overlay)
    pool = Pool("m", {Role.AGGREGATED: 2})
    assert workers.ranks_of(pool)[Role.AGGREGATED] == 1
    assert workers.ranks_of(Pool("m", {Role.AGGREGATED: 2}, wide))[Role.AGGREGATED] == 2

    def started(name, version):
        ray.worker_ids = [one for one in ray.worker_ids if not one.startswith(f"{name}.")]
        workers.start(StartReplica(WorkerId(f"{name}.1"), Role.AGGREGATED, "wanted", "m", version))
        return ray.specs[-1][0].cores

    assert [started(name, pool.version) for name in ("a", "b")] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # The same replicas again with two ranks each: four ranks share the cores, and nobody has another's.
    started("a", wide)
    ray.worker_ids = [WorkerId("a.1")]
    assert [started(name, wide) for name in ("b", "a")] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_version_may_bring_another_shape_that_is_executed():
    workers = RayWorkers(Started(), CONFIG, overlay=overlay)
    workers.check(small_pool("engine.shape=tp2cp2"))
    with pytest.raises(SetupError, match="of shape cp2: context ranks share one KV pool"):
        workers.check(small_pool("engine.shape=cp2", "model.device=cuda"))


@pytest.mark.parametrize(
    ("shape", "count", "core_count", "ranks"), [("tp2", 2, 4, 0), ("tp2", 3, 4, 6), ("tp4", 1, 2, 4)]
)
def test_a_version_of_more_ranks_than_cores_is_told_before_it_starts(
    monkeypatch, shape, count, core_count, ranks
):
    """The workers that the pool has now count, and not those of the configuration."""
    monkeypatch.setattr("control_plane.workers.usable_cores", lambda: list(range(core_count)))
    config = config_of(small={"model": {"path": "a/small"}, "cluster": {"aggregated_workers": 2}})
    ray = Started()
    workers = RayWorkers(ray, config, overlay=overlay)
    note = workers.check(small_pool(f"engine.shape={shape}", count=count))
    assert (f"{ranks} ranks in all, and this machine has {core_count} cores" in note) == bool(ranks)
    ray.is_local = False
    assert workers.check(small_pool(f"engine.shape={shape}", count=count)) == "", "nodes are not known here"


def test_a_version_of_more_ranks_than_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(model_check, "_cuda_device_count", lambda: 2)
    monkeypatch.setattr(model_check, "_torch_build", lambda: "cu130")
    config = config_of(small={"model": {"path": "a/small", "device": "cuda"}})
    workers = RayWorkers(Started(), config, overlay=overlay)
    workers.check(small_pool("engine.shape=tp2", count=1))
    with pytest.raises(SetupError, match="need 4 GPUs, and this machine shows 2"):
        workers.check(small_pool("engine.shape=tp2", count=2))
