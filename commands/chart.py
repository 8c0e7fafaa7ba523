"""Generates the chart's values.schema.json from the settings and the chart's own values. Run `python -m
commands.chart FILE`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config import Config
from baton.config import sections as setting_sections
from baton.config.base import SECRET
from baton.config.models import NAME_PATTERN, NEVER_OWN, OWN_OF_CLUSTER, OWN_SECTIONS
from baton.core.messages import Role
from baton.core.shape import RANKS_MAX
from baton.telemetry.alerts import OBJECTIVE_MIN

Schema = dict[str, Any]

OWNED = {
    "tls": {"ca", "cert", "key"},
    "access": {"tokens", "token"},
    "dashboard": {"host", "port", "tls_cert", "tls_key", "token_file", "sessions_file"},
    "model": {"path", "name", "revision", "device"},
    "store": {"socket", "ssd_dir", "directory", "port", "metrics_port"},
    "router": {
        *("host", "port", "processes", "share_port", "peers", "peer_port", "keys", "budgets_url"),
        "tenant_salt",
    },
    "cluster": {
        *(
            "prefill_workers",
            "decode_workers",
            "aggregated_workers",
            "ray_address",
            "worker_host",
            "worker_port",
        ),
        *("worker_metrics_port", "control_host", "control_port", "control_metrics_port"),
        *("keep_workers", "record", "shapes"),
    },
    "engine": {"shape"},
}
"""Settings that follow from other values of the chart, or that hold a password and come from Secrets."""

OF_PODS = {"shape", "shapes"}
"""Settings that no model can have for itself here, since pods are made for all models."""


def text(description: str = "", *, pattern: str = "", choices: tuple[str, ...] = ()) -> Schema:
    schema: Schema = {"type": "string"}
    if description:
        schema["description"] = description
    if pattern:
        schema["pattern"] = pattern
    if choices:
        schema["enum"] = list(choices)
    return schema


def whole(minimum: int = 0, maximum: int | None = None) -> Schema:
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def closed(properties: Mapping[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    """The schema of an object with these properties and no others."""
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return schema | ({"required": list(required)} if required else {})


def each(schema: Schema) -> Schema:
    """The schema of an object with any names, each with a value of this schema."""
    return {"type": "object", "additionalProperties": schema}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


SWITCH: Schema = {"type": "boolean"}
NAME = text(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
NAME_OR_NONE = text(pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$")
LABELS = each(text())
QUANTITY = text(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$")
CPU: Schema = {"anyOf": [QUANTITY, {"type": "number", "exclusiveMinimum": 0}]}
FOLDER = text("An absolute path.", pattern=r"^/[^:]*[^/:]$")
FOLDER_OR_NONE = text("An absolute path, or nothing.", pattern=r"^(/[^:]*[^/:])?$")
PATH = text("Begins with a slash.", pattern=r"^/")
HOST = text(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
FILE = text(pattern=r"^[-._a-zA-Z0-9]+$")
SECRET_KEY = closed({"name": NAME_OR_NONE, "key": text(pattern=r"^[-._a-zA-Z0-9]+$")})
TOLERATIONS = listed(
    closed(
        {
            "key": text(),
            "operator": text(choices=("Exists", "Equal")),
            "value": text(),
            "effect": text(choices=("NoSchedule", "PreferNoSchedule", "NoExecute")),
            "tolerationSeconds": whole(),
        }
    )
)
SPREAD = listed(
    closed(
        {
            "topologyKey": text(),
            "maxSkew": whole(1),
            "whenUnsatisfiable": text(choices=("DoNotSchedule", "ScheduleAnyway")),
        },
        required=("topologyKey", "maxSkew", "whenUnsatisfiable"),
    )
)
NEAR = listed(closed({"topologyKey": text(), "weight": whole(1, 100)}, required=("topologyKey", "weight")))
ANYTHING: Schema = {"type": "object"}
"""A part of a Kubernetes object that is rendered as it is. The API server judges it."""
PLACED = {
    "nodeSelector": LABELS,
    "tolerations": TOLERATIONS,
    "affinity": ANYTHING,
    "runtimeClassName": NAME_OR_NONE,
    "priorityClassName": NAME_OR_NONE,
    "podLabels": LABELS,
    "podAnnotations": LABELS,
    "extraEnv": listed(ANYTHING | {"required": ["name"]}),
    "extraVolumes": listed(ANYTHING | {"required": ["name"]}),
    "extraVolumeMounts": listed(ANYTHING | {"required": ["name", "mountPath"]}),
    "sidecars": listed(ANYTHING | {"required": ["name", "image"]}),
    "initContainers": listed(ANYTHING | {"required": ["name", "image"]}),
}
SIZED = {"cpu": CPU, "memory": QUANTITY}
RDMA = closed({"resource": text(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"), "count": whole(0, 16)})
TAG = text("Never latest: what runs must be known.", pattern=r"^[A-Za-z0-9_.-]*$") | {
    "not": {"const": "latest"}  # Helm's patterns are Go's, which have no lookahead
}
DIGEST = text(pattern=r"^(sha256:[0-9a-f]{64})?$")
REGISTRY = text(pattern=r"^([a-zA-Z0-9]([a-zA-Z0-9./_:-]*[a-zA-Z0-9])?)?$")
IMAGE = closed(
    {"repository": text(pattern=r"^([a-z0-9]([a-z0-9./_:-]*[a-z0-9])?)?$"), "tag": TAG, "digest": DIGEST}
)
PULL_SECRETS = listed({"anyOf": [NAME, closed({"name": NAME}, required=("name",))]})
PEERS = listed({"type": "object"})


def config_schema() -> Schema:
    """The sections and fields of `Config` that an operator may set."""
    whole_schema = Config.model_json_schema()
    kinds = whole_schema.get("$defs", {})
    sections: dict[str, Schema] = {}
    for name in setting_sections():
        schema = _inlined(whole_schema["properties"][name], kinds)
        owned = OWNED.get(name, set[str]())
        fields = {
            field: _without(kind, SECRET)
            for field, kind in schema["properties"].items()
            if field not in owned and not kind.get(SECRET)
        }
        sections[name] = closed(fields)
    return closed(sections)


def models_schema() -> Schema:
    """The sections that each of several models may set for itself, by model name."""
    whole_schema = Config.model_json_schema()
    kinds = whole_schema.get("$defs", {})
    entry: dict[str, Schema] = {}
    for name in OWN_SECTIONS:
        fields = _inlined(whole_schema["properties"][name], kinds)["properties"]
        refused = {*NEVER_OWN.get(name, {}), *({"device"} if name == "model" else ())}
        own = {f: kind for f, kind in fields.items() if f not in refused}
        if name == "cluster":
            own = {field: kind for field, kind in own.items() if field in OWN_OF_CLUSTER}
        own = {field: kind for field, kind in own.items() if field not in OF_PODS}
        entry[name] = closed(own, required=("path",) if name == "model" else ())
    return each(closed(entry, required=("model",))) | {"propertyNames": {"pattern": NAME_PATTERN}}


def _inlined(schema: Any, kinds: Mapping[str, Schema]) -> Any:
    """The schema with each `$ref` replaced by the schema that it refers to."""
    if isinstance(schema, list):
        return [_inlined(item, kinds) for item in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    known: Schema = schema  # pyright: ignore[reportUnknownVariableType]
    if "$ref" in known:
        return _inlined(kinds[known["$ref"].rsplit("/", 1)[-1]], kinds)
    return {name: _inlined(value, kinds) for name, value in known.items()}


def _without(schema: Schema, name: str) -> Schema:
    return {key: value for key, value in schema.items() if key != name}


def _pool() -> Schema:
    return closed(
        {
            "replicas": whole(0, 1024),
            "maxReplicas": whole(0, 1024),
            "gpu": text(),
            "tensorParallelSize": whole(1, RANKS_MAX),
            "contextParallelSize": whole(1, RANKS_MAX),
            "pipelineParallelSize": whole(1, RANKS_MAX),
            "podsPerWorker": whole(1, RANKS_MAX),
            "stageAffinity": NEAR,
            "cpu": whole(1),
            "memory": QUANTITY,
            "rdma": RDMA,
            "hugepages": text(pattern=r"^([0-9]+[MG]i)?$"),
            "env": each(text()),
            **PLACED,
            "topologySpread": SPREAD,
        }
    )


def _model() -> Schema:
    cache = {
        "type": text(choices=("emptyDir", "hostPath", "claim")),
        "sizeLimit": QUANTITY,
        "hostPath": FOLDER_OR_NONE,
        "existingClaim": NAME_OR_NONE,
        "storageClassName": NAME_OR_NONE,
        "accessModes": listed(text(choices=("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"))),
    }
    return closed(
        {
            "path": text(),
            "name": text(),
            "revision": text(),
            "hubTokenSecret": SECRET_KEY,
            "volume": closed({"existingClaim": NAME_OR_NONE, "mountPath": FOLDER}),
            "cache": closed(cache),
        }
    )


def _ingress() -> Schema:
    return closed(
        {
            "enabled": SWITCH,
            "className": NAME_OR_NONE,
            "annotations": LABELS,
            "labels": LABELS,
            "hosts": listed(HOST),
            "path": PATH,
            "tls": listed(closed({"hosts": listed(HOST), "secretName": NAME})),
        }
    )


def _http_route() -> Schema:
    backend_tls = {
        "hostname": text(),
        "caConfigMap": NAME_OR_NONE,
        "apiVersion": text(choices=("v1", "v1alpha3")),
    }
    return closed(
        {
            "enabled": SWITCH,
            "parentRefs": listed(ANYTHING | {"required": ["name"]}),
            "hostnames": listed(HOST),
            "path": PATH,
            "filters": listed(ANYTHING | {"required": ["type"]}),
            "annotations": LABELS,
            "labels": LABELS,
            "backendTls": closed(backend_tls),
        }
    )


def _router() -> Schema:
    autoscaling = {
        "enabled": SWITCH,
        "minReplicas": whole(1),
        "maxReplicas": whole(1),
        "cpuPercent": whole(1, 100),
    }
    service = {
        "type": text(choices=("ClusterIP", "NodePort", "LoadBalancer")),
        "port": whole(1, 65_535),
        "nodePort": whole(0, 65_535),
        "loadBalancerClass": text(),
        "loadBalancerSourceRanges": listed(text(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")),
        "externalTrafficPolicy": text(choices=("", "Cluster", "Local")),
        "annotations": LABELS,
    }
    return closed(
        {
            "replicas": whole(1),
            **SIZED,
            "autoscaling": closed(autoscaling),
            "maxUnavailable": {"anyOf": [whole(1), text(pattern=r"^[0-9]{1,2}%$")]},
            "keysSecret": SECRET_KEY,
            "tenantSaltSecret": SECRET_KEY,
            "service": closed(service),
            "tls": closed({"existingSecret": NAME_OR_NONE, "cert": FILE, "key": FILE}),
            "ingress": _ingress(),
            "httpRoute": _http_route(),
            "preStopSeconds": whole(0, 120),
            **PLACED,
            "topologySpread": SPREAD,
        }
    )


def _store() -> Schema:
    return closed(
        {
            "enabled": SWITCH,
            "hostFolder": FOLDER,
            "ssdHostFolder": FOLDER_OR_NONE,
            "prepareFolders": SWITCH,
            "cpu": CPU,
            "overheadMebibytes": whole(256),
            "rdma": RDMA,
            **PLACED,
        }
    )


def _redis() -> Schema:
    return closed(
        {
            "mode": text(choices=("own", "external", "none")),
            "host": text(pattern=r"^[a-zA-Z0-9.-]*$"),
            "port": whole(1, 65_535),
            "username": text(pattern=r"^[A-Za-z0-9_.-]*$"),
            "tls": SWITCH,
            "peers": PEERS,
            "urlSecret": SECRET_KEY,
            "passwordSecret": SECRET_KEY,
            "caSecret": SECRET_KEY,
            "image": closed({"registry": REGISTRY, **IMAGE["properties"]}),
            **SIZED,
            "storage": closed({"size": QUANTITY, "storageClassName": NAME_OR_NONE}),
            **PLACED,
        }
    )


def _monitoring() -> Schema:
    objective = {"type": "number", "minimum": OBJECTIVE_MIN, "exclusiveMaximum": 1}
    interval = text(pattern=r"^[0-9]+(ms|s|m)$")
    return closed(
        {
            "scrape": closed({"enabled": SWITCH, "interval": interval, "labels": LABELS}),
            "rules": closed({"enabled": SWITCH, "objective": objective, "labels": LABELS}),
            "dashboards": closed({"enabled": SWITCH, "labels": LABELS}),
        }
    )


def _network_policy() -> Schema:
    return closed(
        {
            "enabled": SWITCH,
            "clients": PEERS,
            "prometheus": PEERS,
            "dns": PEERS,
            "hub": SWITCH,
            "extraEgress": listed({"type": "object"}),
        }
    )


def _images() -> Schema:
    policies = ("Always", "IfNotPresent", "Never")
    return closed(
        {
            "pullPolicy": text(choices=policies),
            "pullSecrets": PULL_SECRETS,
            "registry": REGISTRY,
            "light": IMAGE,
            "worker": IMAGE,
        }
    )


def _ray() -> Schema:
    claim = {"existingClaim": NAME_OR_NONE, "size": QUANTITY, "storageClassName": NAME_OR_NONE}
    return closed(
        {
            "version": text(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$"),
            "authTokenSecret": SECRET_KEY,
            "headState": text(choices=("auto", "redis", "claim", "none")),
            "headClaim": closed(claim),
            "headLossSeconds": whole(60),
            "autoscaler": closed({"enabled": SWITCH, "idleTimeoutSeconds": whole(10), **SIZED}),
            "head": closed({**SIZED, **PLACED}),
        }
    )


def _experts() -> Schema:
    return closed(
        {
            "gpu": text(),
            "cpu": whole(1),
            "memory": QUANTITY,
            "env": each(text()),
            **PLACED,
            "topologySpread": SPREAD,
        }
    )


def values_schema() -> Schema:
    account = {"create": SWITCH, "name": NAME_OR_NONE, "annotations": LABELS}
    shared = ANYTHING | {"properties": {"imageRegistry": REGISTRY, "imagePullSecrets": PULL_SECRETS}}
    values = {
        "nameOverride": NAME_OR_NONE,
        "fullnameOverride": NAME_OR_NONE,
        "images": _images(),
        "accelerator": text(choices=("cpu", "cuda")),
        "model": _model(),
        "models": models_schema(),
        "config": config_schema(),
        "pools": closed({role.value: _pool() for role in Role}),
        "gpuResource": text(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"),
        "gpuTypes": each(LABELS),
        "experts": _experts(),
        "ray": _ray(),
        "router": _router(),
        "control": closed({**SIZED, **PLACED}),
        "store": _store(),
        "redis": _redis(),
        "monitoring": _monitoring(),
        "networkPolicy": _network_policy(),
        "tls": closed({"existingSecret": NAME_OR_NONE, "ca": FILE, "cert": FILE, "key": FILE}),
        "access": closed({"tokensSecret": SECRET_KEY, "tokenSecret": SECRET_KEY}),
        "security": closed({"user": whole(1), "group": whole(1)}),
        "serviceAccount": closed(account),
        "test": closed({"keySecret": SECRET_KEY}),
        "extraObjects": listed({"anyOf": [ANYTHING, text()]}),
        "global": shared,  # Helm passes these values to subcharts, with further ones of other charts
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **closed(values)}


def main() -> None:
    Path(sys.argv[1]).write_text(json.dumps(values_schema(), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
