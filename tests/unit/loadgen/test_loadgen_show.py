"""The output on a terminal."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.progress import LINE_EVERY_S, ProgressStats, live_progress
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import ClassObjectives, RunSettings, Slo, judged
from loadgen.report.model import Probe, SearchResult
from loadgen.show import show_comparison, show_report

GOLDEN = Path(__file__).parent / "golden"
PHASES = {
    "queue_s": 0.02, "tokenize_s": 0.001, "route_s": 0.0002, "wait_s": 0.03, "load_s": 0.0, "prefill_s": 0.1,
    "first_hop_s": 0.004, "transfer_s": 0.006, "first_decode_s": 0.02, "retries_s": 0.0,
    "predicted_ttft_s": 0.15, "predicted_tpot_s": 0.02,
}  # fmt: skip


def a_report(label="ours", *, slow=1.0, searched=True):
    records = []
    for i in range(200):
        at_s, first_s = i / 4, (0.16 + 0.001 * (i % 100)) * slow
        instants = [at_s + first_s + 0.021 * slow * k for k in range(10 + i % 5)]
        phases = {name: value * slow for name, value in PHASES.items()}
        records.append(
            RequestRecord(
                i, at_s, sent_s=at_s + 0.0005, token_instants_s=instants, ended_s=instants[-1] + 0.001,
                outcome=RequestOutcome.COMPLETED, prompt_tokens=100 + i, completion_tokens=len(instants),
                cached_tokens=i // 2,
                slo_class=("chat", "batch")[i % 2], tenant="acme" if i % 3 else "", timings=phases,
                served_by=(f"prefill-{i % 2}", f"decode-{i % 3}"),
            )
        )  # fmt: skip
    for i in range(5):
        records.append(
            RequestRecord(
                200 + i,
                50.0 + i,
                ended_s=50.1 + i,
                outcome=RequestOutcome.REFUSED,
                error=ErrorKind.OVERLOADED,
                detail=f"503: queue full, {i} waiting",
                slo_class="chat",
            )
        )
    timeout = ErrorKind.TIMEOUT
    records += [
        RequestRecord(
            205, 56.0, ended_s=57.0, outcome=RequestOutcome.FAILED, error=timeout, slo_class="chat"
        ),
        RequestRecord(206, 57.0, ended_s=58.0, outcome=RequestOutcome.CANCELLED, slo_class="batch"),
    ]
    settings = RunSettings(
        trace="conversation.jsonl", trace_format="mooncake", target="http://127.0.0.1:8000",
        model="llama-100m",
        slo=Slo(0.25, 0.05), class_slos={"chat": Slo(0.2, 0.03)}, planned=300, label=label,
        options={"api": "completions", "length_scale": "1/16"}, expected_hit_ratio=0.25,
    )  # fmt: skip
    report = judged(records, settings, scales=(0.5, 1, 2))
    if not searched:
        return report
    probes = (Probe(4.0, 195, 200, 0.975, 0.943, 0.989, False), Probe(8.0, 30, 90, 0.333, 0.2, 0.4, True))
    return replace(report, search=SearchResult(0.9, 4.0, 8.0, "2 runs at this rate attain the goal", probes))


def printed(show, *arguments):
    out = io.StringIO()
    show(Console(file=out, width=100, color_system=None, legacy_windows=False), *arguments)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize(
    ("name", "show", "arguments"),
    [
        ("report.txt", show_report, lambda: (a_report(),)),
        (
            "comparison.txt",
            show_comparison,
            lambda: ([a_report(), a_report("theirs", slow=1.5, searched=False)],),
        ),
    ],
)
def test_tables_are_as_they_were_at_width_100(name, show, arguments):
    text = printed(show, *arguments())
    assert max(map(len, text.splitlines())) <= 100
    assert text == (GOLDEN / name).read_text("utf-8")


def test_a_late_generator_is_told_loudly():
    records = [
        RequestRecord(
            i,
            i,
            sent_s=i + 0.5,
            token_instants_s=[i + 1.0],
            ended_s=i + 1.0,
            outcome=RequestOutcome.COMPLETED,
        )
        for i in range(10)
    ]
    text = printed(show_report, judged(records, RunSettings(trace="t", target="u", model="m")))
    assert "WARNING: the load generator did not keep up" in text


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def completed(index, ttft_s, slo_class=""):
    return RequestRecord(
        index, 0.0, token_instants_s=[ttft_s], outcome=RequestOutcome.COMPLETED, slo_class=slo_class
    )


def test_without_a_terminal_a_line_comes_every_few_seconds_and_at_the_end():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=40)
    with live_progress(console, planned=4, objectives=ClassObjectives(Slo(1.0)), now=clock) as observer:
        for i in range(3):
            observer.on_sent(RequestRecord(i, 0.0))
        observer.on_ended(completed(0, 0.5, "chat"))
        assert out.getvalue() == ""
        clock.now_s += LINE_EVERY_S
        observer.on_ended(completed(1, 2.0, "batch"))
        clock.now_s += 1
        observer.on_ended(RequestRecord(2, 0.0, outcome=RequestOutcome.REFUSED, slo_class="chat"))
    assert out.getvalue().splitlines() == [
        "replay 5 s: 2/4: 1 running, 2 done, 0 refused, 0 failed; "
        "goodput 50.0 % (last 10 s 50.0 %; batch 0.0 %, chat 100.0 %)",
        "replay 6 s: 3/4: 0 running, 2 done, 1 refused, 0 failed; "
        "goodput 33.3 % (last 10 s 33.3 %; batch 0.0 %, chat 50.0 %)",
    ]


def test_on_a_terminal_the_bar_shows_the_goodput():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    with live_progress(console, planned=1, objectives=ClassObjectives(Slo(1.0)), now=clock) as observer:
        observer.on_sent(RequestRecord(0, 0.0))
        observer.on_ended(completed(0, 0.5))
    assert "1/1: 0 running, 1 done, 0 refused, 0 failed; goodput 100.0 %" in out.getvalue()


def test_recent_goodput_forgets():
    stats = ProgressStats(ClassObjectives(Slo(1.0)), 10)
    stats.ended(completed(0, 5.0), now_s=0.0)
    stats.ended(completed(1, 0.5), now_s=9.0)
    assert (stats.goodput(), stats.recent_goodput(now_s=9.0), stats.recent_goodput(now_s=15.0)) == (
        0.5,
        0.5,
        1.0,
    )
    assert stats.recent_goodput(now_s=99.0) is None


def test_planned_cancellations_are_not_judged():
    stats = ProgressStats(ClassObjectives(Slo(1.0)), 10)
    stats.ended(RequestRecord(0, 0.0, outcome=RequestOutcome.CANCELLED), now_s=0.0)
    assert (stats.goodput(), stats.ended_count) == (None, 1)


def a_record(i, *, tokens=10, asked=None, planned_s=None):
    at_s = float(i) if planned_s is None else planned_s
    return RequestRecord(
        i, at_s, sent_s=at_s, token_instants_s=[at_s + 0.1, at_s + 0.2], ended_s=at_s + 0.2,
        outcome=RequestOutcome.COMPLETED, completion_tokens=tokens, asked_tokens=asked,
    )  # fmt: skip


PLAIN = RunSettings(trace="t", target="u", model="m", slo=Slo(1.0, 0.5), options={"length_scale": "1"})


def test_answers_shorter_than_asked_are_told():
    records = [a_record(i, tokens=4 if i < 3 else 10, asked=10) for i in range(8)]
    text = " ".join(printed(show_report, judged(records, PLAIN)).split())
    assert "answers shorter than asked │ 3 of 8, mean 40.0 %" in text
    for untold in ([a_record(0, asked=10)], [a_record(0, tokens=None, asked=10)], [a_record(0)]):
        assert "shorter" not in printed(show_report, judged(untold, PLAIN))


def test_nobody_judged_is_no_goodput_of_zero():
    records = [replace(a_record(0), outcome=RequestOutcome.CANCELLED)]
    text = printed(show_report, judged(records, PLAIN))
    assert "nobody is judged" in text


def test_a_made_trace_has_no_files_format():
    settings = replace(PLAIN, trace="synth:azure-conv", trace_format="mooncake")
    assert "(mooncake)" not in printed(show_report, judged([a_record(0)], settings))


def test_what_differs_between_runs_is_told():
    records = [a_record(i) for i in range(10)]
    faster = [a_record(i, planned_s=i / 4) for i in range(10)]
    other = replace(PLAIN, trace="s", slo=Slo(2.0, None), attain=0.5, options={"length_scale": "1/2"})
    text = printed(show_comparison, [judged(records, PLAIN), judged(faster, other)])
    for said in (
        "Not the same trace: A t, B s",
        "Not the same offered rate: A 1.00 /s, B 4.00 /s",
        "Not the same objectives: A TTFT <= 1 s, TPOT <= 0.5 s, B TTFT <= 2 s",
        "Not the same goal: A 90%, B 50%",
        "Not the same length_scale: A 1, B 1/2",
    ):
        assert said in text
    assert "Not the same" not in printed(show_comparison, [judged(records, PLAIN)] * 2)


def test_scales_that_were_asked_for_are_compared():
    reports = [judged([a_record(i) for i in range(10)], PLAIN, scales=(0.05, 0.2, 1))] * 2
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    show_comparison(console, reports, with_scales=True)
    rows = [line.split() for line in out.getvalue().splitlines() if "x " in line and "│" in line]
    assert ["│", "0.05x", "│", "0.0", "%", "│", "0.0", "%", "│"] in rows
    assert ["│", "0.2x", "│", "100.0", "%", "│", "100.0", "%", "│"] in rows
