"""A Ray cluster of three nodes on this machine: workers spread, a node is drained, a node is lost."""

import contextlib

import psutil
import pytest

from baton.core.operate import DrainNode
from benchmarks.faults_parts import ray_nodes
from tests.integration.cluster import Cluster, eventually
from tests.integration.operating import Operator, Streams
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture
def nodes():
    """Three nodes that have room for workers, and a head that has none."""
    with ray_nodes(3) as nodes:
        yield nodes


def worker_processes():
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith("ray::WorkerActor"):
                found.append(process)
    return found


def test_workers_spread_leave_a_drained_node_and_come_back_from_a_lost_one(nodes, tmp_path):
    _, second, third = nodes.nodes
    model = make_model(tmp_path / "tiny", "llama", seed=3)
    settings = {"engine__kv_bytes": 32 * 2**20, "engine__threads": 1, "router__migrate_after_s": 0.5}
    with Cluster(model, prefill=1, decode=2, cluster__ray_address=nodes.address, **settings) as cluster:
        operator = Operator(cluster)
        with Streams(cluster):
            state = operator.state()
            assert len({r.node for r in state.replicas}) == 3
            assert {n.node for n in state.nodes} >= {r.node for r in state.replicas}
            operator.order(DrainNode(second.node_id))
            state = operator.state()
            assert second.node_id not in {r.node for r in state.replicas}
            cluster.await_workers(prefill=1, decode=2)
        assert next(n for n in operator.state().nodes if n.node == second.node_id).is_drained
        operator.order(DrainNode(second.node_id, is_undone=True))
        nodes.lose(third.node_id)
        state = eventually("all there without it", lambda: settled_without(operator, third), timeout_s=60)
        assert len(state.replicas) == 3
        assert cluster.complete("Once upon a time", max_tokens=4)["choices"][0]["text"]
        cluster.assert_idle()
    assert worker_processes() == []


def settled_without(operator, node):
    state = operator.state()
    return state if state.is_settled and node.node_id not in {r.node for r in state.replicas} else None
