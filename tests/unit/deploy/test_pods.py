"""What the drill on podman takes from manifests: pods, environments, names and rules."""

import asyncio

import pytest

from tests.pods.drill import Finding, Run, faults, in_turn
from tests.pods.life import KILLED, Ended, Pod
from tests.pods.manifests import endpoints, environment, hosts, port_of, release_of
from tests.pods.podman import Folders, create_arguments
from tests.pods.policies import rules, service_rules
from tests.pods.quantities import quantity
from tests.pods.service import OutsideService
from tests.pods.variants import VARIANTS, make_secrets, render, values_of

IMAGES = {"light": "localhost/light:1.0", "worker": "localhost/cpu:1.0", "redis": "localhost/redis:7.0"}
NETWORK = "10.203.7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pods")


@pytest.fixture(scope="module")
def releases(folder):
    (folder / "s").mkdir()
    kept = make_secrets(folder / "s", redis_url="redis://:p@10.203.7.10:6379/0")
    made = {}
    for name, variant in VARIANTS.items():
        (folder / name).mkdir()
        docs = render(variant, values_of(variant, IMAGES), folder / name)
        made[name] = release_of(
            docs, kept.by_name, network=NETWORK, outside={"redis.example.com": "10.203.7.10"}
        )
    return made


def pod(release, part):
    return next(p for p in release.pods if part in p.name)


def test_every_variable_volume_and_command_of_every_pod_is_known(releases, tmp_path, monkeypatch):
    """Also where a Secret, a field of the pod or another variable gives the value."""
    monkeypatch.setattr("os.chown", lambda *_: None)
    for number, release in enumerate(releases.values()):
        for plan in release.pods:
            for container in [*plan.spec.get("initContainers", ()), *plan.spec["containers"]]:
                made = create_arguments(release, plan, container, Folders(tmp_path / str(number)))
                assert container["image"] in made
                assert not any("$(" in part for part in made), plan.name


def test_a_group_has_a_pod_for_each_worker_and_the_head_gets_its_store(releases):
    release = releases["rdma-multi-node"]
    assert [p.name for p in release.pods if p.component == "worker"] == [
        "baton-prefill-0",
        "baton-decode-0",
        "baton-decode-1",
    ]
    head = pod(release, "-head")
    variables = environment(release, head, head.spec["containers"][0])
    assert variables["RAY_REDIS_ADDRESS"] == "baton-redis:6379"
    assert variables["REDIS_PASSWORD"] == release.secrets["baton-redis"]["password"]
    assert "--redis-password=$REDIS_PASSWORD" in head.spec["containers"][0]["args"][0]
    worker = pod(release, "prefill")
    assert worker.spec["initContainers"][-1]["name"] == "wait-gcs-ready"
    assert f"--address={hosts_name('baton-head-svc')}:6379" in worker.spec["containers"][0]["args"][0]


def hosts_name(service):
    return f"{service}.baton.svc.cluster.local"


def test_names_lead_to_pods_and_services_have_addresses(releases):
    release = releases["cpu-one-machine"]
    found = hosts(release)
    assert found[hosts_name("baton-control")] == pod(release, "control").address
    assert found["baton-head-svc"] == pod(release, "-head").address
    assert found["baton-router"] == release.virtual["baton-router"]
    router = pod(release, "router")
    assert endpoints(release, "baton-router") == [(router, 8000)]
    assert service_rules(release, frozenset()) == []
    [rule] = service_rules(release, frozenset({router.name}))
    assert rule[-1] == f"{router.address}:8000"
    assert hosts(releases["additions"])["redis.example.com"] == "10.203.7.10"


def accepts(found, chain, address, port):
    """The first rule that a new connection meets decides."""
    flag = "-s" if chain == "INPUT" else "-d"
    for rule in found:
        if rule[1] != chain or "--ctstate" in rule:
            continue
        is_other = flag in rule and rule[rule.index(flag) + 1] not in (address, f"{address}/32")
        if is_other or ("--dport" in rule and rule[rule.index("--dport") + 1] != str(port)):
            continue
        return rule[-1] == "ACCEPT"
    return True


def test_policies_let_through_what_they_name_and_refuse_the_rest(releases):
    release = releases["rdma-multi-node"]
    router, worker, redis = (pod(release, part) for part in ("router-0", "decode-0", "redis"))
    assert accepts(rules(release, router), "OUTPUT", worker.address, 7100)
    assert not accepts(rules(release, router), "OUTPUT", worker.address, 7101)
    assert accepts(rules(release, redis), "INPUT", router.address, 6379)
    assert not accepts(rules(release, redis), "INPUT", worker.address, 6379)
    assert accepts(rules(release, worker), "INPUT", release.gateway, 7101), "the node's probes"
    additions = releases["additions"]
    assert accepts(rules(additions, pod(additions, "-head")), "OUTPUT", "10.203.7.10", 6390)
    assert not accepts(rules(additions, pod(additions, "decode-0")), "OUTPUT", "10.203.7.10", 6390)


