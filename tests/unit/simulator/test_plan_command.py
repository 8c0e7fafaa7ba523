import json
import sys

import pytest
import yaml

from baton.__main__ import main
from baton.core.messages import Role
from simulator.hardware import Node, find_gpu
from simulator.models import MODELS
from simulator.plan.clusters import ClusterPlan, PlannedPool, ReplicaShape
from simulator.plan.values import helm_values


def trace(path, count=120, rate=4.0):
    rows = [
        {"timestamp": int(1000 * i / rate), "input_length": 600 + 37 * (i % 11), "output_length": 40 + i % 50,
         "hash_ids": [0, i + 1] if 600 + 37 * (i % 11) <= 1024 else [0, i + 1, i + 500]}
        for i in range(count)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(capsys, monkeypatch):
    def command(*args):
        monkeypatch.setattr(sys, "argv", ["baton", "plan", *map(str, args)])
        try:
            main()
        except SystemExit as ended:
            return ended.code or 0, capsys.readouterr()
        return 0, capsys.readouterr()

    return command


OBJECTIVES = ("--ttft-slo", 1, "--tpot-slo", 0.05)


def test_the_cheapest_cluster_is_printed_and_written_as_values(tmp_path, run):
    values = tmp_path / "values.yaml"
    status, said = run(
        trace(tmp_path / "t.jsonl"), "--model", "llama-3-8b", "--gpu", "a100=2", "--gpu", "l40s=1",
        *OBJECTIVES, "--tensor", 1, "--rate", 6, "--json", "--values", values,
    )  # fmt: skip
    assert status == 0, said.err
    told = json.loads(said.out)
    best = told["cheapest"]
    assert best["price_per_hour"] <= told["runner_up"]["price_per_hour"]
    assert best["price_per_hour"] == min(t["price_per_hour"] for t in told["tried"] if t["passed"])
    assert told["is_complete"]
    assert told["rate_simulated_per_s"] == 6 * 1.2
    written = yaml.safe_load(values.read_text())["pools"]
    assert {r: p["replicas"] for r, p in written.items() if p["replicas"]} == {
        r: p["replicas"] for r, p in best["pools"].items()
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "h900=1"), "no data sheet"),
        (("--gpu", "h100"), "price per hour"),
        (("--gpu", "h100=3", "--tensor", "two"), "list of widths"),
        (("--gpu", "l4=1", "--tensor", "1"), "fits in none"),
        (("--gpu", "h100=nan"), "a number above 0"),
        (("--gpu", "h100=inf"), "a number above 0"),
        (("--gpu", "h100=-2"), "a number above 0"),
        (("--gpu", "h100=0"), "what an hour of one costs you"),
        (("--gpu", "h100=1", "--gpu", "H100=2"), "offered at 1 already"),
        (("--gpu", "h100=3", "--rate", "inf"), "--rate inf: give a finite number"),
        (("--gpu", "h100=3", "--rate", "nan"), "'--rate': Input should be greater than or equal to"),
        (("--gpu", "h100=3", "--headroom", "inf"), "--headroom inf: give a finite number"),
        (("--gpu", "h100=3", "--headroom", "nan"), "'--headroom': Input should be greater than or equal to"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(tmp_path, run, args, words):
    path = trace(tmp_path / "t.jsonl")
    status, said = run(path, "--model", "llama-3-70b", *OBJECTIVES, *args)
    assert status == 2
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("where", [".", "not/there.yaml", "/proc/values.yaml"])
def test_values_that_cannot_be_written_are_told_before_anything_is_read(tmp_path, run, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    status, said = run(
        tmp_path / "missing.jsonl", "--model", "llama-3-8b", "--gpu", "a100=2", *OBJECTIVES, "--values", where
    )
    assert status == 2
    assert f"cannot write {where}" in said.err


def test_a_run_that_was_given_up_is_marked_and_its_share_is_a_bound(tmp_path, run):
    args = (
        trace(tmp_path / "t.jsonl"), "--model", "llama-3-8b", "--gpu", "l40s=1", *OBJECTIVES, "--tensor", 1,
        "--rate", 40, "--json",
    )  # fmt: skip
    _, said = run(*args)
    tried = json.loads(said.out)["tried"]
    given_up = [one for one in tried if one["aborted"]]
    assert given_up
    assert all(one["met"] is None and one["met_at_most"] < 0.9 and not one["passed"] for one in given_up)
    assert all(one["met"] == one["met_at_most"] for one in tried if not one["aborted"])
    assert f"<= {given_up[0]['met_at_most']:.1%}" in said.err


def test_a_search_that_ran_out_of_simulations_says_so(tmp_path, run):
    """At a rate that the first cluster serves: what is not found at all is another message."""
    status, said = run(
        trace(tmp_path / "t.jsonl"), "--model", "llama-3-8b", "--gpu", "l40s=1", *OBJECTIVES, "--tensor", 1,
        "--rate", 30, "--simulations", 1,
    )  # fmt: skip
    assert status == 0
    assert "not complete" in said.out
    assert "Raise --simulations" in said.out


def test_a_trace_of_one_instant_has_no_rate_to_plan_for(tmp_path, run):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}')
    status, said = run(path, "--model", "llama-3-8b", "--gpu", "a100=2", *OBJECTIVES, "--rate", 4)
    assert status == 2
    assert "one instant" in said.err


def test_objectives_that_nothing_meets_end_with_status_1(tmp_path, run):
    status, said = run(
        trace(tmp_path / "t.jsonl"), "--model", "llama-3-8b", "--gpu", "a100=2",
        "--ttft-slo", 0.001, "--tpot-slo", 0.001,
    )  # fmt: skip
    assert status == 1
    assert "Nothing that was tried" in said.out
    assert "with nobody beside them" in said.out


def test_values_are_yaml_whatever_the_names_are():
    shape = ReplicaShape(Node(MODELS["llama-3-8b"], find_gpu("h100")), 3.0)
    text = helm_values(
        ClusterPlan(aggregated=PlannedPool(shape, 2)),
        model='odd: "name" # yes',
        slo={"ttft_s": 1.0},
        comments=("reason",),
    )
    read = yaml.safe_load(text)
    assert read["model"]["path"] == 'odd: "name" # yes'
    assert read["pools"][Role.AGGREGATED.value]["replicas"] == 2
    assert text.startswith("# reason\n")


def test_values_have_the_width_of_each_pool():
    llama = MODELS["llama-3-8b"]
    pools = [PlannedPool(ReplicaShape(Node(llama, find_gpu("h100"), width), 3.0), 2) for width in (4, 2)]
    text = helm_values(ClusterPlan(*pools), model="m", slo={"ttft_s": 1.0})
    read = yaml.safe_load(text)["pools"]
    assert [read[role.value]["tensorParallelSize"] for role in (Role.PREFILL, Role.DECODE)] == [4, 2]
    assert read[Role.AGGREGATED.value] == {"replicas": 0}
    assert {read[role.value]["podsPerWorker"] for role in (Role.PREFILL, Role.DECODE)} == {1}
