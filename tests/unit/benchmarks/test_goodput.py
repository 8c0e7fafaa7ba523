"""Figures and plans of the goodput bench, and the content of a peers file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import SetupError
from benchmarks import goodput_variants
from benchmarks.goodput import GoodputBench, TraceUse, found, make_offered
from benchmarks.goodput_result import (
    ANY_OBJECTIVES,
    GoodputRun,
    Point,
    RunKey,
    goodput_of,
    make_curves,
    make_ratios,
)
from benchmarks.goodput_variants import baton_variants, choose, read_peers
from loadgen.files import write_records
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report import RunSettings
from loadgen.slo import Slo

EXAMPLE = Path(__file__).parents[3] / "docs/examples/goodput-peers.toml"
TIGHT, LOOSE = Slo(1.0, 0.02), Slo(1.0, 0.1)


def a_point(rate, attained):
    return Point(rate, attained, attained, attained, rate * attained, None, None, None, None, 0.0, 0.0, 1)


def a_record(index, *, ttft=0.5, tpot=0.01, outcome=RequestOutcome.COMPLETED):
    at_s = index * 0.5
    return RequestRecord(
        index,
        planned_s=at_s,
        token_instants_s=[at_s + ttft, at_s + ttft + 9 * tpot],
        ended_s=at_s + ttft + 9 * tpot,
        outcome=outcome,
        completion_tokens=10,
    )


def a_run(variant, rate, records, *, objectives=ANY_OBJECTIVES, number=0):
    return GoodputRun(RunKey(variant, "azure", objectives, rate, number), records, {})


def test_goodput_is_where_the_line_crosses_the_share_to_attain():
    got = goodput_of([a_point(2, 1.0), a_point(4, 0.95), a_point(6, 0.75)])
    assert (got.rate, got.bound) == (pytest.approx(4.5), "")


def test_goodput_beyond_the_measured_rates_says_so():
    assert str(goodput_of([a_point(2, 1.0), a_point(4, 0.9)])) == ">= 4.00"
    assert str(goodput_of([a_point(2, 0.8)])) == "< 1.00"


def test_a_dip_between_two_good_rates_ends_the_goodput():
    assert goodput_of([a_point(2, 0.95), a_point(4, 0.85), a_point(6, 0.95)]).rate < 4


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_attaining_more_somewhere_never_lowers_the_goodput(shares, data):
    index = data.draw(st.integers(0, len(shares) - 1))
    better = [*shares]
    better[index] = data.draw(st.floats(shares[index], 1))
    rates = [goodput_of([a_point(i + 1, s) for i, s in enumerate(some)]).rate for some in (shares, better)]
    assert rates[1] >= rates[0] - 1e-9


def test_refused_failed_and_slow_requests_all_miss():
    records = [
        a_record(0),
        a_record(1, ttft=1.5),
        a_record(2, tpot=0.05),
        a_record(3, outcome=RequestOutcome.REFUSED),
        a_record(4, outcome=RequestOutcome.FAILED),
    ]
    tight, loose = make_curves([a_run("p", 2, records)], {"tight": TIGHT, "loose": LOOSE})
    assert (tight.points[0].attained, loose.points[0].attained) == (1 / 5, 2 / 5)
    assert (tight.points[0].refused, tight.points[0].failed) == (1 / 5, 1 / 5)


def test_a_server_that_was_told_its_objectives_is_judged_by_those_alone():
    runs = [
        a_run("ours", 2, [a_record(0, tpot=0.01)], objectives="tight"),
        a_run("ours", 2, [a_record(0, tpot=0.2)], objectives="loose"),
        a_run("peer", 2, [a_record(0, tpot=0.05)]),
    ]
    curves = make_curves(runs, {"tight": TIGHT, "loose": LOOSE})
    shares = {(c.variant, c.objectives): c.points[0].attained for c in curves}
    assert shares == {("ours", "tight"): 1, ("ours", "loose"): 0, ("peer", "tight"): 0, ("peer", "loose"): 1}


def test_rounds_are_medians_with_their_spread():
    runs = [
        a_run("p", 2, [a_record(i, ttft=2.0 if i < misses else 0.1) for i in range(10)], number=n)
        for n, misses in enumerate((1, 4, 2))
    ]
    (curve,) = make_curves(runs, {"tight": TIGHT})
    (point,) = curve.points
    assert (point.attained, point.attained_low, point.attained_high, point.rounds) == (0.8, 0.6, 0.9, 3)


def test_the_ratio_is_to_the_best_peer_of_that_trace_and_objective():
    runs = [
        a_run("ours", 4, [a_record(0)], objectives="tight"),
        a_run("bad", 4, [a_record(0, ttft=5.0)]),
        a_run("good", 2, [a_record(0)]),
    ]
    curves = make_curves(runs, {"tight": TIGHT})
    (ratio,) = make_ratios(curves, {"ours": "baton", "bad": "peers", "good": "peers"})
    assert (ratio.best_peer, ratio.ratio) == ("good", 2.0)


def azure_file(folder, count=400):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for i in range(count):
        at = f"2023-11-16 18:{15 + i // 60:02}:{i % 60:02}.5000000"
        lines.append(f"{at},{200 + i * 7 % 900},{20 + i % 50}")
    path = folder / "azure.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def a_use(path):
    return TraceUse("azure", path, (2.0, 4.0), "1/2", "1/4", 512, 64)


def test_the_same_plan_is_offered_at_a_rate_whatever_the_words(tmp_path):
    use = a_use(azure_file(tmp_path))
    one, other = (make_offered(use, rate=4.0, number=0, seconds=30, words=w) for w in (0, 1))
    assert one.plan == other.plan
    assert len(one.plan.requests) == 120
    assert one.plan.requests[-1].at_s == pytest.approx(30, rel=0.05)
    first = one.plan.requests[0]
    assert one.words(first) != other.words(first)
    assert len(one.words(first).split()) == first.input_tokens


def test_a_trace_too_short_for_the_rounds_is_a_clear_error(tmp_path):
    use = a_use(azure_file(tmp_path))
    with pytest.raises(SetupError, match="are 400"):
        make_offered(use, rate=4.0, number=2, seconds=30)


def test_a_small_part_of_a_trace_keeps_the_share_of_prefixes_that_the_whole_has(tmp_path):
    path = tmp_path / "talks.jsonl"
    turns = [
        (turn * 60_000 + talk * 150 // 3000 * 3000, talk, turn) for talk in range(400) for turn in range(4)
    ]
    lines = [
        {
            "timestamp": at_ms,
            "input_length": 512 * (2 + turn),
            "output_length": 100,
            "hash_ids": [0, *(talk * 10 + i + 1 for i in range(1 + turn))],
        }
        for at_ms, talk, turn in sorted(turns)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    use = TraceUse("mooncake", path, (4.0,), "1/16", "1/8", 512, 64)
    offered = [make_offered(use, rate=4.0, number=n, seconds=40) for n in (0, 1)]
    for some in offered:
        assert some.facts["requests"] == 160
        assert some.facts["prefix_hits_possible"] == pytest.approx(0.71, abs=0.08)
        assert some.plan.requests[-1].at_s <= 41
    assert offered[0].plan != offered[1].plan


def test_runs_on_disk_are_read_back_and_those_missing_left_out(tmp_path):
    variant = baton_variants()[0]
    bench = GoodputBench(
        model=tmp_path,
        results=tmp_path,
        cores=(0,),
        traces=(a_use(tmp_path / "azure.csv"),),
        objectives={"tight": TIGHT},
        rounds=1,
        seconds=30,
        timeout_s=30,
        progress=lambda _: None,
    )
    key = RunKey(variant.name, "azure", "tight", 4.0, 0)
    settings = RunSettings(trace="azure", target="t", model="m", options={"requests": 1})
    write_records(tmp_path / key.file_name, [a_record(0)], settings)
    (run,) = found(bench, [variant])
    assert (run.key, run.facts, len(run.records)) == (key, {"requests": 1}, 1)


def test_the_example_of_the_docs_is_a_peers_file(monkeypatch):
    monkeypatch.setattr(goodput_variants, "which", lambda name: f"/bin/{name}")
    variants = read_peers(EXAMPLE, {"vllm": "/opt/vllm"})
    assert [v.name for v in variants] == [
        "vllm",
        "vllm-2-round-robin",
        "vllm-2-sglang-router",
        "vllm-prefill-decode",
    ]
    assert variants[0].processes[0].command[0] == "/bin//opt/vllm"
    assert '{"kv_connector":"NixlConnector"' in variants[3].processes[0].command[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[variants]", "goodput.toml"),
        ('[[variants]]\nname = "x"\nprocesses = []', "front"),
        ('[[variants]]\nname = "x"\n[[variants.processes]]\nname = "a"\ncommand = []\ncolour = 1', "colour"),
        (
            '[[variants]]\nname = "x"\n[[variants.processes]]\nname = "a"\ncommand = ["{program:y}"]',
            "no program",
        ),
        (
            '[programs]\ny = "/nowhere/y"\n[[variants]]\nname = "x"\n[[variants.processes]]\nname = "a"\n'
            'command = ["{program:y}"]',
            "--program y=PATH",
        ),
    ],
)
def test_a_peers_file_that_is_wrong_says_what(tmp_path, text, says):
    path = tmp_path / "goodput.toml"
    path.write_text(text)
    with pytest.raises(SetupError, match=says):
        read_peers(path, {})


def test_arrangements_of_baton_have_the_same_threads_and_memory():
    for variant in baton_variants():
        [process] = variant.processes
        roles = [
            i for i, word in enumerate(process.command) if word in ("--prefill", "--decode", "--aggregated")
        ]
        count = sum(int(process.command[i + 1]) for i in roles)
        sets = dict(word.split("=", 1) for word in process.command if "=" in word)
        assert int(sets["engine.threads"]) * count == 2
        assert int(sets["engine.kv_bytes"]) * count == 2 * 2**30


def test_a_variant_that_is_not_there_is_named():
    with pytest.raises(SetupError, match="baton-split, baton-aggregated"):
        choose(baton_variants(), "baton-spilt")
