"""The chart as Helm renders it, for the tests beside this file. Each rendering is made once."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/baton"
VALUES = ROOT / "deploy/helm/values"
EXAMPLES = sorted(path.stem for path in VALUES.glob("*.yaml"))


def helm(*args):
    """(exit status, standard output, standard error)"""
    beside_python = Path(sys.executable).parent / "helm"
    binary = str(beside_python) if beside_python.exists() else shutil.which("helm")
    assert binary, "no helm: `make setup` installs it (helm-binary)"
    done = subprocess.run([binary, *map(str, args)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@functools.cache
def text(example, *sets):
    """`sets`: NAME=JSON"""
    options = [part for one in sets for part in ("--set-json", one)]
    command = ("template", "baton", CHART, "--namespace", "baton", "--values", VALUES / f"{example}.yaml")
    status, out, err = helm(*command, *options)
    assert status == 0, err
    return out


@functools.cache
def documents(example, *sets):
    return tuple(d for d in yaml.safe_load_all(text(example, *sets)) if d)


def refusal(example, *sets):
    """What Helm says against these values."""
    options = [part for one in sets for part in ("--set-json", one)]
    status, _, err = helm("template", "baton", CHART, "--values", VALUES / f"{example}.yaml", *options)
    assert status != 0, "nothing was refused"
    return err


def of_kind(docs, kind):
    return [d for d in docs if d["kind"] == kind]


def pods(docs):
    """(name, metadata, pod spec) of everything that runs."""
    for d in docs:
        name, spec = f"{d['kind']}/{d['metadata']['name']}", d.get("spec", {})
        if d["kind"] == "Pod":
            yield name, d["metadata"], spec
        elif d["kind"] == "RayCluster":
            groups = [("head", spec["headGroupSpec"])] + [
                (g["groupName"], g) for g in spec["workerGroupSpecs"]
            ]
            for group, template in groups:
                pod = template["template"]
                yield f"{name}/{group}", pod["metadata"], pod["spec"]
        elif "template" in spec:
            yield name, spec["template"]["metadata"], spec["template"]["spec"]


def containers(docs):
    """(pod's name, pod spec, container), those that run for long."""
    for name, _, spec in pods(docs):
        for container in spec["containers"]:
            yield name, spec, container


def settings(docs):
    """The environment that the config map makes."""
    found = next(d for d in of_kind(docs, "ConfigMap") if d["metadata"]["name"].endswith("-config"))
    return found["data"]


def merged(base, over):
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {
        k: merged(base[k], over[k]) if k in base and k in over else over.get(k, base.get(k))
        for k in {*base, *over}
    }


def values_of(example):
    base = yaml.safe_load((CHART / "values.yaml").read_text())
    return merged(base, yaml.safe_load((VALUES / f"{example}.yaml").read_text()))


def as_json(value):
    return json.dumps(value)
