"""What the chart renders: accepted by Kubernetes, generated parts current, settings as asked for."""

import copy
import json
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from baton.config import Config
from baton.config.served_models import each_model
from baton.core.messages import Role
from baton.core.operate import Pool as ControlPool
from baton.telemetry.render import rendered
from commands.chart import OWNED, values_schema
from control_plane.workers import first_pools
from simulator.hardware import GPUS, Node, find_gpu
from simulator.models import MODELS
from simulator.plan.clusters import ClusterPlan, PlannedPool, ReplicaShape
from simulator.plan.values import helm_values
from tests.unit.deploy.chart import (
    CHART,
    EXAMPLES,
    ROOT,
    VALUES,
    containers,
    documents,
    helm,
    of_kind,
    pods,
    refusal,
    settings,
    text,
    values_of,
)

OLDEST, NEWEST = "1.29", "1.37"
CUSTOM = {"RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
"""Kinds whose schemas are others' than Kubernetes'."""

examples = pytest.mark.parametrize("example", EXAMPLES)


@examples
def test_lint_has_nothing_to_say(example):
    status, out, err = helm("lint", "--strict", CHART, "--values", VALUES / f"{example}.yaml")
    assert status == 0, out + err


@examples
def test_committed_examples_are_what_helm_renders(example):
    assert (ROOT / f"deploy/helm/rendered/{example}.yaml").read_text() == text(example), "run `make chart`"


def test_generated_parts_of_the_chart_are_current():
    assert json.loads((CHART / "values.schema.json").read_text()) == values_schema(), "run `make chart`"
    for name, content in rendered().items():
        assert (CHART / name).read_text() == content, f"{name}: run `make chart`"


@examples
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_accepts_every_object(example, version):
    assert OLDEST in (CHART / "Chart.yaml").read_text()
    seen = set()
    for document in documents(example):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
            seen.add(document["kind"])
    assert {"Deployment", "Service", "NetworkPolicy", "ConfigMap", "Pod"} <= seen
    for name, metadata, spec in pods(documents(example)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True), name


def test_validation_would_notice():
    document = copy.deepcopy(of_kind(documents(EXAMPLES[0]), "Service")[0])
    document["spec"]["ports"][0]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, NEWEST, strict=True)


@examples
def test_config_is_what_processes_read(example, monkeypatch):
    asked, environment = values_of(example), settings(documents(example))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = Config()
    sections = config.model_dump(mode="json")
    if not asked["store"]["enabled"]:
        assert config.store.host_bytes == 0
        del asked["config"]["store"]
    for section, fields in asked["config"].items():
        for field, value in fields.items():
            found = sections[section][field]
            if field == "classes":
                found = {n: {k: v for k, v in c.items() if k in value[n]} for n, c in found.items()}
            assert found == value, f"{section}.{field}"
    assert config.model.path == asked["model"]["path"]
    assert config.model.device == asked["accelerator"]
    assert config.cluster.worker_port
    assert config.store.port or not asked["store"]["enabled"]
    [control] = [spec for name, _, spec in pods(documents(example)) if name.endswith("-control")]
    assert config.cluster.control_host == control["hostname"] == "baton-control"


def test_settings_that_the_chart_owns_exist():
    sections = Config.model_json_schema()["$defs"]
    for section, fields in OWNED.items():
        known = Config.model_fields[section].annotation.model_fields
        assert fields <= set(known), section
    assert sections


