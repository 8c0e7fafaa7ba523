"""What a rendered release asks of a node: its pods, with their environments, volumes and names. Pure."""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.pods.kuberay import cluster_pods

Doc = Mapping[str, Any]


@dataclass(frozen=True)
class PodPlan:
    """One pod. `spec` is Kubernetes' PodSpec; `claims` are the names of a StatefulSet's volume claims."""

    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    address: str
    claims: tuple[str, ...] = ()
    is_test: bool = False

    @property
    def component(self) -> str:
        return self.labels.get("baton.dev/component", "")

    @property
    def grace_s(self) -> int:
        return int(self.spec.get("terminationGracePeriodSeconds", 30))


@dataclass(frozen=True)
class Release:
    """All pods of a rendering, and what they refer to."""

    docs: tuple[Doc, ...]
    pods: tuple[PodPlan, ...]
    secrets: Mapping[str, Mapping[str, str]]
    namespace: str
    gateway: str
    """Address of the node in the pods' network."""
    virtual: Mapping[str, str] = field(default_factory=dict[str, str])
    """Address of each Service that has one of its own."""
    outside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names outside the cluster that pods look up."""


def release_of(
    docs: Iterable[Doc],
    secrets: Mapping[str, Mapping[str, str]],
    *,
    network: str,
    namespace: str = "baton",
    outside: Mapping[str, str] | None = None,
) -> Release:
    """`network` is the first three numbers of the pods' network; pods get the numbers from 20. A release that
    makes Secrets itself has those as well."""
    docs = tuple(docs)
    templates = [t for d in docs for t in _templates(d)]
    pods = tuple(
        PodPlan(t["name"], t["labels"], t["spec"], f"{network}.{20 + i}", t["claims"], t["is_test"])
        for i, t in enumerate(templates)
    )
    made = {d["metadata"]["name"]: dict(d.get("stringData", {})) for d in docs if d["kind"] == "Secret"}
    services = [d for d in docs if d["kind"] == "Service" and d["spec"].get("clusterIP") != "None"]
    virtual = {d["metadata"]["name"]: f"10.96.77.{1 + i}" for i, d in enumerate(services)}
    return Release(docs, pods, {**made, **secrets}, namespace, f"{network}.1", virtual, outside or {})


def _templates(doc: Doc) -> Iterable[dict[str, Any]]:
    kind, name, spec = doc["kind"], doc["metadata"]["name"], doc.get("spec", {})
    if kind in ("Deployment", "StatefulSet", "DaemonSet"):
        claims = tuple(c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", ()))
        for number in range(spec.get("replicas", 1)):
            yield _template(f"{name}-{number}", spec["template"], claims=claims)
    elif kind == "RayCluster":
        for pod, template in cluster_pods(doc):
            yield _template(pod, template)
    elif kind == "Pod":
        yield _template(name, doc, is_test="helm.sh/hook" in doc["metadata"].get("annotations", {}))


def _template(
    name: str, template: Doc, *, claims: tuple[str, ...] = (), is_test: bool = False
) -> dict[str, Any]:
    labels = dict(template["metadata"].get("labels", {}))
    spec = copy.deepcopy(template["spec"])
    return {"name": name, "labels": labels, "spec": spec, "claims": claims, "is_test": is_test}


def matches(selector: Doc | None, labels: Mapping[str, str]) -> bool:
    """A selector of labels; one that is empty takes all."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(k) == v for k, v in wanted.items())


def environment(release: Release, pod: PodPlan, container: Doc) -> dict[str, str]:
    """Raises KeyError where a ConfigMap or a Secret lacks what is asked of it."""
    config = {d["metadata"]["name"]: d["data"] for d in release.docs if d["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= config[source["configMapRef"]["name"]]
    for variable in container.get("env", ()):
        origin = variable.get("valueFrom", {})
        if "secretKeyRef" in origin:
            value = release.secrets[origin["secretKeyRef"]["name"]][origin["secretKeyRef"]["key"]]
        elif "fieldRef" in origin:
            path = origin["fieldRef"]["fieldPath"]
            value = {"metadata.name": pod.name, "status.podIP": pod.address, "spec.nodeName": "node"}[path]
        else:
            given = variable.get("value", "")
            value = re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda m: found.get(m[1], m[0]), given)
        found[variable["name"]] = value
    return found


def hosts(release: Release) -> dict[str, str]:
    """Addresses by name, as the cluster's DNS has them: a headless Service is its first pod."""
    found = dict(release.outside)
    for doc in release.docs:
        if doc["kind"] == "Service":
            name = doc["metadata"]["name"]
            of_it = [p for p in release.pods if _serves(doc, p)]
            if name in release.virtual:
                _name(found, release, name, release.virtual[name])
            elif of_it:
                _name(found, release, name, of_it[0].address)
        if doc["kind"] == "RayCluster":
            head = next(p for p in release.pods if p.labels.get("ray.io/node-type") == "head")
            _name(found, release, f"{doc['metadata']['name']}-head-svc", head.address)
    return found


def _serves(service: Doc, pod: PodPlan) -> bool:
    selector = service["spec"].get("selector")
    return bool(selector) and matches({"matchLabels": selector}, pod.labels)


def _name(found: dict[str, str], release: Release, name: str, address: str) -> None:
    for one in (name, f"{name}.{release.namespace}", f"{name}.{release.namespace}.svc.cluster.local"):
        found[one] = address


def port_of(container: Doc, port: str | int) -> int:
    """The number of a port that may be given by its name."""
    named = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
    return int(named.get(port, port))


def endpoints(release: Release, service: str) -> list[tuple[PodPlan, int]]:
    """Pods behind a Service, and the port of each that its first port leads to."""
    doc = next(d for d in release.docs if d["kind"] == "Service" and d["metadata"]["name"] == service)
    target = doc["spec"]["ports"][0]["targetPort"]
    return [(p, port_of(p.spec["containers"][0], target)) for p in release.pods if _serves(doc, p)]
