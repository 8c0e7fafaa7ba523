"""Ways to install the chart beyond the examples: what operators add, and what a plain install needs."""

import json
import re

import kubernetes_validate
import pytest
import yaml

from baton.config import Config
from commands.chart_readme import readme
from tests.unit.deploy.chart import CHART, ROOT, documents, helm, of_kind, pods, settings

INSTALLS = sorted((CHART / "ci").glob("*-values.yaml"))
VERSIONS = ("1.29", "1.37")
OTHERS = {"RayCluster", "HTTPRoute", "BackendTLSPolicy"}
"""Kinds whose schemas are others' than Kubernetes'."""

installs = pytest.mark.parametrize("path", INSTALLS, ids=lambda p: p.stem.removesuffix("-values"))


def rendered(path, *sets, release="baton"):
    options = [part for one in sets for part in ("--set-json", one)]
    status, out, err = helm("template", release, CHART, "--namespace", "ns", "--values", path, *options)
    assert status == 0, err
    return [d for d in yaml.safe_load_all(out) if d]


def install(name, *sets, release="baton"):
    return rendered(CHART / f"ci/{name}-values.yaml", *sets, release=release)


def group(docs, name):
    [cluster] = of_kind(docs, "RayCluster")
    return next(g for g in cluster["spec"]["workerGroupSpecs"] if g["groupName"] == name)


def environment(container):
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


@installs
def test_lint_has_nothing_to_say(path):
    status, out, err = helm("lint", "--strict", CHART, "--values", path)
    assert status == 0, out + err


@installs
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_every_object(path, version):
    docs = rendered(path)
    for document in docs:
        if document["kind"] not in OTHERS:
            kubernetes_validate.validate(document, version, strict=True)
    for _, metadata, spec in pods(docs):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
    assert path.read_text().startswith("# ")


@installs
def test_every_install_is_named_as_kubernetes_wants_it(path):
    """A Service's name begins with a letter, whatever the release is called."""
    for document in rendered(path, release="1abc.de"):
        name = document["metadata"]["name"]
        if not document["metadata"].get("labels"):
            continue  # an extra object, which has the name that its author gave it
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= 63


def test_a_plain_install_makes_the_password_of_its_redis():
    docs = install("minimal")
    [secret] = of_kind(docs, "Secret")
    assert len(secret["data"]["password"]) > 20
    names = set(re.findall(r"'secretKeyRef': {'name': '([^']+)', 'key': 'password'}", str(docs)))
    names |= set(re.findall(r"'secretKeyRef': {'key': 'password', 'name': '([^']+)'}", str(docs)))
    assert names == {secret["metadata"]["name"]}
    assert of_kind(install("minimal", 'redis.passwordSecret.name="mine"'), "Secret") == []


def test_an_accelerator_chooses_its_image():
    def images(docs):
        return {c["image"] for _, _, spec in pods(docs) for c in spec["containers"]}

    assert "registry.example.com/baton/cuda:0.1.0" in images(install("minimal"))
    assert images(install("cpu")) == {
        "registry.example.com/baton/cpu:0.1.0",
        "registry.example.com/baton/light:0.1.0",
    }
    named = install("cpu", 'images.worker.repository="other.example.com/team/w"', 'images.registry="x.org"')
    assert "other.example.com/team/w:0.1.0" in images(named)
    assert {image.split("/")[0] for image in images(install("everything"))} == {
        "mirror.example.com",
        "registry.example.com",  # of the sidecar, which is the operator's
    }


def test_redis_ends_by_its_own_signal_and_says_when_it_refuses():
    [redis] = [spec["containers"][0] for name, _, spec in pods(install("minimal")) if "StatefulSet" in name]
    script = redis["command"][2]
    assert script.startswith("exec redis-server - <<END")
    assert "|" not in script
    assert redis["readinessProbe"]["exec"]["command"][2] == 'test "$(redis-cli -p 6379 ping)" = PONG'


