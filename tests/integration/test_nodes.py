"""A Ray cluster of three nodes on this machine: workers spread, a node is drained, a node is lost."""

import contextlib
import os

import psutil
import pytest

from baton.core.operate import DrainNode
from control_plane.ray_home import OBJECT_STORE_BYTES, ray_environment
from tests.integration.cluster import Cluster, eventually
from tests.integration.operating import Operator, Streams
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture
def nodes():
    """Three that have room for workers, beside a head that has none."""
    before = dict(os.environ)
    os.environ.update(ray_environment(is_local=False))
    from ray.cluster_utils import Cluster as RayCluster

    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    ray = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        yield ray, [ray.add_node(num_cpus=4, **common) for _ in range(3)]
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def worker_processes():
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith("ray::WorkerActor"):
                found.append(process)
    return found


def test_workers_spread_leave_a_drained_node_and_come_back_from_a_lost_one(nodes, tmp_path):
    ray, (_, second, third) = nodes
    model = make_model(tmp_path / "tiny", "llama", seed=3)
    settings = {"engine__kv_bytes": 32 * 2**20, "engine__threads": 1, "router__migrate_after_s": 0.5}
    with Cluster(model, prefill=1, decode=2, cluster__ray_address=ray.address, **settings) as cluster:
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
        ray.remove_node(third, allow_graceful=False)
        state = eventually("all there without it", lambda: settled_without(operator, third), timeout_s=60)
        assert len(state.replicas) == 3
        assert cluster.complete("Once upon a time", max_tokens=4)["choices"][0]["text"]
        cluster.assert_idle()
    assert worker_processes() == []


def settled_without(operator, node):
    state = operator.state()
    return state if state.is_settled and node.node_id not in {r.node for r in state.replicas} else None
