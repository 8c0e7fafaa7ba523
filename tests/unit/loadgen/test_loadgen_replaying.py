"""Runs and searches of `baton replay` against a server of virtual time."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from loadgen import replaying
from loadgen.cli import replay
from loadgen.client import parse_url
from loadgen.compare import compare
from loadgen.early_stop import GoalWatch
from loadgen.first_answers import ALIKE, FirstAnswers
from loadgen.health import ClientHealth
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.senders import Sent
from loadgen.slo import ClassObjectives, Slo
from loadgen.target import ReplayTarget

HEALTH = ClientHealth(1, 0.0, 0.0, 0.0, 0.1, 0.1)
SERVICE_S = 0.05


@dataclass
class Queue:
    """One server with `SERVICE_S` per request, in place of the sender processes."""

    stops_at_job: int = 10**9
    late_jobs: tuple = ()
    """Jobs with load, counted from 1, in which the load generator did not keep up, and nothing met its
    objectives."""
    jobs: list = field(default_factory=list)
    complaint: str = ""
    """The text of every answer, if it is not empty."""
    answers: dict = field(default_factory=dict)
    """Digests by place in the plan, if they are not the usual ones."""

    def __call__(self, job, observer, *, clients=1):
        self.jobs.append(job)
        free_s = 0.0
        records, was_stopped = [], False
        is_late = len(job.plan.requests) > 1 and len(self.load_jobs) in self.late_jobs
        for request in job.plan.requests:
            planned_s = 1000 + request.at_s
            free_s = max(free_s, planned_s) + SERVICE_S + (9.0 if is_late else 0.0)
            record = RequestRecord(request.index, planned_s, sent_s=planned_s)
            observer.on_sent(record)
            record.token_instants_s = [free_s, free_s + 0.01]
            record.ended_s, record.outcome, record.completion_tokens = (
                free_s + 0.01,
                RequestOutcome.COMPLETED,
                2,
            )
            record.prompt_tokens = request.input_tokens
            if self.complaint:
                record.outcome, record.error, record.detail = (
                    RequestOutcome.FAILED,
                    ErrorKind.HTTP,
                    self.complaint,
                )
            if job.keeps_answers:
                record.answer = self.answers.get(request.index, f"a{request.index}")
            observer.on_ended(record)
            records.append(record)
            if observer.wants_stop() or len(self.jobs) >= self.stops_at_job:
                was_stopped = True
                break
        return Sent(records, was_stopped, replace(HEALTH, lateness_p99_s=9.0) if is_late else HEALTH)

    @property
    def load_jobs(self):
        return [j for j in self.jobs if len(j.plan.requests) > 1]


@pytest.fixture
def queue(monkeypatch):
    made = Queue()
    target = ReplayTarget(parse_url("http://127.0.0.1:1"), "m", replaying.Api.COMPLETIONS, 5000)
    monkeypatch.setattr(replaying, "probe", lambda server, **asked: target)
    monkeypatch.setattr(replaying, "send_plan", made)
    return made


def command(function):
    app = typer.Typer()
    app.command()(function)
    return app


def poisson_trace(tmp_path, count=600, rate=2.0):
    instants_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
    rows = [
        {"timestamp": round(1000 * t), "input_length": 64, "output_length": 4, "hash_ids": [i]}
        for i, t in enumerate(instants_s)
    ]
    path = tmp_path / "poisson.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def md1_rate(target_s, attain=0.9):
    """Highest rate of an M/D/1 queue at which the sojourn time's quantile is within the target."""
    rng = np.random.default_rng(2)
    low, high = 1.0, 0.999 / SERVICE_S
    for _ in range(12):
        rate = (low + high) / 2
        steps = SERVICE_S - rng.exponential(1 / rate, 300_000)
        walk = np.cumsum(steps)
        sojourn_s = walk - np.minimum.accumulate(np.minimum(walk, 0)) + SERVICE_S
        low, high = (rate, high) if (sojourn_s <= target_s).mean() >= attain else (low, rate)
    return low


ARGUMENTS = ["--ttft-slo", "0.2", "--tpot-slo", "0.5", "--no-spread"]


def test_the_search_finds_what_the_server_can_take(queue, tmp_path):
    out = tmp_path / "report.json"
    arguments = [poisson_trace(tmp_path), *ARGUMENTS, "--search", "--json", str(out)]
    result = CliRunner().invoke(command(replay), arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_bytes())
    found = figures["search"]
    assert found["rate_per_s"] == pytest.approx(md1_rate(0.2), rel=0.15)
    assert figures["offered_per_s"] == pytest.approx(found["rate_per_s"], rel=0.1)
    assert figures["goodput_share"] >= 0.85
    assert figures["offered"] == 570  # one in twenty warms up
    probes = found["probes"]
    assert len(probes) == len(queue.load_jobs)
    assert any(p["aborted"] and p["judged"] < 570 for p in probes)
    assert len({j.seed for j in queue.jobs}) == len(queue.jobs)  # no prompt is sent twice
    assert "requests per second at which 90% meet both targets" in " ".join(result.output.split())


