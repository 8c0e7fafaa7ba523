"""The places that Ray reserves for the stages of workers, with a stand-in for Ray."""

from types import SimpleNamespace

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Role
from control_plane.ray_cluster import RayCluster, namespace_of
from control_plane.ray_ops import RayReplicas, WorkerSpec
from tests.unit.control_plane.test_ray_ops import Handle, Ray

ADDRESS = "h:7"


class Groups:
    """The part of `ray.util` that is about placement groups."""

    def __init__(self):
        self.groups, self.asked = {}, []
        self.scheduling_strategies = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group,
                placement_group_bundle_index,
            )
        )

    def placement_group(self, bundles, **options):
        self.asked.append((bundles, options))
        self.groups[options["name"]] = "CREATED"
        return options["name"]

    def get_placement_group(self, name):
        if name not in self.groups:
            raise ValueError(name)
        return name

    def remove_placement_group(self, group):
        del self.groups[group]

    def placement_group_table(self):
        return {name: {"name": name, "state": state} for name, state in self.groups.items()}

    def list_named_actors(self, all_namespaces):
        return [{"name": "decode-0.1", "namespace": namespace_of(ADDRESS)}]


class PatientRay(Ray):
    def kill(self, handle, *, no_restart):
        pass

    def get_actor(self, name, namespace):
        return Handle(RuntimeError())


def replicas_on(ray, **cluster):
    home = RayCluster("h:1")
    home._ray = ray
    config = Config.model_validate({"cluster": cluster})
    return RayReplicas(object, config=config, home=home, is_local=False, on_exit=lambda *_: None)


def spec(number, stages):
    name = WorkerId(f"decode-0.{number}")
    return WorkerSpec(name, Role.DECODE, ADDRESS, {}, rank_count=2 * stages, stage_count=stages)


async def test_stages_are_placed_together_and_their_places_given_back():
    ray = PatientRay(Handle(RuntimeError()))
    ray.util = groups = Groups()
    labels, resources = {"decode": {"gpu": "in(H100)"}}, {"decode": {"rdma": 1}}
    replicas = replicas_on(ray, node_labels=labels, node_resources=resources)
    replicas.start(spec(1, 2), threads=3, avoid=("a1",))
    ((bundles, options),) = groups.asked
    assert bundles == [{"CPU": 6, "rdma": 1}] * 2
    assert options["bundle_label_selector"] == [{"gpu": "in(H100)", "ray.io/node-id": "!in(a1)"}] * 2
    assert (options["strategy"], options["lifetime"]) == ("PACK", "detached")
    assert (ray.chosen["num_cpus"], ray.chosen["scheduling_strategy"][1]) == (6, 0)
    assert "label_selector" not in ray.chosen
    await replicas.kill(WorkerId("decode-0.1"))
    assert groups.groups == {}
    replicas.start(spec(2, 1), threads=3)
    assert len(groups.asked) == 1, "one stage needs no group"
    await replicas.close()


async def test_a_new_control_plane_gives_back_the_places_of_workers_that_are_gone():
    ray = PatientRay(Handle(RuntimeError()))
    ray.util = groups = Groups()
    before = replicas_on(ray)
    for number in (1, 2):
        before.start(spec(number, 2), threads=1)
    await before.close(leaves_workers=True)
    groups.groups["somebody else's"] = "CREATED"
    replicas = replicas_on(ray)
    await replicas.survivors(ADDRESS)
    assert sorted(name.split()[0] for name in groups.groups) == ["decode-0.1", "somebody"]
    await replicas.close()
    assert list(groups.groups) == ["somebody else's"]
