"""What the KubeRay operator makes of a RayCluster: its pods, with commands and variables of Ray. Pure.

The rules are those of its versions 1.4 to 1.7 (ray-operator/controllers/ray/common/pod.go).
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from tests.pods.quantities import quantity

Doc = Mapping[str, Any]
GCS_PORT = 6379


def cluster_pods(doc: Doc) -> Iterable[tuple[str, dict[str, Any]]]:
    """(name, template) of the head and of each worker."""
    name, spec = doc["metadata"]["name"], doc["spec"]
    yield f"{name}-head", _head(name, spec)
    for group in spec["workerGroupSpecs"]:
        for number in range(group["replicas"] * group.get("numOfHosts", 1)):
            yield f"{name}-{group['groupName']}-{number}", _worker(name, group)


def _head(cluster: str, spec: Doc) -> dict[str, Any]:
    group = spec["headGroupSpec"]
    template, params = copy.deepcopy(group["template"]), dict(group["rayStartParams"])
    params.setdefault("dashboard-host", "0.0.0.0")
    variables: list[dict[str, Any]] = []
    if options := spec.get("gcsFaultToleranceOptions"):
        variables.append({"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]})
        for field, variable in (("redisUsername", "REDIS_USERNAME"), ("redisPassword", "REDIS_PASSWORD")):
            if field in options:
                variables.append({"name": variable, **options[field]})
                params.setdefault(variable.lower().replace("_", "-"), f"${variable}")
        if space := options.get("externalStorageNamespace"):
            variables.append({"name": "RAY_external_storage_namespace", "value": space})
    _ray(template, params, cluster, "headgroup", variables, address="127.0.0.1", options="--head ")
    template["metadata"]["labels"] |= {"ray.io/node-type": "head", "ray.io/cluster": cluster}
    return template


def _worker(cluster: str, group: Doc) -> dict[str, Any]:
    template, params = copy.deepcopy(group["template"]), dict(group["rayStartParams"])
    head = f"{cluster}-head-svc.baton.svc.cluster.local"
    params.setdefault("address", f"{head}:{GCS_PORT}")
    container = template["spec"]["containers"][0]
    wait = {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [
            f"until ray health-check --address {head}:{GCS_PORT} > /dev/null 2>&1; do"
            " echo waiting for the head; sleep 5; done"
        ],
        "env": copy.deepcopy(container["env"]),
        "securityContext": container["securityContext"],
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}},
    }
    template["spec"]["initContainers"] = [*template["spec"].get("initContainers", ()), wait]
    variables = [{"name": "FQ_RAY_IP", "value": head}, {"name": "RAY_IP", "value": f"{cluster}-head-svc"}]
    _ray(template, params, cluster, group["groupName"], variables, address=head, options="")
    template["metadata"]["labels"] |= {"ray.io/node-type": "worker", "ray.io/cluster": cluster}
    return template


def _ray(
    template: dict[str, Any],
    params: dict[str, str],
    cluster: str,
    group: str,
    variables: list[dict[str, Any]],
    *,
    address: str,
    options: str,
) -> None:
    """Give the pod's first container Ray's command and variables, and shared memory of its own."""
    container = template["spec"]["containers"][0]
    limit = container["resources"]["limits"]["memory"]
    params.setdefault("metrics-export-port", "8080")
    params.setdefault("dashboard-agent-listen-port", "52365")
    params.setdefault("memory", str(int(quantity(limit))))
    params["block"] = "true"
    flags = " ".join(f"--{k}" if v == "true" else f"--{k}={v}" for k, v in sorted(params.items()))
    start = f"ray start {options}{flags}"
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"ulimit -n 65536 2>/dev/null || true; {start}"]
    container["env"] = [
        *container["env"],
        *variables,
        {"name": "RAY_CLUSTER_NAME", "value": cluster},
        {"name": "RAY_CLOUD_INSTANCE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "RAY_NODE_TYPE_NAME", "value": group},
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": start},
        {"name": "RAY_PORT", "value": str(GCS_PORT)},
        {"name": "RAY_ADDRESS", "value": f"{address}:{GCS_PORT}"},
    ]
    if all(mount["mountPath"] != "/dev/shm" for mount in container["volumeMounts"]):
        container["volumeMounts"] = [
            *container["volumeMounts"],
            {"name": "shared-mem", "mountPath": "/dev/shm"},
        ]
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": limit}}
        template["spec"]["volumes"] = [*template["spec"]["volumes"], {"name": "shared-mem", **memory}]
