import math
from dataclasses import replace

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import SetupError
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import Report, RunSettings, Slo, make_report, percentiles
from loadgen.report.make import WINDOWS_WANTED, window_for
from loadgen.report.sample import share_of, wilson
from loadgen.report.scales import attained_at, most_stringent, needed_scales
from loadgen.slo import ClassObjectives, parse_class_slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def asked(slo=SLO, **more):
    return RunSettings(trace="t", target="u", model="m", slo=slo, **more)


def done(planned_s=0.0, ttft_s=0.5, tpot_s=0.05, tokens=3, **more):
    first = planned_s + ttft_s
    instants = [first + i * tpot_s for i in range(tokens)]
    return RequestRecord(
        0, planned_s, sent_s=planned_s, token_instants_s=instants, ended_s=instants[-1],
        outcome=RequestOutcome.COMPLETED, prompt_tokens=10, completion_tokens=tokens, **more,
    )  # fmt: skip


def ended(outcome, planned_s=0.0, **more):
    return RequestRecord(0, planned_s, sent_s=planned_s, ended_s=planned_s + 1, outcome=outcome, **more)


seconds = st.floats(0.001, 3.0)
names = st.sampled_from(["", "chat", "batch"])
good = st.builds(done, st.floats(0, 300), seconds, seconds, st.integers(1, 5), slo_class=names)
bad = st.builds(
    ended,
    st.sampled_from([RequestOutcome.REFUSED, RequestOutcome.FAILED, RequestOutcome.CANCELLED]),
    st.floats(0, 300),
    slo_class=names,
)
runs = st.lists(st.one_of(good, bad), max_size=60)


@given(runs)
@settings(max_examples=60, deadline=None)
def test_every_request_is_counted_once_in_total_in_windows_and_in_classes(records):
    report = make_report(records, asked(class_slos={"chat": Slo(0.2, 0.2)}))
    outcomes = ("completed", "refused", "failed", "cancelled")
    assert report.offered == len(records) == sum(getattr(report, name) for name in outcomes)
    assert report.judged == report.offered - report.cancelled
    for name in ("offered", *outcomes):
        assert sum(getattr(w, name) for w in report.windows) == getattr(report, name)
        if report.classes:
            assert sum(getattr(c, name) for c in report.classes) == getattr(report, name)
    assert sum(w.met for w in report.windows) == report.met
    if report.classes:
        assert sum(c.goodput.met for c in report.classes) == report.met
    assert report.met <= min(report.ttft_attained.met, report.tpot_attained.met)
    assert report.ttft_attained.met + report.tpot_attained.met - report.met <= report.completed
    assert 0 <= report.goodput.low <= report.goodput_share <= report.goodput.high <= 1
    assert len(report.windows) <= WINDOWS_WANTED + 1


@given(runs, st.floats(0.01, 10))
@settings(max_examples=60, deadline=None)
def test_the_share_at_a_scale_is_that_of_scaled_objectives(records, scale):
    classes = {"chat": Slo(0.2, None)}
    needed = needed_scales(records, ClassObjectives(SLO, classes))
    scaled = asked(SLO.scaled(scale), class_slos={k: v.scaled(scale) for k, v in classes.items()})
    share = make_report(records, scaled).goodput_share
    assert attained_at(needed, scale * (1 - 1e-9)) <= share <= attained_at(needed, scale * (1 + 1e-9))
    assert attained_at(needed, 1.0) == make_report(records, asked(class_slos=classes)).goodput_share


@given(runs, st.floats(0.01, 1))
@settings(deadline=None)
def test_the_most_stringent_scale_attains_the_goal_and_less_does_not(records, attain):
    needed = needed_scales(records, ClassObjectives(SLO))
    scale = most_stringent(needed, attain=attain)
    if scale is None:
        assert not len(needed) or np.isfinite(needed).mean() < attain
        return
    assert attained_at(needed, scale) >= attain - 1e-9
    assert attained_at(needed, scale * (1 - 1e-6)) < attain + 1e-9


@given(runs)
@settings(max_examples=30, deadline=None)
def test_a_report_survives_json(records):
    report = make_report(records, asked(options={"api": "chat", "cut": 3, "spread": True, "none": None}))
    text = orjson.dumps(report.as_json())
    assert text.startswith(b'{"schema":"baton-report/2"')
    assert msgspec.json.decode(text, type=Report) == report


@given(st.floats(0.01, 1e6))
@settings(deadline=None)
def test_windows_are_round_and_few(duration_s):
    assert duration_s / window_for(duration_s) <= WINDOWS_WANTED + 1e-9


def test_the_interval_covers_the_share_of_many_runs():
    rng = np.random.default_rng(1)
    shares = [share_of(rng.random(400) < 0.9) for _ in range(200)]
    assert sum(s.low <= 0.9 <= s.high for s in shares) >= 185


def test_misses_in_a_row_widen_the_interval():
    alone, in_a_row = np.ones(1000, dtype=bool), np.ones(1000, dtype=bool)
    alone[::10] = False
    in_a_row[400:500] = False
    narrow, wide = share_of(alone), share_of(in_a_row)
    assert narrow.share == wide.share == 0.9
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_wilson_is_the_text_books():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_cancelled_request_says_nothing_and_a_refused_one_is_a_miss():
    records = [done(), ended(RequestOutcome.CANCELLED), ended(RequestOutcome.REFUSED)]
    assert make_report(records, asked()).goodput_share == 0.5