NEGATIVE = {
    "config.engine.kv_bites=1": "kv_bites is not allowed",
    "config.engine.kv_bytes=-1": "kv_bytes: Must be greater than or equal to 0",
    'config.engine.kv_bytes="lots"': "Expected: integer",
    'config.engine.speculation="maybe"': "must be one of",
    'config.experts.parallel="maybe"': "must be one of",
    "config.experts.replicas=0.5": "replicas: Must be greater",
    'config.slo.classes={"a": {"ttft": 1}}': "ttft is not allowed",
    "config.router.port=80": "port is not allowed",
    'config.store.directory="redis://:password@host"': "directory is not allowed",
    'config.router.keys="keys.toml"': "keys is not allowed",
    "config.nonsense={}": "nonsense is not allowed",
    'images.light.tag="latest"': "images.light.tag",
    'images.light.digest="sha256:12"': "images.light.digest",
    "pools.prefil.replicas=1": "prefil is not allowed",
    "pools.prefill.replicas=-1": "replicas: Must be greater",
    "pools.prefill.cpu=1.5": "Expected: integer",
    'pools.prefill.memory="much"': "memory",
    "pools.decode.pipelineParallelSize=65": "Must be less",
    "pools.decode.tensorParallelSize=0": "Must be greater",
    'pools.decode={"tensorParallelSize":16,"pipelineParallelSize":8}': "tp16pp8 has 128 ranks",
    'pools.decode={"pipelineParallelSize":3,"podsPerWorker":2}': "podsPerWorker=2: it must divide",
    "pools.decode.podsPerWorker=2": "it must divide pipelineParallelSize=1",
    'pools.decode.stageAffinity=[{"topologyKey":"rack"}]': "weight is required",
    'config.engine.shape="tp2"': "shape is not allowed",
    'config.cluster.shapes={"decode":"tp2"}': "shapes is not allowed",
    'pools.decode.gpu="abacus"': "gpuTypes.abacus",
    'pools={"prefill":{"replicas":0},"decode":{"replicas":0},"aggregated":{"replicas":0}}': "no replicas",
    'model.path=""': "model.path",
    'model.cache.type="floppy"': "must be one of",
    'accelerator="tpu"': "must be one of",
    'images.registry=""': "images.registry: name the registry",
    'ray.headState="redis"': "ray.headState=redis",
    "ray.autoscaler.enabled=true": "config.autoscale.mode=on",
    "router.httpRoute.enabled=true": "router.httpRoute.parentRefs",
    'router.service.loadBalancerClass="a/b"': "router.service.type=LoadBalancer",
    'router.ingress.hosts=["a b"]': "hosts",
    'router.sidecars=[{"name":"a"}]': "image is required",
    'images.pullSecrets=[{"nam":"a"}]': "images.pullSecrets",
    'redis={"mode":"external","urlSecret":{"name":""}}': "redis.urlSecret.name",
    'redis.mode="maybe"': "must be one of",
    "config.store.host_bytes=0": "store.enabled=false",
    "security.user=0": "user: Must be greater",
    'access.tokensSecret.name="tokens"': "access.tokenSecret.name",
    'config.tls.ca="/ca.pem"': "ca is not allowed",
    "monitoring.rules.objective=0.9": "objective: Must be greater",
    "monitoring.rules.objective=1": "objective: Must be less",
    'store.hostFolder="run"': "hostFolder",
    "router.unknown=true": "unknown is not allowed",
    'router.keysSecret.value="secret"': "value is not allowed",
    'models={"a": {"model": {"path": "x"}}}': "leave model.path",
    'models={"a": {"model": {"pth": "x"}}}': "pth is not allowed",
    'models={"a": {"model": {"path": "x"}, "cluster": {"ray_address": "x"}}}': "ray_address is not allowed",
    'models={"a b": {"model": {"path": "x"}}}': "models",
}


@pytest.mark.parametrize(("wrong", "said"), NEGATIVE.items(), ids=NEGATIVE)
def test_wrong_values_are_refused_with_the_reason(wrong, said):
    assert said in refusal("moe", wrong)


def test_several_models_are_what_processes_read(monkeypatch):
    models = {
        "org/chat": {
            "model": {"path": "org/chat", "tool_parser": "hermes"},
            "engine": {"kv_bytes": 68719476736},
            "cluster": {"prefill_workers": 1, "decode_workers": 1},
        },
        "small": {"model": {"path": "org/small"}, "cluster": {"aggregated_workers": 1}},
    }
    pools = {role: {"replicas": 1} for role in ("prefill", "decode", "aggregated")}
    sets = (f"models={json.dumps(models)}", 'model={"path": "", "name": ""}', f"pools={json.dumps(pools)}")
    docs = documents("gpu-one-node", *sets)
    for name, value in settings(docs).items():
        monkeypatch.setenv(name, value)
    chat, small = each_model(Config()).values()
    assert (chat.model.name, chat.engine.kv_bytes, chat.model.device) == ("org/chat", 68719476736, "cuda")
    assert first_pools(Config()) == [
        ControlPool("org/chat", {Role.PREFILL: 1, Role.DECODE: 1}),
        ControlPool("small", {Role.AGGREGATED: 1}),
    ]
    assert small.model.path == "org/small"
    [control] = [c for name, _, c in containers(docs) if name.endswith("-control")]
    assert not [
        word for word in control["args"] if word.startswith(("--prefill", "--decode", "--aggregated"))
    ]
    one = f"pools={json.dumps(pools | {'aggregated': {'replicas': 0}})}"
    assert "room for 2 workers in all, and models want 3" in refusal("gpu-one-node", *sets[:2], one)