@pytest.mark.parametrize(
    ("name", "sets", "state"),
    [
        ("minimal", (), "redis"),
        ("external-redis", (), "redis"),
        ("cpu", (), "claim"),
        ("cpu", ('ray.headState="none"',), "none"),
        ("minimal", ('redis={"mode":"external","urlSecret":{"name":"u"}}',), "none"),
    ],
)
def test_the_state_of_rays_head_outlives_its_pod(name, sets, state):
    docs = install(name, *sets)
    [cluster] = of_kind(docs, "RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    variables = environment(head["containers"][0])
    options = cluster["spec"].get("gcsFaultToleranceOptions")
    assert (options is not None) == (state == "redis")
    assert ("RAY_gcs_storage" in variables) == (state == "claim")
    claims = [v for v in head["volumes"] if "persistentVolumeClaim" in v]
    assert len(claims) == (state == "claim")
    [budget] = [b for b in of_kind(docs, "PodDisruptionBudget") if b["metadata"]["name"] == "baton-ray-head"]
    assert budget["spec"]["minAvailable"] == (1 if state == "none" else 0)
    if state == "redis":
        address = "baton-redis:6379" if name == "minimal" else "rediss://redis.example.com:6380"
        assert options["redisAddress"] == address
        assert options["externalStorageNamespace"] == "ns-baton"
    for one, _, spec in pods(docs):
        if "RayCluster" in one or one.endswith("-control"):
            variables = environment(spec["containers"][0])
            assert int(variables["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 3600, one
            assert variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def test_an_external_redis_is_reached_through_the_policies():
    docs = install("external-redis")
    for policy in of_kind(docs, "NetworkPolicy"):
        component = policy["spec"]["podSelector"]["matchLabels"]["baton.dev/component"]
        ways = [r for r in policy["spec"]["egress"] if r.get("ports") == [{"port": 6380, "protocol": "TCP"}]]
        assert len(ways) == (component in ("router", "control", "store", "ray-head")), component
        assert all(way["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}] for way in ways)
    urls = {
        c["env"][i]["value"]
        for _, _, spec in pods(docs)
        for c in spec["containers"]
        for i, v in enumerate(c.get("env", ()))
        if v["name"] == "BATON_STORE__DIRECTORY"
    }
    password = "$(BATON_REDIS_PASSWORD_FOR_URL)"
    assert urls == {f"rediss://baton:{password}@redis.example.com:6380/0?ca=/etc/baton/redis-ca/ca.crt"}
    trusting = {name.split("/", 1)[1] for name, _, spec in pods(docs) if "redis-ca" in str(spec)}
    assert trusting == {"baton-router", "baton-control", "baton-store", "baton/head"}
    [head] = [spec["containers"][0] for name, _, spec in pods(docs) if name.endswith("/head")]
    assert environment(head)["RAY_REDIS_CA_CERT"] == "/etc/baton/redis-ca/ca.crt"


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_a_worker_pod_is_ready_when_its_worker_is(role):
    container = group(documents("moe"), role)["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "metrics"}
    assert container["livenessProbe"]["tcpSocket"] == {"port": "node-manager"}
    divided = group(documents("multi-node"), "aggregated")["template"]["spec"]["containers"][0]
    assert "tcpSocket" in divided["readinessProbe"], "the pod of a later stage has no worker's port"


def test_pools_lose_one_pod_at_a_time():
    budgets = {b["metadata"]["name"]: b["spec"] for b in of_kind(documents("moe"), "PodDisruptionBudget")}
    assert budgets["baton-prefill"]["minAvailable"] == 2
    assert budgets["baton-decode"]["minAvailable"] == 4
    assert all(b["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for b in budgets.values())


def test_worker_pods_come_and_go_in_the_group_of_their_role(monkeypatch):
    docs = install("autoscale")
    [cluster] = of_kind(docs, "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] == 120
    assert cluster["spec"]["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True
    limits = {
        g["groupName"]: (g["minReplicas"], g["replicas"], g["maxReplicas"])
        for g in cluster["spec"]["workerGroupSpecs"]
    }
    assert limits == {"prefill": (1, 1, 4), "decode": (2, 2, 8), "aggregated": (0, 0, 0)}
    for name, value in settings(docs).items():
        monkeypatch.setenv(name, value)
    config = Config()
    assert (config.autoscale.mode, config.autoscale.prefill_max, config.autoscale.decode_max) == ("on", 4, 8)
    for role in ("prefill", "decode"):
        start = group(docs, role)["rayStartParams"]["resources"]
        assert json.loads(json.loads(start.strip("'"))) == config.cluster.node_resources[role]
    budgets = {b["metadata"]["name"]: b["spec"] for b in of_kind(docs, "PodDisruptionBudget")}
    assert budgets["baton-decode"]["minAvailable"] == 1, "of the two that serve at least"
    [policy] = [p for p in of_kind(docs, "NetworkPolicy") if p["metadata"]["name"] == "baton-ray-head"]
    assert {"port": 6443, "protocol": "TCP"} in [
        p for r in policy["spec"]["egress"] for p in r.get("ports", ())
    ]


def test_expert_ranks_have_pods_of_their_own():
    docs = install("expert-ranks")
    experts = group(docs, "experts")
    assert experts["replicas"] == 8, "four ranks for each of the two pools in use"
    assert experts["rayStartParams"]["num-gpus"] == "1"
    spec = experts["template"]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "lifecycle" not in spec["containers"][0]
    assert experts["template"]["metadata"]["labels"]["baton.dev/component"] == "experts"
    names = {p["metadata"]["name"] for p in of_kind(docs, "NetworkPolicy")}
    assert "baton-experts" in names
    labels = json.loads(settings(docs)["BATON_CLUSTER__NODE_LABELS"])
    groups = {role: label["ray.io/node-group"] for role, label in labels.items()}
    assert groups["experts"] == "in(experts)"
    assert all("experts" not in groups[role] for role in ("prefill", "decode", "aggregated"))
    assert environment(spec["containers"][0])["RAY_NODE_TYPE_NAME"] == "experts"
    [cluster] = of_kind(install("minimal"), "RayCluster")
    assert [g["groupName"] for g in cluster["spec"]["workerGroupSpecs"]] == [
        "prefill",
        "decode",
        "aggregated",
    ]


def test_what_operators_add_is_in_every_pod():
    docs = install("everything")
    for name, metadata, spec in pods(docs):
        if name.endswith(("/aggregated", "-test")):
            continue
        assert spec["runtimeClassName"] == "nvidia", name
        assert spec["priorityClassName"] == "high"
        assert "nodeAffinity" in spec["affinity"]
        assert metadata["labels"]["team"] == "serving"
        assert metadata["labels"]["baton.dev/component"]
        assert metadata["annotations"]["example.com/cost-centre"] == "7"
        main, sidecar = spec["containers"]
        assert environment(main)["NCCL_DEBUG"] == "INFO"
        assert {"name": "scratch", "mountPath": "/scratch"} in main["volumeMounts"]
        assert sidecar["name"] == "exporter"
        proxy = spec["initContainers"][-1]
        assert (proxy["name"], proxy["restartPolicy"]) == ("proxy", "Always")
        assert {"name": "scratch", "emptyDir": {}} in spec["volumes"]
        assert spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "team"}]


def test_ways_in_lead_to_the_router():
    docs = install("everything")
    [service] = [s for s in of_kind(docs, "Service") if s["metadata"]["name"] == "baton-router"]
    assert service["spec"]["loadBalancerClass"] == "example.com/internal"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    [ingress] = of_kind(docs, "Ingress")
    [rule] = ingress["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "baton-router",
        "port": {"name": "http"},
    }
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}]
    [route] = of_kind(docs, "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "baton-router", "port": 80}]
    assert route["spec"]["rules"][0]["timeouts"]["request"] == "0s"
    [policy] = of_kind(docs, "BackendTLSPolicy")
    assert policy["spec"]["validation"]["caCertificateRefs"][0]["name"] == "router-ca"
    [router] = [spec["containers"][0] for name, _, spec in pods(docs) if name.endswith("-router")]
    assert router["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert settings(docs)["BATON_ROUTER__TLS_CERT"] == "/etc/baton/router-tls/tls.crt"
    [test] = [spec["containers"][0] for name, _, spec in pods(docs) if name.endswith("-test")]
    assert test["args"] == ["https://baton-router:80"]
    assert "--insecure" in test["command"][2], "the certificate has the clients' name"
    assert "verify=False" in environment(test)["BATON_ASK"]
    plain = str(list(pods(install("minimal"))))
    assert "--insecure" not in plain


def test_extra_objects_may_be_templates():
    names = {d["metadata"]["name"] for d in of_kind(install("everything"), "ConfigMap")}
    assert {"baton-more", "baton-text"} <= names


def test_the_chart_says_where_it_comes_from():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["sources"]
    assert chart["icon"].startswith("data:image/svg+xml")


def test_the_readme_is_generated_and_names_every_value():
    text = (CHART / "README.md").read_text()
    assert text == readme(CHART), "run `make chart`"
    for name in ("router.httpRoute.parentRefs", "pools.prefill.podLabels", "ray.headState", "extraObjects"):
        assert f"| `{name}` |" in text
    assert (ROOT / "deploy/helm/baton/values.schema.json").exists()
