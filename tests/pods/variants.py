"""What is run: an example's values, and what is changed in them for one machine without a GPU."""

import json
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.core.tokens import digest_of
from tests.certificates import make_folder
from tests.models import Kind
from tests.pods.redis_outside import PASSWORD, TLS_PORT
from tests.unit.deploy.chart import CHART, VALUES, helm, merged

NAMESPACE = "baton"
POOL: dict[str, Any] = {"gpu": "", "cpu": 1, "memory": "3Gi", "tolerations": [], "nodeSelector": {}}
SMALL: dict[str, Any] = {
    "accelerator": "cpu",
    "model": {"path": "/models/tiny", "name": "tiny", "volume": {"existingClaim": "models"}},
    "config": {
        "engine": {"threads": 1, "kv_bytes": 67108864, "step_tokens_max": 1024, "batch_sequences_max": 32},
        "store": {"host_bytes": 134217728},
        # Replays wait for a pod that starts on a busy machine rather than being refused.
        "router": {"queue_wait_s": 120},
    },
    "router": {"autoscaling": {"enabled": False}},
    "access": {
        "tokensSecret": {"name": "baton-tokens", "key": "tokens.txt"},
        "tokenSecret": {"name": "baton-token"},
    },
}
"""An example's own sizes are those of GPUs. Exact are the pods, and how they live."""


@dataclass(frozen=True)
class Variant:
    """`values` lie over those of the example. `kind` is the model's."""

    example: str
    about: str
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    kind: Kind = "llama"
    external_redis: bool = False


def _gpu_free(**more: Any) -> dict[str, Any]:
    return {**POOL, "rdma": {"count": 0}, "hugepages": "", **more}


