"""Orders to a running cluster: roles, drains and versions change under streams, which do not notice."""

import contextlib
import time

import psutil
import pytest

from baton.core.messages import Role
from baton.core.operate import DrainWorker, RollOut, Scale, SwitchRole, Version
from baton.wire.link import LinkBroken
from tests.integration.cluster import Cluster, eventually
from tests.integration.operating import Operator, Streams
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SWITCH_S = 2.0
"""Seconds from an order to an idle worker until it serves in the new role."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe", seed=3)
    settings = {"engine__kv_bytes": 32 * 2**20, "engine__threads": 1, "router__migrate_after_s": 0.5}
    with Cluster(model, prefill=2, decode=1, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def operator(cluster):
    return Operator(cluster)


def test_nothing_runs_that_nobody_asks_and_the_router_has_no_torch(cluster):
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    commands = {p.pid: " ".join(p.cmdline()) for p in family}
    assert {"raylet", "gcs_server"} <= {p.name() for p in family}
    helpers = ("monitor.py", "log_monitor.py", "dashboard/dashboard.py")  # processes of Ray
    assert [c for c in commands.values() if any(f"/{name} " in f"{c} " for name in helpers)] == []
    (router,) = (p for p in family if " baton router " in commands[p.pid])
    assert not [m.path for m in router.memory_maps() if "torch" in m.path]


def test_a_running_worker_switches_within_two_seconds_and_keeps_process_and_weights(cluster, operator):
    before = {w.worker_id: w for w in cluster.workers()}
    name = next(w for w in before if w.startswith("prefill-1"))
    with Streams(cluster):
        began_s = time.monotonic()
        ended = operator.order(SwitchRole(name, Role.DECODE))
        elapsed_s = time.monotonic() - began_s
    print(f"flip under load: {ended.done_after_s:.3f} s, seen from outside {elapsed_s:.3f} s")
    eventually(
        "two decode workers", lambda: [w.role for w in cluster.workers()].count("decode") == 2, timeout_s=10
    )
    after = {w.worker_id: w for w in cluster.workers()}
    assert after.keys() == before.keys()
    assert after[name].pid == before[name].pid
    assert after[name].accounts["weight_loads"] == 1
    counted = {worker_id: w.accounts["experts.routed_tokens"] for worker_id, w in before.items()}

    def go_on():
        """Counts of experts describe the weights, whatever the role; they are at most a second old."""
        now = {w.worker_id: w.accounts["experts.routed_tokens"] for w in cluster.workers()}
        assert all(now[worker_id] >= count for worker_id, count in counted.items())
        return sum(now.values()) > sum(counted.values())

    eventually("tokens of the streams are counted", go_on, timeout_s=10)
    ended = operator.order(SwitchRole(name, Role.PREFILL))
    print(f"flip of an idle worker: {ended.done_after_s:.3f} s")
    assert ended.done_after_s < SWITCH_S, "an idle worker has nothing to drain"
    assert "stayed loaded" in ended.text
    cluster.await_workers(prefill=2, decode=1)
    cluster.assert_idle()


def test_a_drained_worker_leaves_no_stream_behind_and_is_replaced(cluster, operator):
    (old,) = (w for w in cluster.workers() if w.worker_id.startswith("prefill-0"))
    with Streams(cluster):
        operator.order(DrainWorker("prefill-0"))
        cluster.await_workers(prefill=2, decode=1)
    assert old.pid not in {w.pid for w in cluster.workers()}
    cluster.assert_idle()


def test_versions_are_exchanged_under_streams_and_none_is_lost(cluster, operator):
    before = {w.pid for w in cluster.workers()}
    with Streams(cluster):
        operator.order(RollOut(Version("2", ("engine.waiting_sequences_max=128",))), timeout_s=300)
    state = operator.state()
    assert {r.version for r in state.replicas} == {"2"}
    cluster.await_workers(prefill=2, decode=1)
    assert before.isdisjoint(w.pid for w in cluster.workers())
    cluster.assert_idle()


def test_what_is_wanted_more_of_is_started_and_what_less_of_is_drained(cluster, operator):
    operator.order(Scale(Role.DECODE, 2))
    cluster.await_workers(prefill=2, decode=2)
    with Streams(cluster):
        operator.order(Scale(Role.DECODE, 1))
    cluster.await_workers(prefill=2, decode=1)
    cluster.assert_idle()


def control_of(cluster):
    found = []
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--only" in process.cmdline() and "control" in process.cmdline():
                found.append(process)
    return found[0] if found else None


def test_the_control_plane_is_killed_and_streams_and_workers_do_not_notice(cluster, operator):
    before = {w.worker_id: w.pid for w in cluster.workers()}
    decisions = operator.state().decisions
    old = control_of(cluster)
    with Streams(cluster):
        old.kill()
        eventually("another one", lambda: (new := control_of(cluster)) and new.pid != old.pid, timeout_s=60)
        state = eventually("settled", lambda: settled(operator), timeout_s=60)
    assert {r.worker_id for r in state.replicas} == before.keys()
    assert {w.worker_id: w.pid for w in cluster.workers()} == before
    assert [d.number for d in state.decisions] == [d.number for d in decisions]
    # It manages the workers that it adopted: their roles, and their deaths.
    name = next(w for w in before if w.startswith("prefill"))
    operator.order(SwitchRole(name, Role.DECODE))
    operator.order(SwitchRole(name, Role.PREFILL))
    psutil.Process(before[name]).kill()
    eventually("replaced", lambda: before[name] not in {w.pid for w in cluster.workers()}, timeout_s=10)
    cluster.await_workers(prefill=2, decode=1)
    cluster.assert_idle()


def settled(operator):
    with contextlib.suppress(LinkBroken):
        state = operator.state()
        return state if state.is_settled and len(state.replicas) == 3 else None
