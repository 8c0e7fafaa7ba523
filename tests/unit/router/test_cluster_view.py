"""What a router believes about a worker between two reports."""

import pytest

from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import LoadReport, Phase, Role, WorkerHello
from router.decisions.cluster.load_account import SEQUENCE_TOKENS
from router.decisions.cluster.view import ClusterView

W, S = WorkerId("w"), SequenceId("s")


@pytest.fixture
def cluster():
    view = ClusterView(silence_s=2.0)
    view.join(WorkerHello(W, Role.DECODE, "f", "m", 16, 100, 1000), "host:1")
    return view


def report(free: int, running: int = 0) -> LoadReport:
    return LoadReport(Role.DECODE, False, free, running, 0, 0, 0.01)


def test_a_reservation_counts_on_top_of_reports_until_the_second_one(cluster):
    cluster.reserve(W, S, phase=Phase.DECODE, tokens=0, blocks=7)
    seen = [cluster[W].load.free_blocks]
    for _ in range(2):
        cluster[W].on_report(report(free=100), now_s=1.0)
        seen.append(cluster[W].load.free_blocks)
    assert seen == [93, 93, 100]
    cluster.check()


def test_what_other_routers_sent_counts_too(cluster):
    cluster[W].on_report(report(free=50, running=9), now_s=1.0)
    cluster.reserve(W, S, phase=Phase.AGGREGATED, tokens=300, blocks=7)
    assert cluster[W].load.load_tokens == 300 + 10 * SEQUENCE_TOKENS


@pytest.mark.parametrize("reports", [0, 1, 2, 3])
def test_everything_comes_back_whenever_a_sequence_ends(cluster, reports):
    cluster.reserve(W, S, phase=Phase.AGGREGATED, tokens=300, blocks=7)
    for _ in range(reports):
        cluster[W].on_report(report(free=100), now_s=1.0)
    cluster[W].begin(S)
    cluster[W].begin(S)
    assert cluster.release_except(S, ()) is True
    assert cluster.release_except(S, ()) is False
    assert (cluster[W].load.load_tokens, cluster[W].load.free_blocks) == (0, 100)
    cluster.check()


def test_a_worker_is_stale_before_its_first_report_and_after_silence(cluster):
    worker = cluster[W]
    assert cluster.is_stale(worker, 0.0)
    worker.on_report(report(free=1), now_s=1.0)
    assert not cluster.is_stale(worker, 3.0)
    assert cluster.is_stale(worker, 3.1)


def test_a_snapshot_does_not_change_when_the_cluster_does(cluster):
    cluster[W].on_report(report(free=50), now_s=1.0)
    before = cluster.snapshot(1.0)
    kept = repr(before)
    cluster.reserve(W, S, phase=Phase.DECODE, tokens=0, blocks=7)
    cluster[W].update(Role.AGGREGATED, is_draining=True)
    cluster.join(WorkerHello(WorkerId("x"), Role.DECODE, "f", "m", 16, 100, 1000), "host:2")
    after = cluster.snapshot(2.0)
    assert repr(before) == kept
    assert [w.worker_id for w in after.pools.usable] == ["x"]
    assert after.workers[W].load.free_blocks == 43
    cluster.check()


def test_a_snapshot_takes_over_what_did_not_change(cluster):
    cluster.join(WorkerHello(WorkerId("x"), Role.DECODE, "f", "m", 16, 100, 1000), "host:2")
    before = cluster.snapshot(1.0)
    assert cluster.snapshot(1.0) is before
    cluster.reserve(W, S, phase=Phase.DECODE, tokens=0, blocks=7)
    after = cluster.snapshot(1.0)
    assert after.workers["x"] is before.workers["x"]
    assert after.workers[W] is not before.workers[W]
    assert after.workers[W].facts is before.workers[W].facts