EXPORTER = {
    "name": "exporter",
    "image": "LIGHT",
    # The first process of a container ends by SIGTERM only if it asks for that.
    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 86400 & wait"],
    "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
}
NATIVE = {
    **EXPORTER,
    "name": "proxy",
    "restartPolicy": "Always",
    "startupProbe": {"exec": {"command": ["test", "-d", "/extra"]}, "periodSeconds": 1},
    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
ADDED: dict[str, Any] = {
    "extraEnv": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "sidecars": [EXPORTER],
    "initContainers": [NATIVE],
}
EXTERNAL: dict[str, Any] = {
    "mode": "external",
    "host": "redis.example.com",
    "port": TLS_PORT,
    "tls": True,
    "passwordSecret": {"name": "baton-redis"},
    "caSecret": {"name": "redis-ca"},
    "urlSecret": {"name": ""},
}

VARIANTS = {
    "cpu-one-machine": Variant("cpu-one-machine", "the example; two decode workers"),
    "rdma-multi-node": Variant(
        "rdma-multi-node",
        "mutual TLS, API keys, Ray's token, own Redis; KV over TCP",
        {
            "pools": {"prefill": _gpu_free(replicas=1), "decode": _gpu_free(replicas=2)},
            "router": {"replicas": 2, "cpu": "500m"},
            "store": {"rdma": {"count": 0}, "nodeSelector": {}, "tolerations": [], "cpu": 1},
            "config": {"store": {"ssd_bytes": 268435456}},
            "access": {"tokenSecret": {"name": ""}},
        },
    ),
    "moe": Variant(
        "moe",
        "expert ranks in pods of their own; Redis by the URL of a Secret, head's state on a claim",
        {
            "pools": {"prefill": _gpu_free(replicas=1), "decode": _gpu_free(replicas=1)},
            "config": {"experts": {"parallel": "ranks", "ranks": 2, "replicas": 2}},
            "experts": {"gpu": "", "cpu": 1, "memory": "2Gi"},
            "store": {"nodeSelector": {}, "cpu": 1},
            "ray": {"headState": "claim"},
            "router": {"replicas": 2},
        },
        kind="qwen3_moe",
        external_redis=True,
    ),
    "additions": Variant(
        "cpu-one-machine",
        "TLS at the router, sidecars of both kinds, more variables and volumes, external Redis with TLS",
        {
            "router": {**ADDED, "replicas": 2, "tls": {"existingSecret": "router-tls"}},
            "control": ADDED,
            "store": ADDED,
            "ray": {"head": ADDED},
            "pools": {"prefill": ADDED, "decode": ADDED},
            "redis": EXTERNAL,
        },
        external_redis=True,
    ),
}
TWO_DECODES: dict[str, Any] = {"pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}}


def values_of(variant: Variant, images: dict[str, str]) -> dict[str, Any]:
    """The values that go over the example's. `images` are whole names of light, worker and redis."""
    named = {kind: _image(images[kind]) for kind in ("light", "worker")}
    values = merged(merged(SMALL, TWO_DECODES), variant.values)
    values = merged(values, {"images": {**named, "pullPolicy": "Never"}, "redis": {"image": _redis(images)}})
    return json.loads(json.dumps(values).replace('"LIGHT"', json.dumps(images["light"])))


def _image(name: str) -> dict[str, str]:
    repository, tag = name.rsplit(":", 1)
    return {"repository": repository, "tag": tag}


def _redis(images: dict[str, str]) -> dict[str, str]:
    image = _image(images["redis"])
    registry, repository = image["repository"].split("/", 1)
    return {"registry": registry, "repository": repository, "tag": image["tag"]}


def render(variant: Variant, values: dict[str, Any], folder: Path) -> list[Any]:
    """Render the chart with Helm. Raises AssertionError with what Helm says if it refuses the values."""
    over = folder / "values.yaml"
    over.write_text(yaml.safe_dump(values))
    files = ("--values", VALUES / f"{variant.example}.yaml", "--values", over)
    status, out, err = helm("template", "baton", CHART, "--namespace", NAMESPACE, *files)
    assert status == 0, err
    (folder / "rendered.yaml").write_text(out)
    return [doc for doc in yaml.safe_load_all(out) if doc]


@dataclass(frozen=True)
class Secrets:
    """What an operator would have created, by Secret and key. Clients use `api_key`, and people `token`."""

    by_name: dict[str, dict[str, str]]
    api_key: str
    token: str
    router_ca: Path


def make_secrets(folder: Path, *, redis_url: str) -> Secrets:
    """Make every Secret that an example or a variant may name."""
    certificates = make_folder(folder / "certificates")
    keys = folder / "keys.toml"
    create = (sys.executable, "-m", "baton", "keys", "create", "drill", "--keys", str(keys))
    made = subprocess.run(create, capture_output=True, text=True, timeout=120, check=True)
    key = next(word for word in made.stdout.split() if len(word) > 24)
    token, own = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    router = _certificate(folder / "router", "DNS:localhost,IP:127.0.0.1,DNS:baton-router")
    redis = _certificate(folder / "redis", "DNS:redis.example.com")
    by_name = {
        "baton-keys": {"keys.toml": keys.read_text()},
        "baton-test-key": {"key": key},
        "baton-redis": {"password": PASSWORD, "url": redis_url},
        "baton-salt": {"salt": secrets.token_hex(16)},
        "baton-ray": {"token": secrets.token_hex(32)},
        "baton-tls": {n: (certificates / n).read_text() for n in ("ca.pem", "node.pem", "node.key")},
        "baton-tokens": {
            "tokens.txt": f"ada operate {digest_of(token)}\npods operate {digest_of(own)}\n",
        },
        "baton-token": {"token": own},
        "router-tls": {"tls.crt": router[0].read_text(), "tls.key": router[1].read_text()},
        "redis-ca": {"ca.crt": redis[0].read_text()},
    }
    return Secrets(by_name, key, token, router[0])


def _certificate(stem: Path, names: str) -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key, with OpenSSL."""
    cert, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
    subject = ("-subj", f"/CN={stem.name}", "-addext", f"subjectAltName={names}", "-days", "2")
    new = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject)
    subprocess.run([str(part) for part in new], check=True, capture_output=True, timeout=60)
    return cert, key
