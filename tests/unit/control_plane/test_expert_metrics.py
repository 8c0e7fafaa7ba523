"""The metrics of groups of expert ranks follow their states, and end with them."""

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.core.experts import ExpertRankPhase
from baton.telemetry import catalogue as c
from baton.telemetry.metrics import Meter
from control_plane.expert_metrics import ExpertMetrics
from tests.unit.control_plane.expert_groups import group, rank


def series(meter):
    """Return the values by the text of each series, without counters that were created only."""
    lines = meter.render().decode().splitlines()
    return {
        head: float(value) for head, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def counted(*states):
    meter = Meter()
    metrics = ExpertMetrics(meter)
    for groups in states:
        metrics.count(groups)
    return meter


def test_every_figure_of_a_group_is_exported():
    ranks = (rank(0), rank(1, ExpertRankPhase.STARTING), rank(2))
    meter = counted([group(*ranks, wanted_ranks=4, missing=3, replicas_min=0)])
    name = "decode of m"
    phases = {p: meter.value(c.EXPERT_RANKS, group=name, phase=p) for p in ExpertRankPhase}
    assert phases == {"starting": 1, "ready": 2, "draining": 0, "lost": 0}
    assert meter.value(c.EXPERT_WANTED_RANKS, group=name) == 4
    assert meter.value(c.MISSING_EXPERTS, group=name) == 3
    assert meter.value(c.SINGLE_EXPERTS, group=name) == 192
    assert meter.value(c.EXPERT_REPLICAS_MIN, group=name) == 0
    assert meter.value(c.EXPERT_EPOCH, group=name) == 7
    assert meter.value(c.EXPERT_CALLERS, group=name) == 2
    assert meter.value(c.EXPERT_RANK_BALANCE, group=name, layers="mean") == 0.91
    assert meter.value(c.EXPERT_RANK_BALANCE, group=name, layers="worst") == 0.74
    totals = (c.EXPERT_MIGRATIONS, c.EXPERT_MIGRATED_BYTES, c.EXPERT_RANK_LOSSES, c.EXPERT_REBALANCES)
    assert [meter.value(metric, group=name) for metric in totals] == [12, 12 * 2**20, 1, 5]


def test_rows_of_a_successor_continue_the_series_of_its_name():
    meter = counted(
        [group(rank(0, rows=100, busy_s=1.0))],
        [group(rank(0, rows=140, busy_s=1.5))],
        [group(rank(0, life="b", rows=10, busy_s=0.25))],
        [group(rank(0, life="b", rows=30, busy_s=0.5))],
    )
    labels = {"group": "decode of m", "rank": "experts-decode-0"}
    assert meter.value(c.EXPERT_RANK_ROWS, **labels) == 170
    assert meter.value(c.EXPERT_RANK_BUSY, **labels) == 2.0


def test_counting_twice_changes_nothing():
    once, twice = counted([group()]), counted([group()], [group()])
    assert series(once) == series(twice) != {}


groups = st.lists(
    st.builds(
        lambda role, count, migrations: group(
            *(rank(i, role=role) for i in range(count)), role=role, migrations=migrations
        ),
        st.sampled_from(["prefill", "decode", "aggregated"]),
        st.integers(1, 4),
        st.integers(0, 50),
    ),
    unique_by=lambda one: one.group,
    max_size=3,
)


@given(st.lists(groups, min_size=1, max_size=6))
def test_series_are_those_of_the_present_groups_and_ranks(states):
    meter = counted(*states)
    present = {g.group: g for g in states[-1]}
    shown = {(m["group"], m["rank"]) for m in map(labels_of, series(meter)) if "rank" in m}
    assert shown == {(name, r.name) for name, g in present.items() for r in g.ranks}
    assert {labels_of(head)["group"] for head in series(meter)} == present.keys()


def labels_of(head):
    return dict(re.findall(r'(\w+)="([^"]*)"', head))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_totals_never_fall(totals):
    meter, highest = Meter(), 0
    metrics = ExpertMetrics(meter)
    for total in totals:
        metrics.count([msgspec.structs.replace(group(), losses=total)])
        highest = max(highest, total)
        assert meter.value(c.EXPERT_RANK_LOSSES, group="decode of m") == highest
