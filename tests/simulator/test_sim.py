"""The production decisions under virtual time: what must always hold holds, whatever the seed does."""

import os
import subprocess
import sys

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from simulator.faults.cli import sim
from simulator.faults.run_context import RunContext
from simulator.faults.runner import RunReport, run_seed, run_seeds, summarise
from simulator.faults.scenario_drawing import draw_scenario
from tests.simulator.mutants import ALL_MUTANTS

SEEDS = 60

pytestmark = pytest.mark.timeout(300)
"""Sixty seeds take 90 s of a slow core, and more beside other tests."""

OFTEN = (
    "note: placed",
    "note: retried",
    "note: fallback",
    "note: joined",
    "resumes",
    "prompts with cache hits",
    "leases released",
    "leases expired",
    "reads failed",
    "reads unsettled",
    "messages repeated",
    "workers lost by silence",
    "left while decoding",
    "ended: finished",
    "ended: broken",
    "reads between unlike shapes",
    "workers ended with a rank",
)
"""Counts that so few seeds must show; `runner.MUST_HAPPEN` is for longer runs."""


@pytest.fixture(scope="module")
def report() -> RunReport:
    return summarise(run_seeds(SEEDS))


def app() -> typer.Typer:
    found = typer.Typer()
    found.command()(sim)
    return found


def test_every_seed_holds(report):
    assert [(f.seed, f.invariant, f.message) for f in report.failures] == []


def test_what_is_tested_really_happened(report):
    assert [name for name in OFTEN if not report.counts.get(name)] == []


def test_stale_reads_are_refused():
    """Look for seeds in which reads outlive leases, which are too rare for any sixty seeds."""
    storms = (
        seed
        for seed in range(600)
        if draw_scenario(RunContext(seed).stream("scenario")).read_fault_chance > 0
    )
    assert any(run_seed(seed).counts.get("stale reads refused") for seed in storms)


def test_a_late_copy_of_a_request_may_be_held_for_its_lease():
    """In this seed a second copy of a request for KV reaches an owner that never heard of the sequence when
    everything else has been at rest for seconds."""
    report = run_seed(101431)
    assert report.counts["messages repeated"]
    assert report.is_ok, report.message


def test_same_seed_same_events():
    first, second = run_seed(3), run_seed(3)
    assert first.digest == second.digest
    assert first.counts == second.counts
    assert run_seed(4).digest != first.digest


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_same_seed_same_events_in_another_process(hash_seed):
    """Two processes agree on a digest although their string hashes differ."""
    program = "from simulator.faults.runner import run_seed; print([run_seed(s).digest for s in (3, 7, 8)])"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()}
    output = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert output.strip() == str([run_seed(s).digest for s in (3, 7, 8)])


def test_command_says_what_happened():
    result = CliRunner().invoke(app(), ["--seeds", "4", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "4 seeds" in result.output
    assert "ended: finished" in result.output


def test_command_reports_as_json():
    result = CliRunner().invoke(app(), ["--seed", "5", "--json"])
    report = msgspec.json.decode(result.stdout, type=RunReport)
    assert report.is_ok
    assert report.seed_count == 1
    assert report.counts["steps"] > 0


def test_command_tells_the_record_of_a_failure(monkeypatch):
    mutant = next(m for m in ALL_MUTANTS if m.name == "the router ignores indices")
    mutant.apply(monkeypatch)
    seed = next(s for s in range(20) if not run_seed(s).is_ok)
    result = CliRunner().invoke(app(), ["--seed", str(seed)])
    assert result.exit_code == 1
    assert "invariant 2" in result.output
    assert f"baton sim --seed {seed}" in result.output
    assert "Deliver" in result.output  # the request's history