def test_both_objectives_are_attained_apart_and_jointly():
    records = [done(), done(ttft_s=2.0), done(tpot_s=0.2), done(ttft_s=2.0, tpot_s=0.2)]
    report = make_report(records, asked())
    assert (report.ttft_attained.share, report.tpot_attained.share, report.goodput_share) == (0.5, 0.5, 0.25)


def test_classes_are_judged_by_their_own_objectives():
    records = [done(slo_class="chat"), done(slo_class="batch"), done(slo_class="batch", tenant="x")]
    report = make_report(records, asked(class_slos={"chat": Slo(0.1, None)}))
    assert [(c.name, c.goodput_share, c.slo) for c in report.classes] == [
        ("batch", 1.0, SLO),
        ("chat", 0.0, Slo(0.1, None)),
    ]
    assert [(t.name, t.offered, t.slo) for t in report.tenants] == [("", 2, None), ("x", 1, SLO)]


def test_phases_workers_and_predictions_are_as_the_server_told():
    phases = {"queue_s": 0.1, "prefill_s": 0.3, "transfer_s": 0.02, "predicted_ttft_s": 0.6}
    records = [
        done(timings=phases, served_by=("p0", "d0"), cached_tokens=4),
        done(timings=phases, served_by=("p0", "d1")),
        done(timings=phases, served_by=("b0",)),
    ]
    report = make_report(records, asked())
    means = report.latency_breakdown.bands[0].stages
    assert (means["queue"], means["prefill"], means["load"]) == pytest.approx((0.1, 0.3, 0.0))
    assert means["rest"] == pytest.approx(0.1)
    to_first = [s for s in means if s not in ("transfer", "first_decode")]
    assert sum(means[s] for s in to_first) == pytest.approx(report.ttft.mean)
    rows = [
        (w.name, w.prefill_requests, w.computed_tokens, w.decode_requests) for w in report.balance.workers
    ]
    assert rows == [("b0", 1, 10, 1), ("d0", 0, 0, 1), ("d1", 0, 0, 1), ("p0", 2, 16, 0)]
    assert report.balance.prompt_tokens_max_to_mean == pytest.approx(20 / 15)
    assert report.predictions.ttft.mape == pytest.approx(0.2)
    assert report.predictions.ttft.bias == pytest.approx(0.2)
    assert report.predictions.tpot is None


@pytest.mark.parametrize("count", range(1, 8))
def test_a_latency_breakdown_of_few_requests_has_the_bands_it_can_have(count):
    records = [done(ttft_s=0.1 * (i + 1), timings={"prefill_s": 0.1}) for i in range(count)]
    report = make_report(records, asked())
    assert report.latency_breakdown.bands[0].count == count
    assert all(b.count > 0 for b in report.latency_breakdown.bands)
    assert msgspec.json.decode(orjson.dumps(report.as_json()), type=Report) == report


def test_a_server_that_tells_nothing_has_no_latency_breakdown():
    report = make_report([done()], asked())
    assert (report.latency_breakdown, report.balance, report.predictions, report.classes) == (
        None,
        None,
        None,
        (),
    )


def test_a_late_generator_is_told():
    late = [replace(done(planned_s=i), sent_s=i + 0.5) for i in range(10)]
    report = make_report(late, asked())
    assert "bottleneck" in report.generator.warning
    limited = make_report([ended(RequestOutcome.FAILED, error=ErrorKind.CONNECTION_LIMIT)], asked())
    assert "--connections-max" in limited.generator.warning
    assert make_report([done()], asked()).generator.warning == ""


def test_refusals_are_told_by_reason():
    records = [ended(RequestOutcome.REFUSED, detail=f"503: queue full: {i} waiting") for i in range(3)]
    records.append(ended(RequestOutcome.REFUSED, detail="429: slow down"))
    assert make_report(records, asked()).refusals == {"503: queue full: N waiting": 3, "429: slow down": 1}


def test_failures_are_told_by_what_the_server_said():
    records = [
        ended(RequestOutcome.FAILED, error=ErrorKind.HTTP, detail=f"400: no class {i}") for i in range(2)
    ]
    records.append(ended(RequestOutcome.FAILED, error=ErrorKind.TIMEOUT))
    assert make_report(records, asked()).failures == {"http, 400: no class N": 2, "timeout": 1}


def test_first_and_last_instant_alone_say_nothing_of_the_gaps():
    ends_only = replace(done(tokens=2, tpot_s=9.0), completion_tokens=10)
    assert make_report([ends_only], asked()).itl is None
    assert make_report([ends_only, done(tokens=2, tpot_s=0.25)], asked()).itl.max == 0.25


def test_percentiles_leave_out_what_is_not_known():
    assert percentiles([None, 1.0, 3.0]).mean == 2.0
    assert percentiles([None]) is None


@pytest.mark.parametrize(
    "text", ["", "chat", "chat=1", "chat=1/x", "=1/1", "chat=0/1", "chat=-1/1", "chat=1/nan"]
)
def test_bad_class_objectives_are_told(text):
    with pytest.raises(SetupError, match="NAME=TTFT/TPOT"):
        parse_class_slo(text)


def test_class_objectives_are_read():
    assert parse_class_slo("chat=0.5/0.05") == ("chat", Slo(0.5, 0.05))
    assert parse_class_slo("batch=-/0.2") == ("batch", Slo(None, 0.2))


def test_an_unmet_request_needs_an_endless_scale():
    assert Slo(1.0, None).needed_scale(ended(RequestOutcome.FAILED)) == math.inf
    assert SLO.needed_scale(done(ttft_s=0.5, tpot_s=0.2)) == pytest.approx(2.0)
    assert Slo().needed_scale(done()) == 0.0