def test_an_external_redis_with_an_authority_of_its_own_is_trusted(releases):
    release = releases["additions"]
    for part in ("router-0", "control", "store"):
        plan = pod(release, part)
        container = plan.spec["containers"][0]
        url = environment(release, plan, container)["BATON_STORE__DIRECTORY"]
        assert url == "rediss://:secret7@redis.example.com:6390/0?ca=/etc/baton/redis-ca/ca.crt"
        assert any(m["mountPath"] == "/etc/baton/redis-ca" for m in container["volumeMounts"])
    head = pod(release, "-head")
    variables = environment(release, head, head.spec["containers"][0])
    assert variables["RAY_REDIS_CA_CERT"] == "/etc/baton/redis-ca/ca.crt"
    assert all(
        "redis-ca" not in str(p.spec["volumes"])
        for p in releases["cpu-one-machine"].pods
        if "volumes" in p.spec
    )


def test_a_sidecar_that_starts_first_is_an_init_container_that_stays(releases):
    for part in ("router-0", "control", "store", "-head", "prefill"):
        plan = pod(releases["additions"], part)
        lasting = [c for c in plan.spec["initContainers"] if c.get("restartPolicy") == "Always"]
        assert [c["name"] for c in lasting] == ["proxy"], part
        assert plan.spec["containers"][1]["name"] == "exporter"


def test_quantities_and_ports():
    assert [quantity(q) for q in ("512Mi", "2Gi", "500m", 3, "1.5")] == [2**29, 2**31, 0.5, 3, 1.5]
    with pytest.raises(AssertionError):
        quantity("much")
    assert port_of({"ports": [{"name": "http", "containerPort": 8000}]}, "http") == 8000


def run_of(release):
    def make(plan):
        made = Pod(plan, release, Folders("/"), "n", "l", frozenset, print)
        made.is_ready.set()
        return made

    pods = {p.name: make(p) for p in release.pods if not p.is_test}
    return Run(release, pods, OutsideService(list), "/", "", "", None, print)


async def test_what_the_drill_finds_is_a_fault_unless_it_is_a_lone_routers_own(releases):
    run = run_of(releases["cpu-one-machine"])
    good = Finding("baton-control-0", Ended(3.0, {"control": 0}), 9.0, requests=9)
    alone = Finding("baton-router-0", Ended(6.0, {"router": 0}), 9.0, 9, ["failed"])
    assert faults(run, [good, alone]) == []
    for bad in (
        Finding("baton-control-0", Ended(3.0, {"control": KILLED}), 9.0, requests=9),
        Finding("baton-control-0", Ended(3.0, {"control": 0}), None, requests=9),
        Finding("baton-control-0", Ended(3.0, {"control": 0}), 9.0, requests=0),
        Finding("baton-decode-0", Ended(3.0, {"ray-worker": 0}), 9.0, 9, ["failed"]),
    ):
        assert len(faults(run, [bad])) == 1, bad
    two = run_of(releases["rdma-multi-node"])
    assert faults(two, [alone])
    two.pods["baton-redis-0"].is_ready.clear()
    assert faults(two, []) == ["baton-redis-0: not ready in the end"]


def test_every_kind_of_pod_is_deleted_once(releases):
    names = {v: [p.name for p in in_turn(run_of(r))] for v, r in releases.items()}
    assert names["rdma-multi-node"] == [
        "baton-router-0",
        "baton-control-0",
        "baton-prefill-0",
        "baton-decode-0",
        "baton-store-0",
        "baton-redis-0",
        "baton-head",
    ]
    assert "baton-experts-0" in names["moe"]


async def test_connections_go_to_ready_pods_in_turn_and_end_with_them():
    async def greet(name):
        async def serve(_, writer):
            writer.write(name)
            await writer.drain()
            writer.close()

        return await asyncio.start_server(serve, "127.0.0.1", 0)

    servers = [await greet(b"a"), await greet(b"b")]
    ready = [s.sockets[0].getsockname() for s in servers]
    service = OutsideService(lambda: ready)
    await service.start()

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        try:
            return await reader.read()
        finally:
            writer.close()

    counted = asyncio.create_task(service.after_connections(4))
    assert {await ask(), await ask()} == {b"a", b"b"}
    ready.pop()
    assert {await ask(), await ask()} == {b"a"}
    await counted
    ready.clear()
    assert await ask() == b""
    await service.close()
    for server in servers:
        server.close()