def test_experts_may_be_divided_for_all_models_or_for_one(monkeypatch):
    everywhere = {"parallel": "workers", "replicas": 1.25}
    for name, value in settings(documents("moe", f"config.experts={json.dumps(everywhere)}")).items():
        monkeypatch.setenv(name, value)
    experts = Config().experts
    assert (experts.parallel, experts.replicas) == ("workers", 1.25)
    models = {
        "big": {"model": {"path": "org/big"}, "experts": {"parallel": "ranks", "ranks": 2}},
        "small": {"model": {"path": "org/small"}, "cluster": {"aggregated_workers": 1}},
    }
    sets = (f"models={json.dumps(models)}", 'model={"path": "", "name": ""}', "pools.aggregated.replicas=1")
    docs = documents("moe", *sets)
    monkeypatch.undo()
    for name, value in settings(docs).items():
        monkeypatch.setenv(name, value)
    big, small = each_model(Config()).values()
    assert (big.experts.parallel, big.experts.ranks) == ("ranks", 2)
    assert small.experts.parallel == "off"


def test_a_change_of_config_restarts_what_reads_it():
    def checksums(*sets):
        marks = {name: meta.get("annotations", {}) for name, meta, _ in pods(documents("moe", *sets))}
        return {name: m["checksum/config"] for name, m in marks.items() if "checksum/config" in m}

    before, after = checksums(), checksums("config.transfer.lease_s=7")
    assert before.keys() == after.keys()
    assert {name.split("/")[0] for name in before} == {"Deployment", "DaemonSet", "RayCluster"}
    assert all(before[name] != after[name] for name in before)


def test_what_is_switched_off_is_not_there():
    switches = (
        *("store.enabled", "networkPolicy.enabled", "serviceAccount.create", "router.autoscaling.enabled"),
        *("monitoring.scrape.enabled", "monitoring.rules.enabled", "monitoring.dashboards.enabled"),
    )
    off = (*(f"{switch}=false" for switch in switches), 'redis.mode="none"')
    kinds = {d["kind"] for d in documents("rdma-multi-node", *off)}
    gone = {
        *("DaemonSet", "StatefulSet", "NetworkPolicy", "ServiceAccount", "ServiceMonitor", "PodMonitor"),
        *("PrometheusRule", "HorizontalPodAutoscaler"),
    }
    assert not kinds & gone
    assert gone <= {d["kind"] for d in documents("rdma-multi-node")}
    assert settings(documents("rdma-multi-node", *off))["BATON_STORE__HOST_BYTES"] == "0"


def test_the_objective_of_the_rules_is_the_chosen_one():
    [rule] = of_kind(documents("rdma-multi-node"), "PrometheusRule")
    burns = [r["expr"] for g in rule["spec"]["groups"] for r in g["rules"] if "SloBurn" in r.get("alert", "")]
    assert len(burns) == 4
    assert all(e.count("(1 - 0.99)") == 2 and "0.95" not in e for e in burns)


def plan_values(gpu, model="llama-3-8b"):
    shape = ReplicaShape(Node(MODELS[model], find_gpu(gpu)), 3.0)
    plan = ClusterPlan(prefill=PlannedPool(shape, 2), decode=PlannedPool(shape, 3))
    return helm_values(
        plan, model=model, slo={"ttft_s": 1.0, "tpot_s": 0.05}, comments=("Written by a plan.",)
    )


