"""Custom resources of the chart against their operators' published definitions.

They belong to KubeRay, the Prometheus operator and the Gateway API, and no package registry has them:
`BATON_CRDS` names a folder with the releases to check against.
"""

import copy
import os
from pathlib import Path

import pytest

from tests.unit.deploy.chart import EXAMPLES, documents
from tests.unit.deploy.crds import complaints, read_definitions, strict
from tests.unit.deploy.test_installs import INSTALLS, rendered

FOLDER = os.environ.get("BATON_CRDS", "")
GROUPS = ("ray.io/", "monitoring.coreos.com/", "gateway.networking.k8s.io/")
"""API groups whose definitions the folder must have, if the chart renders such kinds."""


@pytest.fixture(scope="module")
def definitions():
    if not FOLDER:
        pytest.skip("BATON_CRDS names no folder of CustomResourceDefinitions")
    found = read_definitions(Path(FOLDER))
    assert ("ray.io/v1", "RayCluster") in found, f"no RayCluster is defined below {FOLDER}"
    return found


def check(docs, definitions):
    seen = []
    for document in docs:
        key = document["apiVersion"], document["kind"]
        if key[0].startswith(GROUPS):
            assert key in definitions, f"nothing below {FOLDER} defines {key}"
            seen.append(key[1])
            for name, schema in definitions[key].items():
                assert complaints(document, schema) == [], name
    assert "RayCluster" in seen


@pytest.mark.parametrize("example", EXAMPLES)
def test_operators_accept_what_examples_make(example, definitions):
    check(documents(example), definitions)


@pytest.mark.parametrize("path", INSTALLS, ids=lambda p: p.stem.removesuffix("-values"))
def test_operators_accept_what_installs_make(path, definitions):
    check(rendered(path), definitions)


SCHEMA = {
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string"},
        "spec": {
            "type": "object",
            "required": ["port"],
            "properties": {
                "port": {
                    "anyOf": [{"type": "integer"}, {"type": "string"}],
                    "x-kubernetes-int-or-string": True,
                },
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "raw": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}},
                    "x-kubernetes-preserve-unknown-fields": True,
                },
                "pods": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"name": {"type": "string"}}},
                },
                "none": {"type": "string", "nullable": True},
            },
        },
    },
}
GOOD = {
    "apiVersion": "x/v1",
    "spec": {"port": "http", "labels": {"a": "b"}, "raw": {"b": 1}, "pods": [{"name": "n"}], "none": None},
}


def test_a_structural_schema_refuses_what_an_api_server_would_drop():
    assert complaints(GOOD, strict(SCHEMA)) == []
    for name, value, part in (
        ("port", [1], "spec.port"),
        ("labels", {"a": 1}, "spec.labels.a"),
        ("raw", {"a": "x"}, "spec.raw.a"),
        ("pods", [{"nmae": "n"}], "spec.pods.0"),
        ("prot", 1, "spec"),
    ):
        bad = copy.deepcopy(GOOD)
        bad["spec"][name] = value
        [line] = complaints(bad, strict(SCHEMA))
        assert line.startswith(f"{part}: "), line
    assert "required" in complaints({"spec": {}}, strict(SCHEMA))[0]
