"""What operators see of expert ranks in a real cluster, and the orders that they give: the command line, the
doctor and the metrics."""

import re
import subprocess
import sys

import httpx
import msgspec
import psutil
import pytest

from baton.core.experts import ExpertGroupState, ExpertRankPhase
from control_plane.expert_summary import is_whole
from tests.integration.cluster import ROOT, Cluster, eventually
from tests.integration.operating import Operator
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STRENGTH_S = 120.0
"""A machine of two cores takes some ten seconds to start a rank's process."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("m") / "moe", "qwen3_moe", seed=3, num_experts=16)
    settings = {
        "engine__kv_bytes": 32 * 2**20,
        "engine__threads": 1,
        "experts__parallel": "ranks",
        "experts__ranks": 2,
        "experts__replicas": 2,
        "store__host_bytes": 0,
    }
    with Cluster(model, prefill=0, decode=0, both=1, **settings) as cluster:
        until_whole(Operator(cluster))
        yield cluster


@pytest.fixture
def operator(cluster):
    operator = Operator(cluster)
    until_whole(operator)
    return operator


def until_whole(operator):
    def holds():
        (group,) = operator.state().experts or (None,)
        return group if group is not None and is_whole(group) and not group.single else None

    return eventually("all ranks and replicas", holds, timeout_s=STRENGTH_S)


def baton(operator, *words):
    """Run a command; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "baton", *words, "--control", operator.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def metrics(address):
    """Return the values of a process's series of expert ranks, by their text."""
    text = httpx.get(f"http://{address}/metrics", timeout=10).text
    pairs = [line.rpartition(" ") for line in text.splitlines() if line.startswith("baton_expert_")]
    return {head: float(value) for head, _, value in pairs}


def address_in_log(cluster, pattern):
    return re.search(pattern, "\n".join(cluster.log))[1]


def total(found, name):
    return sum(value for head, value in found.items() if head.partition("{")[0] == name)


def test_the_doctor_proves_that_rows_travel(cluster, operator):
    status, said = baton(operator, "doctor", "--url", cluster.url)
    assert status == 0, said
    for words in (
        "every expert has at least 2 replicas",
        "2 of 2 expert ranks ready",
        "1 caller follows the map of epoch",
    ):
        assert f"experts, aggregated of {cluster.model}: {words}" in said
    assert re.search(r"rows travel, [\d,]+ were computed for a request", said)


def test_rows_that_are_sent_are_rows_that_are_computed(cluster, operator):
    worker = address_in_log(cluster, r"worker aggregated-0\S* joined at \S+ metrics at http://(\S+)/metrics")
    control = address_in_log(cluster, r"control plane at \S+, metrics at http://(\S+)/metrics")
    cluster.complete("Once upon a time there was a king. " * 8, max_tokens=12)
    sent = metrics(worker)
    pairs = total(sent, "baton_expert_dispatched_pairs_total")
    assert 0 < total(sent, "baton_expert_dispatched_rows_total") <= pairs
    assert total(sent, "baton_expert_dispatched_bytes_total") > 0
    assert total(sent, "baton_expert_wait_seconds_count") > 0

    def all_reported():
        return total(metrics(control), "baton_expert_rank_rows_total") >= pairs

    eventually("ranks have reported their rows", all_reported, timeout_s=10)
    seen = metrics(control)
    assert total(seen, "baton_expert_wanted_ranks") == 2
    assert total(seen, "baton_expert_missing_experts") == total(seen, "baton_expert_single_experts") == 0
    assert seen[f'baton_expert_ranks{{group="aggregated of {cluster.model}",phase="ready"}}'] == 2


def test_the_command_line_shows_drains_and_rebalances(cluster, operator):
    status, said = baton(operator, "experts", "show", "--json")
    (group,) = msgspec.json.decode(said, type=tuple[ExpertGroupState, ...])
    assert status == 0
    assert is_whole(group)
    status, said = baton(operator, "experts", "show")
    assert status == 0
    for rank in group.ranks:
        assert rank.rank_id in said
    status, said = baton(operator, "experts", "rebalance", "--reason", "a test", "--wait", "60")
    assert (status, "done after" in said) == (0, True), said
    drained = group.ranks[0]
    status, said = baton(operator, "experts", "drain", drained.name, "--wait", str(STRENGTH_S))
    assert status == 0, said
    assert "all ranks are ready" in said
    (group,) = operator.state().experts
    assert [rank.name for rank in group.ranks if rank.phase is ExpertRankPhase.READY].count(drained.name) <= 1
    assert drained.rank_id not in [rank.rank_id for rank in group.ranks]
    last = operator.state().decisions[-1]
    assert (last.who.startswith("operator "), last.outcome) == (True, "done")
    status, said = baton(operator, "experts", "drain", "walrus")
    assert status == 2
    assert "no expert rank 'walrus' here: choose one of" in said


def test_a_loss_is_counted_and_seen(cluster, operator):
    control = address_in_log(cluster, r"control plane at \S+, metrics at http://(\S+)/metrics")
    before = total(metrics(control), "baton_expert_rank_losses_total")
    rank_processes(cluster)[0].kill()

    def counted():
        return total(metrics(control), "baton_expert_rank_losses_total") == before + 1

    eventually("the loss is counted", counted, timeout_s=10)
    until_whole(operator)
    status, said = baton(operator, "experts", "show")
    assert status == 0
    assert f"{before + 1:.0f} rank" in said
    status, said = baton(operator, "doctor", "--url", cluster.url)
    assert status == 0, said


def rank_processes(cluster):
    """The processes of this cluster's expert ranks."""
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    return [p for p in family if "ExpertRankActor" in " ".join(p.cmdline())]
