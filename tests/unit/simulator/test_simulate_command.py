"""`baton simulate` as it is called: options, rates, time in which nothing happens."""

import json

import pytest
import typer
from typer.testing import CliRunner

from baton.core.messages import Role
from commands.simulate import simulate
from simulator.fleet.fleet import Fleet
from simulator.fleet.workload import FleetRequest
from tests.unit.simulator.test_fleet import assert_at_rest, ran, spec_of


def run(tmp_path, *arguments, rows=None):
    rows = rows or [
        {"timestamp": 500 * i, "input_length": 64, "output_length": 4, "slo_class": "chat"} for i in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    app = typer.Typer()
    app.command()(simulate)
    cluster = ["--model", "llama-3-8b", "--tp", "1", "--aggregated", "1"]
    return CliRunner().invoke(app, [str(trace), *cluster, *arguments])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--rate 5 --time-scale 2", "--rate and --time-scale say the same thing"),
        ("--rate inf", "--rate inf: must be from"),
        ("--rate nan", "--rate nan: must be from"),
        ("--rate 1e300", "--rate 1e+300: must be from"),
        ("--rate 0", "--rate 0: must be from"),
        ("--time-scale 1e99", "is not a positive factor"),
        ("--search --ttft-slo none --tpot-slo none", "--search needs objectives"),
        ("--search --limit 1", "different times"),
        ("--advise", "--advise needs --autoscale RULE"),
        ("--start-up 9", "--start-up needs --autoscale"),
        ("--aggregated 999999999", "a router follows at most 4096 workers"),
        ("--hpa-target 0.5 --autoscale baton", "--hpa-target needs --autoscale hpa"),
        (
            "--class-slo nosuch=1/1",
            "--class-slo nosuch: none of the requests is of this class; they have",
        ),
        ("--json - --records -", "--json and --records both write -"),
        ("--ttft-slo 0", "write seconds above 0, or none"),
        ("--tpot-slo inf", "write seconds above 0, or none"),
        ("--set engine.tpot_slo_s=-1", "--set engine.tpot_slo_s=-1: here it is an option, --tpot-slo"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, arguments, complaint):
    done = run(tmp_path, *arguments.split())
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.stderr.replace("│", "").split())


def simulated(tmp_path, *arguments):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 64, "output_length": 4}))
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, [str(trace), "--model", "llama-3-8b", *arguments])


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ("--prefill 2xtp2 --decode 1xtp2", "2 prefill + 1 decode × llama-3-8b on 2 × h100"),
        ("--prefill 0xtp2 --decode 0 --aggregated 3xtp2pp2", "3 aggregated × llama-3-8b on 4 × h100"),
        ("--prefill 1 --decode 1", "1 prefill + 1 decode × llama-3-8b on 4 × h100"),
        ("--prefill 1xtp2 --decode 1xtp2 --tp 2", "1 prefill + 1 decode × llama-3-8b on 2 × h100"),
    ],
)
def test_workers_are_written_as_for_serve(tmp_path, arguments, target):
    out = tmp_path / "out.json"
    done = simulated(tmp_path, *arguments.split(), "--json", str(out))
    assert done.exit_code == 0, done.output
    assert target in json.loads(out.read_text())["settings"]["target"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--prefill 1xtp2 --decode 1", "write --prefill 1xtp2 --decode 1xtp2, for example"),
        ("--prefill 1 --decode 2xtp2", "write --prefill 1xtp2 --decode 2xtp2, for example"),
        ("--prefill 1xtp2 --decode 1xtp4", "simulated workers all have one shape"),
        ("--aggregated 1xcp2", "write a shape such as tp2 or tp2pp2"),
        ("--aggregated 1xtp2 --tp 4", "--aggregated 1xtp2 and --tp or --pp differ"),
        ("--prefill two --decode 1", '--prefill two: shape "two" is not understood'),
        ("--aggregated -1", "--aggregated -1: -1 is below 0"),
        ("--aggregated 1xtp3", "do not divide by 3; possible are tp1, tp2, tp4"),
    ],
)
def test_workers_that_cannot_be_simulated_are_refused_with_what_to_write(tmp_path, arguments, complaint):
    done = simulated(tmp_path, *arguments.split())
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.stderr.split())


def figures(tmp_path, *arguments):
    out = tmp_path / "out.json"
    done = run(tmp_path, *arguments, "--json", str(out))
    assert done.exit_code == 0, done.output
    return json.loads(out.read_bytes()), done.stdout


def test_the_time_scale_of_a_rate_is_told_and_met(tmp_path):
    report, said = figures(tmp_path, "--rate", "8")
    assert report["settings"]["time_scale"] == "1/4"
    assert report["offered_per_s"] == pytest.approx(8)
    assert "time scale 1/4," in said
    report, _ = figures(tmp_path, "--rate", "8", "--copies", "2")
    assert report["settings"]["time_scale"] == "1/2"
    assert report["offered_per_s"] == pytest.approx(8, rel=0.1)


def test_no_target_is_none(tmp_path):
    report, said = figures(tmp_path, "--ttft-slo", "none", "--tpot-slo", "none")
    assert report["settings"]["slo"] == {"ttft_s": None, "tpot_s": None}
    assert "no targets" in said


def test_a_class_without_targets_of_its_own_has_the_default_ones(tmp_path):
    report, _ = figures(tmp_path, "--ttft-slo", "0.000001", "--search", "--class-slo", "chat=5/1")
    assert report["goodput_share"] >= 0.9
    done = run(tmp_path, "--ttft-slo", "0.000001", "--search")
    assert "no rate attains the goal" in done.stderr


def test_the_rate_that_a_search_found_has_its_time_scale(tmp_path):
    report, _ = figures(tmp_path, "--ttft-slo", "0.1", "--tpot-slo", "0.05", "--search")
    scale = float(report["settings"]["time_scale"])
    assert report["offered_per_s"] == pytest.approx(2 / scale, rel=0.01)


def idle_fleet(gap_s: float) -> Fleet:
    requests = [FleetRequest(i, i * gap_s, 600, 30, ()) for i in range(5)]
    return ran(spec_of((Role.PREFILL, 1), (Role.DECODE, 1)), requests)


def test_years_in_which_nothing_happens_cost_nothing():
    day, years = idle_fleet(86_400.0), idle_fleet(3e7)
    assert years.clock.event_count == day.clock.event_count < 5_000
    assert_at_rest(years)
    latencies = [(r.ttft_s, r.e2e_s) for r in years.stats]
    for other in (day, idle_fleet(20.0)):  # twenty seconds are simulated
        for mine, theirs in zip(latencies, [(r.ttft_s, r.e2e_s) for r in other.stats], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
