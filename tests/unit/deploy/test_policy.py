"""What must be true of every pod that the chart makes: probes, resources, rights, drains, flows, commands."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import ray.scripts.scripts as ray_scripts
import typer.main
import yaml

from commands.app import app
from control_plane.ray_cluster import RAY_ENVIRONMENT
from engine.native.build import AHEAD_FOLDER
from tests.unit.deploy.chart import EXAMPLES, ROOT, containers, documents, of_kind, pods, settings, values_of
from worker.leave import arguments

examples = pytest.mark.parametrize("example", EXAMPLES)
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))


def is_for_long(spec):
    return spec.get("restartPolicy") != "Never"


@examples
def test_containers_have_probes_and_resources(example):
    seen = 0
    for name, spec, container in containers(documents(example)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]), name
        assert "memory" in resources["limits"], name
        if is_for_long(spec):
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), name
            seen += 1
    assert seen >= 6


@examples
def test_containers_have_no_rights_that_they_do_not_need(example):
    for name, _, spec in pods(documents(example)):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not spec.get("hostNetwork")
        assert not spec.get("hostPID")
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            may = set(rights["capabilities"].get("add", ()))
            if container["name"] == "own-folders":  # the one that makes a folder of the host the store's
                assert (rights["runAsUser"], may) == (0, {"CHOWN"})
            else:
                assert rights["runAsNonRoot"] is True
                assert not may


@examples
def test_images_are_named_exactly(example):
    for name, _, spec in pods(documents(example)):
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert re.search(r"(:[A-Za-z0-9_.-]+|@sha256:[0-9a-f]{64})$", container["image"]), name
            assert not container["image"].endswith(":latest")


@examples
def test_no_secret_is_in_the_chart(example):
    docs = documents(example)
    assert of_kind(docs, "Secret") == []
    assert not any(
        re.search("PASSWORD|TOKEN$|SALT|KEYS?$", n) and "/" not in v for n, v in settings(docs).items()
    )
    for name, _, spec in pods(docs):
        for container in spec["containers"]:
            for variable in container.get("env", ()):
                if re.search("PASSWORD|TOKEN|SALT|AUTH$|_KEY$", variable["name"]):
                    assert "secretKeyRef" in variable.get("valueFrom", {}), (name, variable["name"])


@examples
def test_pods_have_the_time_that_their_drain_takes(example):
    drain_s = values_of(example)["config"]["cluster"]["drain_timeout_s"]
    grace = {name: spec["terminationGracePeriodSeconds"] for name, _, spec in pods(documents(example))}
    routers = next(s for n, _, s in pods(documents(example)) if n.endswith("-router"))
    [pause] = [int(c["lifecycle"]["preStop"]["exec"]["command"][1]) for c in routers["containers"]]
    for name, seconds in grace.items():
        if name.endswith("-router"):
            assert seconds >= pause + drain_s + 5
        elif re.search(r"-(store|control)$|RayCluster/.*/(prefill|decode|aggregated)$", name):
            assert seconds >= drain_s + 5, name
    workers = [s for n, _, s in pods(documents(example)) if re.search(r"/(prefill|decode|aggregated)$", n)]
    for spec in workers:
        [command] = [c["lifecycle"]["preStop"]["exec"]["command"] for c in spec["containers"]]
        assert command[:3] == ["python", "-m", "worker.leave"]
        asked = arguments().parse_args(command[3:])
        assert asked.timeout_s == drain_s
        assert asked.address == f"127.0.0.1:{settings(documents(example))['BATON_CLUSTER__WORKER_PORT']}"


def test_a_longer_drain_lengthens_every_grace():
    sets = "config.cluster.drain_timeout_s=90"
    grace = {name: spec["terminationGracePeriodSeconds"] for name, _, spec in pods(documents("moe", sets))}
    short = {name for name, seconds in grace.items() if seconds < 95}
    assert short == {"RayCluster/baton/head", "Pod/baton-test"}


def commands(docs):
    """(where, argv) of every `baton …` that a container runs."""
    for name, _, container in containers(docs):
        argv = [*container.get("command", ()), *container.get("args", ())]
        argv = argv[argv.index("baton") :] if "baton" in argv else []
        if argv:
            yield name, argv[1:]
        for line in "\n".join(container.get("command", ())).splitlines():
            if found := re.search(r"(?:exec )?\bbaton ((?:doctor|config) .*)", line):
                yield name, shlex.split(found[1])


def parse(argv):
    """As the command line would, without running it. Raises click.UsageError for what does not exist."""
    command, rest = typer.main.get_command(app), list(argv)
    parent = None
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        parent = click.Context(command, info_name=command.name, parent=parent)
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest, parent=parent)


@examples
def test_every_command_and_flag_exists(example):
    ran = [(argv[0], parse(argv).params) for _, argv in commands(documents(example))]
    params = dict(ran)
    asked = values_of(example)
    has_store = asked["store"]["enabled"]
    assert {"router", "control", "doctor", *(["store"] if has_store else [])} == set(params)
    assert params["control"]["prefill"] == str(asked["pools"]["prefill"]["replicas"])
    assert params["control"]["ray_address"] == "auto"
    assert params["router"]["control"] == f"baton-control:{params['control']['port']}"
    environment = settings(documents(example))
    assert not has_store or params["store"]["socket"] == environment["BATON_STORE__SOCKET"]


def test_a_flag_that_does_not_exist_would_be_noticed():
    with pytest.raises(Exception, match="--prefil"):
        parse(["control", "--prefil=1"])


def ray_start_flags():
    return {o for p in ray_scripts.start.params for o in (*p.opts, *p.secondary_opts)}


@examples
def test_ray_is_started_with_flags_that_it_has(example):
    flags = ray_start_flags()
    for cluster in of_kind(documents(example), "RayCluster"):
        spec = cluster["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert {f"--{name}" for name in group["rayStartParams"]} <= flags
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    control = next(c for n, _, c in containers(documents(example)) if n.endswith("-control"))
    used = set(re.findall(r"--[a-z-]+", control["command"][2]))
    assert {"--address", "--num-cpus"} <= used <= flags


@examples
def test_rays_processes_run_as_under_baton_serve(example):
    for name, _, container in containers(documents(example)):
        if not re.search("RayCluster|-control$", name):
            continue
        environment = {v["name"]: v.get("value") for v in container["env"]}
        wanted = {k: v for k, v in RAY_ENVIRONMENT.items() if k != "RAY_AUTH_MODE"}
        assert {k: environment.get(k) for k in wanted} == wanted, name
        has_token = bool(values_of(example)["ray"]["authTokenSecret"]["name"])
        assert environment["RAY_AUTH_MODE"] == ("token" if has_token else "disabled")


def test_the_chart_names_the_ray_that_is_installed():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert values_of("moe")["ray"]["version"] == pinned[1]


@examples
def test_one_worker_fits_its_pods_and_no_second_one(example):
    """The control plane asks Ray for a GPU for each rank, or on CPUs for engine.threads cores. All ranks of a
    stage are in one pod."""
    asked = values_of(example)
    threads = asked["config"]["engine"].get("threads", 0) or 1
    for group in of_kind(documents(example), "RayCluster")[0]["spec"]["workerGroupSpecs"]:
        params = group["rayStartParams"]
        pool = asked["pools"][group["groupName"]]
        stages, remainder = divmod(pool["pipelineParallelSize"], pool["podsPerWorker"])
        assert remainder == 0
        ranks = pool["tensorParallelSize"] * pool["contextParallelSize"] * stages
        assert group.get("numOfHosts", 1) == pool["podsPerWorker"]
        assert int(params["num-cpus"]) == threads * ranks <= pool["cpu"]
        assert int(params["num-gpus"]) == ranks * (asked["accelerator"] == "cuda")


def labels_match(selector, labels):
    return all(labels.get(k) == v for k, v in selector.items())


@examples
def test_selectors_find_their_pods_and_ports(example):
    docs = documents(example)
    running = [(meta["labels"], spec) for _, meta, spec in pods(docs)]

    def ports(selector):
        found = [s for labels, s in running if labels_match(selector, labels)]
        assert found, selector
        return {
            p["name"]: p["containerPort"] for s in found for c in s["containers"] for p in c.get("ports", ())
        }

    for service in of_kind(docs, "Service"):
        named = ports(service["spec"]["selector"])
        assert all(port["targetPort"] in named for port in service["spec"]["ports"])
    for budget in of_kind(docs, "PodDisruptionBudget"):
        ports(budget["spec"]["selector"]["matchLabels"])
    for monitor in of_kind(docs, "PodMonitor"):
        named = ports(monitor["spec"]["selector"]["matchLabels"])
        assert all(e["port"] in named for e in monitor["spec"]["podMetricsEndpoints"])
    services = [
        (s["metadata"]["labels"], {p["name"] for p in s["spec"]["ports"]}) for s in of_kind(docs, "Service")
    ]
    for monitor in of_kind(docs, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        [named] = [names for labels, names in services if labels_match(wanted, labels)]
        assert all(e["port"] in named for e in monitor["spec"]["endpoints"])


def flows(policies, direction, side):
    """(component, other component, port or None) of every rule between our own pods."""
    for policy in policies:
        own = policy["spec"]["podSelector"]["matchLabels"]["baton.dev/component"]
        for rule in policy["spec"][direction] or ():  # nothing comes in: null
            for peer in rule.get(side, ()):
                other = peer.get("podSelector", {}).get("matchLabels", {}).get("baton.dev/component")
                if other:
                    for port in rule.get("ports", [{"port": None}]):
                        yield own, other, port["port"]


@examples
def test_policies_name_the_same_flows_on_both_sides(example):
    docs = documents(example)
    policies = of_kind(docs, "NetworkPolicy")
    inward = {(other, own, port) for own, other, port in flows(policies, "ingress", "from")}
    outward = set(flows(policies, "egress", "to"))
    assert inward == outward
    # Ranks of one worker and KV transfers choose their ports when they start.
    assert {("router", "worker", 7100), ("worker", "worker", None), ("test", "router", 8000)} <= inward
    assert (("store", "store", None) in inward) == values_of(example)["store"]["enabled"]
    assert not {(a, b) for a, b, _ in inward} & {
        ("router", "store"),
        ("worker", "router"),
        ("redis", "control"),
    }
    covered = {p["spec"]["podSelector"]["matchLabels"]["baton.dev/component"] for p in policies}
    assert covered == {meta["labels"]["baton.dev/component"] for _, meta, _ in pods(docs)}
    assert all(p["spec"]["policyTypes"] == ["Ingress", "Egress"] for p in policies)


@examples
def test_opened_ports_are_served(example):
    docs = documents(example)
    served = {}
    for _, meta, spec in pods(docs):
        numbers = {p["containerPort"] for c in spec["containers"] for p in c.get("ports", ())}
        served.setdefault(meta["labels"]["baton.dev/component"], set()).update(numbers)
    for policy in of_kind(docs, "NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"]["baton.dev/component"]
        opened = {p["port"] for rule in policy["spec"]["ingress"] or () for p in rule.get("ports", ())}
        assert opened <= served[own], own


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.suffix)
def test_images_run_without_rights_and_from_pinned_versions(path):
    lines = path.read_text()
    assert re.findall(r"^ARG BASE=(.+)$", lines, re.M) == ["python:3.11-slim-bookworm"]
    assert set(re.findall(r"^FROM (\S+)", lines, re.M)) == {"$BASE", "dependencies"}
    final = lines[lines.rindex("FROM") :]
    assert re.search(r"^USER 10001:10001$", final, re.M)
    assert values_of("moe")["security"] == {"user": 10001, "group": 10001}
    installs = re.findall(r"pip install (.+)$", lines, re.M)
    assert all("-c constraints.txt" in install for install in installs)


@pytest.mark.parametrize(
    ("kind", "extra"), [("light", "dependencies"), ("cpu", "worker-cpu"), ("cuda", "worker")]
)
def test_a_change_of_the_code_changes_the_last_layer_only(kind, extra):
    """Dependencies are installed before anything of the project is copied, and alone in their layer."""
    lines = (ROOT / f"deploy/docker/Dockerfile.{kind}").read_text()
    dependencies, *kernels, code, final = re.split(r"^FROM .+$", lines, flags=re.M)[1:]
    copied = re.findall(r"^COPY (.+)$", dependencies, re.M)
    assert copied == ["pyproject.toml constraints.txt ./", "deploy/docker/requirements.py deploy/docker/"]
    assert "--no-deps --target /opt/code ." in code
    copies = re.findall(r"^COPY --from=(\w+) (\S+)", final, re.M)
    compiled = [("kernels", "/kernels")] if kernels else []
    assert bool(kernels) == (kind != "light")
    assert copies == [("dependencies", "/opt/baton"), *compiled, ("code", "/opt/code")]
    asked = re.search(r"requirements\.py pyproject\.toml ?([\w-]*) >", dependencies)[1]
    assert (asked or "dependencies") == extra
    script = [sys.executable, str(ROOT / "deploy/docker/requirements.py"), str(ROOT / "pyproject.toml")]
    done = subprocess.run([*script, *([asked] if asked else [])], capture_output=True, text=True, check=True)
    names = {re.match(r"[\w-]+", line)[0] for line in done.stdout.splitlines()}
    assert {"ray", "grpcio", "transformers"} <= names
    assert ("torch" in names) == (kind != "light")
    assert ("triton" in names, "nixl-cu13" in names) == (kind == "cuda", kind == "cuda")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_kernels_are_compiled_while_the_image_is_built(kind, tmp_path):
    """The stage copies all that the compilation imports, its folder is where a start looks, and the image has
    no C++ compiler."""
    lines = (ROOT / f"deploy/docker/Dockerfile.{kind}").read_text()
    _, kernels, code, final = re.split(r"^FROM .+$", lines, flags=re.M)[1:]
    for line in re.findall(r"^COPY (.+)$", kernels, re.M):
        *sources, folder = line.split()
        for source in sources:
            place = tmp_path / folder
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    command = re.search(r"^RUN python (-m engine\.native --ahead /kernels)$", kernels, re.M)[1].split()
    isolated = [sys.executable, "-S", *command[:2], "--help"]
    done = subprocess.run(isolated, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (copied,) = re.findall(r"^COPY --from=kernels /kernels /opt/code/(\S+)$", final, re.M)
    assert ROOT / copied == AHEAD_FOLDER
    assert "g++" in kernels
    assert "g++" not in code + final


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.suffix)
def test_an_image_is_a_command_that_is_reached_from_outside(path):
    """`docker run -p 8000:8000 IMAGE serve --model M` serves."""
    final = path.read_text().rpartition("FROM")[2]
    assert 'ENTRYPOINT ["baton"]' in final
    assert "EXPOSE 8000" in final
    assert "ENV BATON_ROUTER__HOST=0.0.0.0" in final
    assert "org.opencontainers.image.version=$VERSION" in final


def test_images_hold_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'"(\w+)\*"', re.search(r"include = \[(.+)\]", text)[1])
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in packages} <= set(ignored)
    assert all("\nCOPY . .\n" in path.read_text() for path in DOCKERFILES)
    assert len(DOCKERFILES) == 3


def test_values_of_examples_are_read_by_people():
    """Each says at its head what it is for."""
    for example in EXAMPLES:
        path = Path(ROOT / f"deploy/helm/values/{example}.yaml")
        assert path.read_text().startswith("# ")
        assert yaml.safe_load(path.read_text())["model"]["path"]


def test_with_tls_everybody_who_reads_the_config_has_its_files():
    docs = documents("rdma-multi-node")
    environment = settings(docs)
    assert environment["BATON_TLS__CA"] == "/etc/baton/tls/ca.pem"
    readers = {
        name: {mount["mountPath"] for mount in container["volumeMounts"]}
        for name, _, container in containers(docs)
        if "envFrom" in container
    }
    assert len(readers) == 7, "router, control plane, three groups, store, test"
    assert [name for name, mounts in readers.items() if "/etc/baton/tls" not in mounts] == []