def test_a_plans_values_install_with_the_chart(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(plan_values("h100"))
    status, out, err = helm(
        "template", "baton", CHART, "--values", path, "--set", "redis.mode=none,images.registry=r.example.com"
    )
    assert status == 0, err
    docs = [d for d in yaml.safe_load_all(out) if d]
    [cluster] = of_kind(docs, "RayCluster")
    groups = {g["groupName"]: g for g in cluster["spec"]["workerGroupSpecs"]}
    assert {name: g["replicas"] for name, g in groups.items()} == {"prefill": 2, "decode": 3, "aggregated": 0}
    assert "H100" in str(groups["prefill"]["template"]["spec"]["nodeSelector"])
    assert json.loads(settings(docs)["BATON_SLO__CLASSES"])["default"] == {"tpot_s": 0.05, "ttft_s": 1.0}


def planned(tmp_path, node):
    path = tmp_path / "plan.yaml"
    plan = ClusterPlan(aggregated=PlannedPool(ReplicaShape(node, 3.0), 2))
    path.write_text(helm_values(plan, model="llama-3-70b", slo={"ttft_s": 1.0}))
    return helm(
        "template", "baton", CHART, "--values", path, "--set", "redis.mode=none,images.registry=r.example.com"
    )


def test_a_plan_of_several_gpus_per_worker_makes_pods_of_as_many(tmp_path):
    status, out, err = planned(tmp_path, Node(MODELS["llama-3-70b"], find_gpu("h100"), 4))
    assert status == 0, err
    docs = [d for d in yaml.safe_load_all(out) if d]
    [group] = [g for g in of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"] if g["replicas"]]
    [container] = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert group["rayStartParams"]["num-gpus"] == "4"
    assert json.loads(settings(docs)["BATON_CLUSTER__SHAPES"]) == {"aggregated": "tp4"}
    assert "BATON_CLUSTER__NODE_LABELS" not in settings(docs), "one shape fits all pods that there are"


def test_a_plan_with_stages_makes_them_part_of_the_shape(tmp_path):
    status, out, err = planned(tmp_path, Node(MODELS["llama-3-70b"], find_gpu("h100"), 2, 2))
    assert status == 0, err
    docs = [d for d in yaml.safe_load_all(out) if d]
    assert json.loads(settings(docs)["BATON_CLUSTER__SHAPES"]) == {"aggregated": "tp2pp2"}
    assert not any("numOfHosts" in g for g in of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"])


@pytest.mark.parametrize(
    ("tensor", "stages", "pods", "gpus"), [(8, 2, 2, 8), (4, 4, 2, 8), (4, 3, 3, 4), (2, 16, 4, 8)]
)
def test_a_plan_of_more_gpus_than_a_node_has_makes_several_pods_per_worker(
    tmp_path, tensor, stages, pods, gpus
):
    status, out, err = planned(tmp_path, Node(MODELS["llama-3-70b"], find_gpu("h100"), tensor, stages))
    assert status == 0, err
    docs = [d for d in yaml.safe_load_all(out) if d]
    [group] = [g for g in of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"] if g["replicas"]]
    [container] = group["template"]["spec"]["containers"]
    assert (group["replicas"], group["numOfHosts"]) == (2, pods)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    [least] = [
        b["spec"]["minAvailable"]
        for b in of_kind(docs, "PodDisruptionBudget")
        if "minAvailable" in b["spec"] and not b["metadata"]["name"].endswith("-ray-head")
    ]
    assert least == 2 * pods - 1


def test_a_worker_over_several_nodes_has_pods_of_its_stages_that_are_near_each_other():
    docs = documents("multi-node")
    groups = {g["groupName"]: g for g in of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"]}
    group = groups["aggregated"]
    assert (group["replicas"], group["numOfHosts"]) == (2, 2)
    spec = group["template"]["spec"]
    assert spec["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == 8
    labels = group["template"]["metadata"]["labels"]
    terms = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone"]
    for one in (*(term["podAffinityTerm"] for term in terms), *spec["topologySpreadConstraints"]):
        wanted = one["labelSelector"]["matchLabels"]
        assert wanted.items() <= labels.items()
        assert wanted["baton.dev/role"] == "aggregated"
    assert "affinity" not in groups["decode"]["template"]["spec"]
    assert json.loads(settings(docs)["BATON_CLUSTER__SHAPES"]) == {"aggregated": "tp8pp2"}
    [control] = [c for name, _, c in containers(docs) if name.endswith("-control")]
    assert "--aggregated=2" in control["args"], "workers, not pods"


def test_without_terms_pods_have_no_preference():
    docs = documents("multi-node", "pools.aggregated.stageAffinity=[]")
    groups = of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"]
    assert not any("affinity" in g["template"]["spec"] for g in groups)


def test_pods_of_one_shape_and_unlike_sizes_are_told_apart():
    pools = {"aggregated": {"podsPerWorker": 1}, "decode": {"podsPerWorker": 2, "replicas": 1}}
    shape = {"tensorParallelSize": 4, "pipelineParallelSize": 2, "contextParallelSize": 2, "cpu": 16}
    sets = [
        f"pools.{role}.{key}={value}" for role, own in pools.items() for key, value in (shape | own).items()
    ]
    found = settings(documents("multi-node", *sets))
    assert json.loads(found["BATON_CLUSTER__SHAPES"]) == dict.fromkeys(pools, "tp4pp2cp2")
    labels = json.loads(found["BATON_CLUSTER__NODE_LABELS"])
    assert labels["decode"] == {"ray.io/node-group": "in(decode)"}
    assert labels["aggregated"] == {"ray.io/node-group": "in(aggregated)"}


def test_pods_without_a_core_for_each_rank_are_refused():
    values = VALUES / "cpu-one-machine.yaml"
    args = ("template", "baton", CHART, "--values", values, "--set", "pools.decode.tensorParallelSize=2")
    status, _, err = helm(*args)
    assert status != 0
    assert "pools.decode.cpu=2: the ranks in each of its pods need 4 cores" in err
    assert helm(*args, "--set", "pools.decode.cpu=4")[0] == 0


def test_workers_of_unlike_shapes_go_to_pods_of_their_size(monkeypatch):
    docs = documents("tensor-parallel")
    for name, value in settings(docs).items():
        monkeypatch.setenv(name, value)
    config = Config()
    assert [str(config.shape_of(role)) for role in Role] == ["tp4", "tp2", "1"]
    assert config.cluster.node_labels["prefill"] == {"ray.io/node-group": "in(prefill)"}
    for group in of_kind(docs, "RayCluster")[0]["spec"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        names = {v["name"]: v.get("value") for v in container["env"]}
        assert names["RAY_NODE_TYPE_NAME"] == group["groupName"], "Ray makes its node label of it"
        has_memory = any(m["mountPath"] == "/dev/shm" for m in container["volumeMounts"])
        assert has_memory == (group["groupName"] != "aggregated")


def test_labels_that_an_operator_sets_stay_beside_those_of_the_shapes():
    labels = 'config.cluster.node_labels={"decode": {"rack": "a"}}'
    status, out, err = helm(
        "template", "baton", CHART, "--values", VALUES / "tensor-parallel.yaml", "--set-json", labels
    )
    assert status == 0, err
    docs = [d for d in yaml.safe_load_all(out) if d]
    found = json.loads(settings(docs)["BATON_CLUSTER__NODE_LABELS"])
    assert found["decode"] == {"ray.io/node-group": "in(decode)", "rack": "a"}


def test_nvidia_gpus_that_are_planned_with_have_node_labels():
    known = set(yaml.safe_load((CHART / "values.yaml").read_text())["gpuTypes"])
    assert set(GPUS) - known == {"h800", "h20", "mi300x"}, "say in docs/operations.md which need gpuTypes"


def test_roles_of_pools_are_the_roles():
    assert set(values_of("moe")["pools"]) == {role.value for role in Role}


@examples
def test_every_value_of_an_example_is_documented_in_the_defaults(example):
    """Free maps aside: labels, environment, settings."""
    free = {"nodeSelector", "env", "labels", "annotations", "gpuTypes", "config"}

    def missing(values, defaults, where):
        for name, value in values.items():
            path = f"{where}.{name}"
            if name not in defaults:
                yield path
            elif isinstance(value, dict) and name not in free:
                yield from missing(value, defaults[name], path)

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    asked = yaml.safe_load((Path(VALUES) / f"{example}.yaml").read_text())
    assert list(missing(asked, defaults, "")) == []


def test_notes_name_the_next_commands(tmp_path):
    """Helm shows them to clusters only, so they are made an object of a copy."""
    chart = tmp_path / "baton"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates/NOTES.txt").read_text()
    assert re.findall(r"baton (keys create|store inspect)", notes) == ["store inspect", "keys create"]
    body = (
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\n{{{{ dict "notes" (include "notes" .) | toYaml }}}}'
    )
    (chart / "templates/notes.yaml").write_text(body)
    values = ("--namespace", "ns", "--values", VALUES / "gpu-one-node.yaml")
    status, out, err = helm("template", "rel", chart, "--show-only", "templates/notes.yaml", *values)
    assert status == 0, err
    said = yaml.safe_load(out)["notes"]
    assert "helm test rel --namespace ns" in said
    assert "deployment/rel-baton-router" in said
    assert "Bearer YOUR_KEY" in said
