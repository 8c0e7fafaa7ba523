"""Parsed metrics, the changes between two scrapes, and their history."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry import catalogue as c
from baton.telemetry.metric import LATENCY_BUCKETS
from baton.telemetry.metrics import Meter
from control_plane.dashboard.derive import (
    PARTS,
    attainment,
    outcome_rates,
    part_means,
    quantile,
    quantiles_over_time,
)
from control_plane.dashboard.history import History, Ring, TimeWindow
from control_plane.dashboard.samples import MetricsFrame, MetricsReader, by_label, frame_of, merged, total

NAMES = [m.name for m in c.CATALOGUE]


def looked(meter):
    return MetricsReader(NAMES).read(meter.render().decode())


def test_what_a_meter_renders_is_read_back():
    meter = Meter()
    meter.inc(c.SLO_REQUESTS, 3, model="m", slo_class="chat", tenant='a "b" \\ c', outcome="met")
    meter.set(c.QUEUED, 7, model="m")
    meter.observe(c.TTFT, 0.25, model="m")
    table = looked(meter)
    assert total(table[c.SLO_REQUESTS.name], tenant='a "b" \\ c') == 3
    assert table[c.QUEUED.name] == {(("model", "m"),): 7}
    assert total(table["baton_ttft_seconds_bucket"], le="+Inf") == 1
    assert total(table["baton_ttft_seconds_sum"]) == 0.25


def test_lines_that_are_not_ours_are_passed_over():
    text = '# HELP x y\npython_info{a="b"} 1\nbaton_router_queued_sequences nonsense\n\nbaton_{ 1\n x\n'
    assert MetricsReader(NAMES).read(text) == {}


def test_counters_gain_and_begin_anew_and_strangers_count_from_their_second_look():
    name, labels = c.REQUESTS.name, (("model", "m"),)
    looks = [
        ({name: {labels: 10.0}}, {name: {labels: 15.0}}),  # rose
        ({name: {labels: 10.0}}, {name: {labels: 4.0}}),  # restarted
        (None, {name: {labels: 1000.0}}),  # no earlier scrape
        ({}, {name: {labels: 2.0}}),  # its first count
    ]
    assert frame_of(5.0, 1.0, looks).gained == {name: {labels: 5.0 + 4.0 + 2.0}}


def test_gauges_of_several_processes_add_up_and_ratios_do_not():
    looks = [({}, {c.QUEUED.name: {(): 2.0}, c.DEGRADED.name: {(): 0.0}}),
             ({}, {c.QUEUED.name: {(): 3.0}, c.DEGRADED.name: {(): 1.0}})]  # fmt: skip
    frame = frame_of(1.0, 1.0, looks, {"own": {(): 9.0}})
    assert frame.levels == {c.QUEUED.name: {(): 5.0}, c.DEGRADED.name: {(): 1.0}, "own": {(): 9.0}}


def test_merging_adds_what_was_gained_and_weighs_levels_by_time():
    a = MetricsFrame(1.0, 1.0, {"x": {(): 2.0}}, {"g": {(): 0.0}, "gone": {(): 1.0}})
    b = MetricsFrame(4.0, 3.0, {"x": {(): 4.0}, "y": {(): 1.0}}, {"g": {(): 8.0}, "new": {(): 5.0}})
    both = merged(a, b)
    assert (both.at_s, both.span_s) == (4.0, 4.0)
    assert both.gained == {"x": {(): 6.0}, "y": {(): 1.0}}
    assert both.levels == {"g": {(): 6.0}, "new": {(): 5.0}}
    assert a.gained == {"x": {(): 2.0}}, "what was there is left alone"


def test_a_ring_has_a_point_per_step_a_gap_where_nobody_looked_and_a_bound():
    ring = Ring(TimeWindow("w", "", 10.0, 5))
    for at_s in [*range(1001, 1031), *range(1051, 1070)]:
        ring.add(MetricsFrame(float(at_s), 1.0, {"x": {(): 1.0}}, {}))
    points = ring.points(1070.0)
    assert [p and p.gained["x"][()] for p in points] == [10.0, 1.0, None, 9.0, 10.0]
    assert ring.times(1070.0) == [1030.0, 1040.0, 1050.0, 1060.0, 1070.0]
    assert len(points) == len(ring.times(1070.0)) == 5
    assert ring.begins_s(1030.0) is not None, "less than the window was looked at, and that is said"
    assert ring.begins_s(1200.0) is None
    for at_s in range(1070, 3000):
        ring.add(MetricsFrame(float(at_s), 1.0, {"x": {(): 1.0}}, {}))
    assert len(ring._steps) == 6
    assert ring.since(2990.0).gained["x"][()] == pytest.approx(9, abs=10)


def test_a_clock_that_is_set_back_breaks_nothing():
    history = History()
    history.add(MetricsFrame(1000.0, 1.0, {}, {}))
    history.add(MetricsFrame(900.0, 1.0, {}, {}))
    assert history.latest.at_s == 1000.0


@given(st.lists(st.floats(0.0001, 70.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_the_bucket_that_has_the_value(values, share):
    bounds = (*LATENCY_BUCKETS, math.inf)
    buckets = {b: float(sum(v <= b for v in values)) for b in bounds}
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    upper = min(b for b in bounds if exact <= b)
    lower = max([b for b in bounds if b < exact], default=0.0)
    assert lower <= quantile(buckets, share) <= upper


def test_quantiles_of_nothing_are_nothing_and_beyond_the_last_bound_the_last_bound():
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 4.0}, 0.5) == 1.0


def test_percentiles_over_time_are_of_a_moving_window():
    def point(le, span_s=10.0):
        counts = {(("le", b),): (1.0 if float(b) >= le else 0.0) for b in ("1", "2", "4")}
        counts[(("le", "+Inf"),)] = 1.0
        return MetricsFrame(0.0, span_s, {"h_bucket": counts}, {})

    times = [10.0, 20.0, 30.0, 40.0, 50.0]
    points = [point(1), None, point(2), point(4), point(4)]
    (line,) = quantiles_over_time(times, points, "h", [1.0], smooth_s=20.0)
    assert line[1] is None
    assert [line[i] for i in (0, 2, 3, 4)] == [1.0, 2.0, 4.0, 4.0]
    old = [point(4), None, None, point(1)]
    (late,) = quantiles_over_time(times[:4], old, "h", [1.0], smooth_s=20.0)
    assert late[3] == 1.0, "what is older than the window does not count"
    # One sample or three fall into a step; the window stays as long whichever the first one has.
    uneven = [
        [point(1, span_s) for span_s in spans] + [point(4)] for spans in ((5, 15, 5, 15), (15, 5, 15, 5))
    ]
    lines = [quantiles_over_time(times, points, "h", [0.6], smooth_s=20.0)[0] for points in uneven]
    assert lines[0] == lines[1] == [0.6, 0.6, 0.6, 0.6, pytest.approx(2.4)]


def verdicts(**counts):
    values = {
        (("outcome", name), ("slo_class", "chat"), ("tenant", "acme")): float(count)
        for name, count in counts.items()
    }
    return MetricsFrame(0.0, 10.0, {c.SLO_REQUESTS.name: values}, {})


def test_goodput_counts_refusals_as_offered_and_cancelled_ones_not_at_all():
    frame = verdicts(
        met=60, missed_ttft=10, refused_queue=20, refused_quota=5, failed=3, deadline=2, cancelled=50
    )
    rates = outcome_rates(frame)
    assert (rates.met, rates.missed, rates.refused, rates.broken) == (6.0, 1.0, 2.5, 0.5)
    (row,) = attainment(frame)
    assert (row.slo_class, row.tenant, row.counts.attained) == ("chat", "acme", 0.6)
    assert attainment(verdicts(cancelled=4)) == []


def test_parts_are_means_over_requests_and_add_up():
    meter = Meter()
    before = looked(meter)
    for _ in range(2):
        for number, part in enumerate(PARTS[:8]):
            meter.observe(c.TTFT_PART, number * 0.01, model="m", part=part)
    means = part_means(frame_of(1.0, 1.0, [(before, looked(meter))]))
    assert means["prefill"] == pytest.approx(0.06)
    assert sum(means.values()) == pytest.approx(0.28)
    assert by_label(None, "x") == {}


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "1e999", "x", ""])
def test_a_value_that_is_no_number_spoils_no_sum(value):
    name = c.RUNNING.name
    page = f'{name}{{worker="a"}} {value}\n{name}{{worker="b"}} 2\n'
    table = MetricsReader(NAMES).read(page)
    assert total(frame_of(1.0, 1.0, [(table, table)]).levels[name]) == 2