def test_a_run_in_which_the_load_generator_was_late_does_not_count(queue, tmp_path):
    queue.late_jobs = (1, 4)
    out = tmp_path / "report.json"
    arguments = [poisson_trace(tmp_path), *ARGUMENTS, "--search", "--json", str(out)]
    result = CliRunner().invoke(command(replay), arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_bytes())["search"]
    assert found["rate_per_s"] == pytest.approx(md1_rate(0.2), rel=0.15)
    assert len(found["probes"]) == len(queue.load_jobs) - 2
    assert "does not count" in result.stderr


def test_every_slo_scale_has_its_rate(queue, tmp_path):
    out = tmp_path / "report.json"
    arguments = [
        poisson_trace(tmp_path),
        *ARGUMENTS,
        "--search",
        "--slo-scale",
        "0.5,1,4",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(command(replay), arguments)
    assert result.exit_code == 0, result.output
    points = json.loads(out.read_bytes())["slo_scales"]["points"]
    rates = [p["rate_per_s"] for p in points]
    assert [p["scale"] for p in points] == [0.5, 1, 4]
    assert rates[0] < rates[1] < rates[2]
    assert rates[0] == pytest.approx(md1_rate(0.1), rel=0.2)


def test_ctrl_c_in_a_search_reports_what_was_found(queue, tmp_path):
    queue.stops_at_job = 3 + 2 * 3  # in the fourth run, with an idle check before each
    out = tmp_path / "report.json"
    arguments = [poisson_trace(tmp_path), *ARGUMENTS, "--search", "--json", str(out)]
    result = CliRunner().invoke(command(replay), arguments)
    assert result.exit_code == 130, result.output
    found = json.loads(out.read_bytes())["search"]
    assert "stopped after" in found["reason"]
    assert 0 < len(found["probes"]) < 6


def test_warm_up_is_sent_and_not_judged(queue, tmp_path):
    files = [tmp_path / name for name in ("r.json", "r.html", "r.jsonl")]
    arguments = [poisson_trace(tmp_path, 50), *ARGUMENTS, "--warm-up", "20", "--label", "ours"]
    arguments += ["--json", str(files[0]), "--html", str(files[1]), "--records", str(files[2])]
    result = CliRunner().invoke(command(replay), arguments)
    assert result.exit_code == 0, result.output
    assert len(queue.jobs[0].plan.requests) == 50
    figures = json.loads(files[0].read_bytes())
    assert (figures["offered"], figures["settings"]["planned"], figures["settings"]["label"]) == (
        30,
        30,
        "ours",
    )
    assert "ours" in files[1].read_text()
    assert files[2].read_text().count("\n") == 31


def test_runs_are_compared_by_objectives_they_were_not_run_for(queue, tmp_path):
    for name in ("a", "b"):
        records = str(tmp_path / f"{name}.jsonl")
        CliRunner().invoke(command(replay), [poisson_trace(tmp_path, 50), *ARGUMENTS, "--records", records])
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    out, page = tmp_path / "c.json", tmp_path / "c.html"
    arguments = [*files, "--ttft-slo", "0.001", "--label", "one", "--json", str(out), "--html", str(page)]
    result = CliRunner().invoke(command(compare), arguments)
    assert result.exit_code == 0, result.output
    whole = json.loads(out.read_bytes())
    assert whole["differences"] == {}
    assert (whole["schema"], whole["labels"]) == ("baton-comparison/1", ["one", "b"])
    assert whole["figures"]["goodput_share"]["values"] == [0, 0]
    assert whole["figures"]["ttft.p50"]["ratios_to_first"] == [None, pytest.approx(1)]
    assert [r["settings"]["slo"]["ttft_s"] for r in whole["reports"]] == [0.001, 0.001]
    assert "B / A" in result.output
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--search"], "give --ttft-slo"),
        (["--search", "--ttft-slo", "1", "--limit", "1"], "different times"),
        (["--search", "--ttft-slo", "1", "--warm-up", "600"], "leaves nothing"),
        (["--warm-up", "600"], "leaves nothing"),
        (["--search", "--ttft-slo", "none", "--tpot-slo", "none"], "give --ttft-slo"),
        (["--search", "--ttft-slo", "1", "--cancel", "1"], "leaves nothing"),
        (["--cancel-after", "3"], "give --cancel SHARE, too"),
        (["--class-slo", "nosuch=1/1"], "none of the requests is of this class; they have none"),
        (["--class-slo", "nosuch=1/1", "--slo-class", "chat"], "they have chat"),
        (["--rate", "inf"], "--rate inf: must be from"),
        (["--rate", "nan"], "--rate nan: must be from"),
        (["--rate", "1", "--time-scale", "2"], "say the same thing"),
        (["--ttft-slo", "0"], "write seconds above 0, or none"),
        (["--json", "x", "--records", "x"], "--json and --records both write x"),
        (["--json", "-", "--records", "-"], "--json and --records both write -"),
        (["--slo-scale", "1,x"], "positive factors"),
        (["--class-slo", "chat"], "NAME=TTFT/TPOT"),
        (["--json", "/no/such/folder/x.json"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2(queue, tmp_path, arguments, complaint):
    result = CliRunner().invoke(command(replay), [poisson_trace(tmp_path), *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.replace("│", "").split())
    assert not queue.jobs


def test_answers_that_differ_from_an_earlier_run_are_told_and_end_with_status_1(queue, tmp_path):
    trace, records, out = poisson_trace(tmp_path, count=20), tmp_path / "r.jsonl", tmp_path / "report.json"
    assert CliRunner().invoke(command(replay), [trace, "--records", str(records)]).exit_code == 0
    again = [trace, "--same-answers-as", str(records), "--json", str(out)]
    result = CliRunner().invoke(command(replay), again)
    assert result.exit_code == 0, result.output
    assert "20 of 20" in result.output
    assert json.loads(out.read_bytes())["began_at_s"] is not None
    queue.answers[7] = "something else"
    result = CliRunner().invoke(command(replay), again)
    assert result.exit_code == 1
    assert "1 answers differ: requests 7" in result.stderr
    expected = {"compared": 20, "differing": 1, "first_differing": [7]}
    assert json.loads(out.read_bytes())["answers"] == expected
    sent = len(queue.jobs)
    result = CliRunner().invoke(command(replay), [*again, "--seed", "1"])
    assert (result.exit_code, "seed 0 there, 1 here" in result.stderr, len(queue.jobs)) == (2, True, sent)
    result = CliRunner().invoke(command(replay), [*again, "--search", "--ttft-slo", "1"])
    assert (result.exit_code, "leave --same-answers-as out" in result.stderr) == (2, True)


def test_a_class_that_the_server_does_not_have_ends_the_run_at_its_first_answers(queue, tmp_path):
    queue.complaint = "400: there is no class 'x'; this server has chat"
    result = CliRunner().invoke(command(replay), [poisson_trace(tmp_path), "--slo-class", "x"])
    assert result.exit_code == 2
    assert "because every request got this answer: 400: there is no class 'x'" in result.stderr


@pytest.mark.parametrize(
    ("details", "goes_on"),
    [
        (["404: no model x"] * ALIKE, False),
        (["404: no model x"] * (ALIKE - 1), True),
        ([f"400: the prompt has {i} tokens" for i in range(20)], True),
        (["500: broken"] * 20, True),
        ([None, *["404: no model x"] * 20], True),
        ([*["404: no model x"] * (ALIKE - 1), None, *["404: no model x"] * 20], True),
    ],
)
def test_only_the_same_complaint_of_the_first_requests_ends_a_run(details, goes_on):
    first = FirstAnswers()
    for index, detail in enumerate(details):
        kind = (RequestOutcome.COMPLETED, None) if detail is None else (RequestOutcome.FAILED, ErrorKind.HTTP)
        first.ended(RequestRecord(index, 0.0, outcome=kind[0], error=kind[1], detail=detail or ""))
    assert (first.complaint == "") is goes_on


def test_compare_of_nothing_known_is_one_line_and_status_2(tmp_path):
    result = CliRunner().invoke(command(compare), [str(tmp_path / "none.json")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_requests_that_wait_beyond_their_target_count_before_they_end():
    goal_watch = GoalWatch(ClassObjectives(Slo(1.0)), planned=100, attain=0.9, warm_up=10)
    for i in range(60):
        goal_watch.sent(RequestRecord(i, planned_s=float(i) / 100))
    assert not goal_watch.is_hopeless(now_s=0.9)
    assert goal_watch.is_hopeless(now_s=2.0)
    goal_watch.sees_tokens = False
    assert not goal_watch.is_hopeless(now_s=2.0)


def test_ctrl_c_is_not_taken_for_hopeless():
    goal_watch = GoalWatch(ClassObjectives(Slo(1.0)), planned=10, attain=0.9)
    assert not goal_watch.wants_stop(now_s=0.0)
    for i in range(10):
        goal_watch.ended(RequestRecord(i, 0.0, outcome=RequestOutcome.FAILED, error=ErrorKind.INTERRUPTED))
    assert not goal_watch.gave_up
    assert goal_watch.wants_stop(now_s=0.0)
    assert goal_watch.gave_up


def test_warm_up_and_planned_cancellations_are_no_misses():
    goal_watch = GoalWatch(ClassObjectives(Slo(1.0)), planned=100, attain=0.9, warm_up=50)
    for i in range(100):
        outcome = RequestOutcome.FAILED if i < 50 else RequestOutcome.CANCELLED
        goal_watch.ended(RequestRecord(i, 0.0, outcome=outcome, error=ErrorKind.TIMEOUT))
    assert (goal_watch.missed, goal_watch.is_hopeless(now_s=1e9)) == (0, False)
