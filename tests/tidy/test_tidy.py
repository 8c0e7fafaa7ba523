"""Style that a machine can check: sizes, metric names, words that do not belong in the repository."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from baton.telemetry.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500
TRACKED_BYTES_MAX = 1_000_000
GENERATED = "baton/wire/proto/"


def tracked(*patterns):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\n") if name and (ROOT / name).is_file()]


PYTHON = [p for p in tracked("*.py") if not str(p.relative_to(ROOT)).startswith(GENERATED)]


def long_things(path):
    source = path.read_text()
    if (count := source.count("\n")) > FILE_LINES_MAX:
        yield f"{path.relative_to(ROOT)}: {count} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines"


def test_files_and_functions_are_small():
    assert [thing for path in PYTHON for thing in long_things(path)] == []


def test_every_signature_outside_the_tests_is_annotated():
    def bare(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"

    code = [p for p in PYTHON if "tests" not in p.relative_to(ROOT).parts]
    assert [thing for path in code for thing in bare(path)] == []


UNIT_SUFFIX = {unit: (f"_{unit}", f"_{unit}_total") for unit in {m.unit for m in CATALOGUE}}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_metric_names_say_their_unit(metric):
    assert re.fullmatch(r"(?:baton|gen_ai)_[a-z0-9_]+", metric.name)  # gen_ai: OpenTelemetry's names
    assert metric.help.endswith(".")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    # Prometheus counts things by what they are: restarts_total, not restarts_events_total.
    if not (metric.kind == "counter" and metric.unit in ("requests", "sequences", "events")):
        assert metric.name.endswith(UNIT_SUFFIX[metric.unit])


def test_no_large_file_is_tracked():
    assert [p.name for p in tracked() if p.stat().st_size > TRACKED_BYTES_MAX] == []


SLEEPERS = {
    "benchmarks/chaos/client.py",  # a client waits before it asks again
    "benchmarks/chaos/cluster.py",  # a lost host is away for a while
    "benchmarks/chaos/drill.py",  # requests have their instants; processes are asked until idle
    "benchmarks/chaos/inject.py",  # faults have their instants and last for a while
    "benchmarks/chaos/processes.py",  # backoff before a restart; a log is read until a process is ready
    "benchmarks/chaos/watch.py",  # a cluster of processes is looked at at intervals
    "benchmarks/faults.py",  # faults come when they are due
    "benchmarks/goodput_servers.py",  # another program's server can only be asked until it answers
    "benchmarks/peers.py",  # another program's server can only be asked until it answers
    "benchmarks/reuse.py",  # Baton's processes are watched from outside, as an operator does
    "benchmarks/router.py",  # another program's server can only be asked until it answers
    "benchmarks/router_free.py",  # a worker's steps take their time
    "benchmarks/router_load.py",  # requests are sent when they are due
    "engine/experts/copies.py",  # a copy takes no more of a link than its share
    "worker/stage_actor.py",  # processes of ranks are looked at until they end
    "tests/integration/ray_hosts.py",  # a cluster of processes is looked at at intervals
    "commands/doctor_experts.py",  # ranks report what they computed at intervals
    "commands/experts.py",  # rows are counted over a while
    "commands/orders.py",  # a pause before asking again
    "engine/kv/pairs.py",  # torch.distributed can only be asked whether it is done
    "kv_store/process/local.py",  # backoff when out of descriptors
    "kv_store/process/store_node.py",  # a pause before dialling again
    "worker/expert_rank.py",  # signs of life have a period; a pause before dialling again
    "worker/expert_watch.py",  # counts on the device are looked at at intervals
    "worker/leave.py",  # another process can only be asked until it is empty
    "worker/registration.py",  # a heartbeat has a period
    "worker/store_link.py",  # backoff before dialling again
    "control_plane/orphans.py",  # a child's end is looked at at intervals
    "control_plane/control.py",  # Ray's list of nodes can only be looked at
    "control_plane/dashboard/collector.py",  # processes' metrics are looked at at intervals
    "control_plane/child.py",  # backoff before a restart
    "control_plane/ray_cluster.py",  # a Ray that is starting can only be dialled until it answers
    "control_plane/workers.py",  # a pause before telling a worker again
    "control_plane/router_child.py",  # another process can only be asked until it says so
    "simulator/faults/budget_place.py",  # a message takes virtual time
    "simulator/faults/router_links.py",  # a connection takes virtual time to open
    "tests/faulty_backend.py",  # delay is what it is for
    "tests/pods/life.py",  # probes have periods
    "tests/pods/drill.py",  # asks a dashboard until it has started
    "kv_transfer/backends/tcp_server.py",  # backoff when out of descriptors
    "router/http/tls.py",  # certificates are looked at at intervals
    "router/live/peers/follower.py",  # backoff before dialling again
    "router/live/peers/publisher.py",  # what changed is told at intervals
    "router/tenants/key_files.py",  # a file's lock with a deadline can only be asked for again
    "router/tenants/keyring.py",  # keys are looked at at intervals
    "router/live/sessions.py",  # backoff before dialling again
    "engine/parallel/torch_group.py",  # a device and other ranks can only be looked at
    "benchmarks/parallel/links.py",  # a follower falls asleep between two plans
    "router/live/demand_reporter.py",  # demand is told at intervals
    "tests/integration/test_expert_dashboard.py",  # a control plane speaks at intervals
    "tests/integration/test_worker_process.py",  # asks another process until it is idle
    "docs/examples/batches_api.py",  # a batch of the API can only be asked how far it is
    "tests/unit/router/test_batches.py",  # the same
    "tests/unit/wire/test_core_driver.py",  # its event loop has virtual time
}
"""Files where waiting for a while is the behaviour itself."""


def test_no_sleep_synchronises_a_test_and_no_loop_polls():
    calls = r"\b(?:time|asyncio)\.sleep\((?!0\))"  # sleep(0) only lets others run
    pattern = re.compile(calls + r"|\bfrom (?:time|asyncio) import .*\bsleep\b")
    found = {str(p.relative_to(ROOT)) for p in PYTHON if pattern.search(p.read_text())}
    assert found - {"tests/tidy/test_tidy.py"} - SLEEPERS == set()
