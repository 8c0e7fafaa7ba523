"""Texts of the dashboard: numbers with units, checks, problems; and no text from elsewhere becomes HTML."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import Config
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Decision,
    DrainWorker,
    NodeState,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    RoleOutlook,
    RouterState,
)
from baton.core.recent_requests import Moment, RecentRequest
from baton.telemetry import catalogue as c
from control_plane.dashboard import charts, markup, tables, text
from control_plane.dashboard.checks import checks
from control_plane.dashboard.collector import _targets, replica_levels
from control_plane.dashboard.derive import AttainmentRow, Outcomes
from control_plane.dashboard.detail_pages import chosen, worker_facts
from control_plane.dashboard.overview import TierUsage, TileValues, latency_breakdown, objectives, tiers
from control_plane.dashboard.problems import SHOWN_MAX, troubles
from control_plane.dashboard.samples import MetricsFrame

EVIL = "<img src=x onerror=alert(1)>\"'&"
SAFE = re.compile(r"<img|onerror=alert\(1\)>\"")


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "–"), (0.0, "0 ms"), (0.00123, "1.23 ms"), (0.0456, "45.6 ms"), (0.9994, "999 ms"), (1.0, "1 s"),
     (2.345, "2.35 s"), (123.4, "123 s")],
)  # fmt: skip
def test_latencies_say_their_unit(value, said):
    assert text.seconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "–"), (0.0, "0 %"), (0.0512, "5.1 %"), (0.5, "50 %"), (0.99999, "99.99 %"), (1.0, "100 %")],
)
def test_shares_are_never_rounded_up_to_all(value, said):
    assert text.share(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1536 * 2**10, "1.5 MiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_sizes_are_binary(value, said):
    assert text.size(value) == said


def test_counts_are_grouped_and_spans_rough():
    assert text.number(1234567) == "1\u202f234\u202f567"
    assert [text.span(s) for s in (0.4, 12, 130, 7300, 200_000)] == ["0.4 s", "12 s", "2 min", "2 h", "2 d"]


def replica(name="decode-0", state=ReplicaState.RUNNING, role=Role.DECODE, **fields):
    given = {"model": "m", "for_s": 12.0, "version": "1", "worker_id": WorkerId(f"{name}.ab"), **fields}
    return ReplicaStatus(name=name, role=role, state=state, **given)


def state(*replicas, **fields):
    pools = (Pool("m", {Role.PREFILL: 1, Role.DECODE: 1}),)
    routers = (RouterState(RouterId("router-1"), "h:1", "h:2"),)
    return ClusterState("life", pools, replicas, **{"routers": routers, **fields})


AGGREGATED = (replica("prefill-0", role=Role.PREFILL), replica())


def past(gained=(), levels=()):
    def table(pairs):
        found = {}
        for name, labels, value in pairs:
            found.setdefault(name, {})[tuple(sorted(labels.items()))] = value
        return found

    return MetricsFrame(0.0, 60.0, table(gained), table(levels))


def verdicts(*args, config=None):
    return {check.name: check.verdict for check in checks(config or Config(), *args)}


def test_nothing_is_claimed_before_anything_was_seen():
    assert checks(Config(), None, past()) == []
    idle = verdicts(state(*AGGREGATED), past())
    assert idle["Remote prefill"] == idle["Prefix cache"] == idle["KV transport"] == "idle"
    assert idle["Mutual TLS"] == idle["Objectives"] == "off"


def test_a_feature_counts_as_on_when_counters_prove_it():
    seen = past(
        [
            (c.PLACEMENTS.name, {"kind": "split"}, 8.0),
            (c.TRANSFER_BYTES.name, {"worker": "w", "backend": "cma"}, 4096.0),
            (c.TRANSFER_READS.name, {"worker": "w", "outcome": "ok"}, 5.0),
            (c.PROMPT_TOKENS.name, {"model": "m"}, 100.0),
            (c.CACHED_TOKENS.name, {"model": "m"}, 40.0),
            (c.WRITTEN_BLOCKS.name, {"worker": "w"}, 4.0),
            (c.LOADED_BLOCKS.name, {"worker": "w", "tier": "host"}, 3.0),
        ],
        [(c.INDEXED_BLOCKS.name, {"worker": "w"}, 7.0), (c.STORE_JOINED.name, {"worker": "w"}, 1.0)],
    )
    found = verdicts(state(*AGGREGATED), seen)
    for name in ("Remote prefill", "KV transport", "Prefix cache", "Cache events", "KV store"):
        assert found[name] == "on", name


@pytest.mark.parametrize(
    ("name", "gained", "levels"),
    [
        ("Remote prefill", [(c.PLACEMENTS.name, {"kind": "split"}, 8.0)], []),
        ("Remote prefill", [], [(c.DEGRADED.name, {"pool": "decode"}, 1.0)]),
        ("KV transport", [(c.TRANSFER_BYTES.name, {"backend": "tcp"}, 9.0)], []),
        (
            "KV transport",
            [
                (c.TRANSFER_BYTES.name, {"backend": "cma"}, 9.0),
                (c.TRANSFER_READS.name, {"outcome": "failed"}, 1.0),
            ],
            [],
        ),
        ("Cache events", [], [(c.STALE.name, {"worker": "w"}, 1.0)]),
        ("KV store", [], [(c.STORE_JOINED.name, {"worker": "w"}, 0.0)]),
        ("Placement by prediction", [], [(c.PREDICTOR_FALLBACK.name, {}, 1.0)]),
    ],
)
def test_what_should_work_and_does_not_is_said(name, gained, levels):
    assert verdicts(state(*AGGREGATED), past(gained, levels))[name] == "bad"


def test_objectives_that_nobody_has_are_told():
    config = Config.model_validate({"slo": {"classes": {"chat": {"ttft_s": 1.0}}}})
    counted = [(c.SLO_REQUESTS.name, {"slo_class": "none", "tenant": "t", "outcome": "met"}, 3.0)]
    assert verdicts(state(*AGGREGATED), past(counted), config=config)["Objectives"] == "bad"
    counted = [(c.SLO_REQUESTS.name, {"slo_class": "chat", "tenant": "t", "outcome": "met"}, 3.0)]
    assert verdicts(state(*AGGREGATED), past(counted), config=config)["Objectives"] == "on"


def test_two_routers_that_do_not_know_each_other_are_told():
    routers = tuple(RouterState(RouterId(f"router-{i}"), "h:1", "h:2") for i in range(2))
    two = state(*AGGREGATED, routers=routers)
    assert verdicts(two, past(levels=[(c.PEERS.name, {}, 1.0)]))["Routers share load"] == "bad"
    assert verdicts(two, past(levels=[(c.PEERS.name, {}, 2.0)]))["Routers share load"] == "on"


def said(*args, control="", silent_s=0.0, unreadable=()):
    return [t.text for t in troubles(*args, control=control, silent_s=silent_s, unreadable=unreadable)]


def test_a_healthy_cluster_has_no_troubles():
    assert said(state(*AGGREGATED), past()) == []
    assert said(None, None) == []


def test_lost_things_are_said():
    lost = (
        replica("prefill-0", ReplicaState.WAITING, last_exit="killed by signal 9"),
        replica("decode-0", ReplicaState.SUSPECT),
        replica("decode-1", ReplicaState.STARTING, last_exit="killed by signal 9"),
    )
    found = said(
        state(*lost, routers=(), nodes=(NodeState("n" * 40, "", is_alive=False),)),
        past(),
        unreadable=["worker x"],
    )
    for words in (
        "prefill-0 has had no process",
        "killed by signal 9",
        "decode-0 missed heartbeats",
        "decode-1 has been restarting",
        "No router",
        "nnnnnnnnnnnn is lost",
        "worker x does not answer to scrapes",
    ):
        assert any(words in line for line in found), words
    silent = said(state(*lost), past(), control="gone", silent_s=9.0)
    assert len(silent) == 1
    assert silent[0].startswith("The control plane does not answer (last report 9.0 s ago).")


def test_many_troubles_do_not_fill_the_page():
    many = [replica(f"decode-{i}", ReplicaState.SUSPECT) for i in range(40)]
    found = said(state(*many), past())
    assert len(found) == SHOWN_MAX + 1
    assert found[-1] == f"… and {40 - SHOWN_MAX} more."


def test_a_worker_that_starts_for_the_first_time_is_no_trouble():
    assert (
        said(state(replica(state=ReplicaState.STARTING), replica(state=ReplicaState.DRAINING)), past()) == []
    )


def record(**fields):
    given = {
        "request_id": EVIL,
        "arrived_s": 0.0,
        "took_s": 1.0,
        "error": EVIL,
        "slo_class": EVIL,
        "tenant": EVIL,
    }
    return RecentRequest(**{**given, **fields})


def test_what_processes_say_of_themselves_never_becomes_html():
    evil = replica(
        EVIL,
        ReplicaState.WAITING,
        last_exit=EVIL,
        reason=EVIL,
        node=EVIL,
        model=EVIL,
        address=EVIL,
        shape=EVIL,
    )
    cluster = state(evil, nodes=(NodeState(EVIL, EVIL),))
    moment = Moment(0.1, EVIL, EVIL, EVIL, (WorkerId(EVIL),), 1.0, 5)
    hostile = record(
        outcome=EVIL, verdict=EVIL, prefill_worker=EVIL, moments=(moment,), parts={EVIL: 1.0, "prefill": 1.0}
    )
    decision = Decision(1, 0.0, EVIL, EVIL, DrainWorker(EVIL), Outcome.DONE, EVIL)
    pieces = [
        tables.workers(cluster, None, may_operate=True),
        tables.nodes(cluster.nodes, may_operate=True),
        tables.requests([hostile]),
        tables.record_facts(hostile),
        tables.moments(hostile),
        tables.accounts({"pid": 1.0}, [EVIL]),
        markup.decisions([decision]),
        markup.decision_log([decision], 4),
        markup.troubles(troubles(cluster, None, control="", silent_s=0.0, unreadable=[EVIL])),
        markup.attainment([AttainmentRow(EVIL, EVIL, Outcomes(1.0))], 0.9),
        markup.tiers([TierUsage(EVIL, 1.0, 2.0, EVIL, 0.5)]),
        markup.checks(
            checks(Config(), state(*AGGREGATED), past(levels=[(c.STALE.name, {"worker": EVIL}, 1.0)]))
        ),
    ]
    assert [piece for piece in pieces if SAFE.search(piece)] == []
    assert all("img" in piece for piece in pieces), "it is shown, as text"
    assert "img" not in markup.latency_breakdown(tables.record_bars(hostile)), "an unknown part has no place"


def test_a_worker_shows_its_shape_and_what_it_means():
    cluster = state(replica("decode-0", ReplicaState.RUNNING, shape="tp2pp2"))
    assert '<td title="4 ranks: 2 tensor × 2 pipeline">tp2pp2</td>' in tables.workers(
        cluster, None, may_operate=False
    )
    assert (tables.ranks_text("1"), tables.ranks_text("")) == ("1 rank", "")
    facts = worker_facts(cluster.replicas[0], None)
    assert "tp2pp2 <span class=dim>4 ranks: 2 tensor × 2 pipeline</span>" in facts


def test_an_action_is_offered_to_those_who_may():
    cluster = state(*AGGREGATED, nodes=(NodeState("node", "host"),))
    assert "Drain…" in tables.workers(cluster, None, may_operate=True)
    assert "Drain…" not in tables.workers(cluster, None, may_operate=False)
    assert "Drain…" not in tables.nodes(cluster.nodes, may_operate=False)


def test_the_autoscaler_says_what_it_makes_of_the_load():
    assert "is off" in tables.autoscaler(None)
    outlook = RoleOutlook(Role.DECODE, 410.0, 520.0, "tokens/s", 1.1, 3, 2)
    said = tables.autoscaler(AutoscaleState("advise", EVIL, (outlook,), 41.0, 20.0, 2.0))
    assert "changes nothing" in said
    assert "<td class=n>520</td><td>tokens/s</td>" in said
    assert not SAFE.search(said)
    assert "carries out its decisions" in tables.autoscaler(AutoscaleState("on"))


def test_requests_in_trouble_are_told_apart():
    recent_requests = [
        record(outcome="completed", verdict="met", attempts=1),
        record(outcome="completed", verdict="missed_ttft"),
        record(outcome="completed", verdict="met", attempts=2),
        record(outcome="running"),
    ]
    assert len(chosen(recent_requests, "all")) == 4
    assert [s.verdict for s in chosen(recent_requests, "trouble")] == ["missed_ttft", "met"]
    assert [s.outcome for s in chosen(recent_requests, "running")] == ["running"]
    late = record(outcome="completed", verdict="missed_ttft", ttft_s=2.0, ttft_slo_s=1.0)
    assert "above its objective" in tables.requests([late])


def test_empty_states_say_what_is_missing():
    assert "not answered yet" in tables.workers(None, None, may_operate=True)
    assert "No request" in markup.attainment([], 0.9)
    assert "No decision yet" in markup.decisions([])
    assert "No decision yet" in markup.decision_log([], 4)
    assert "No metrics were collected yet" in markup.checks([])
    assert latency_breakdown(None) == []
    assert "No request has reported" in markup.latency_breakdown([])
    now = TileValues(Outcomes(), None, None, None, None, None, None, None, None, None, 0, 0)
    assert "–" in markup.tiles(now, None, None, window="15 min", attain=0.9)


def test_an_objective_is_a_line_and_equal_ones_are_one():
    classes = {"a": {"ttft_s": 1.0, "tpot_s": 0.1}, "b": {"ttft_s": 1.0}, "c": {"ttft_s": 5.0}}
    config = Config.model_validate({"slo": {"classes": classes}})
    found = objectives(config, "ttft_s")
    assert [(o.name, o.value) for o in found] == [("a, b", 1.0), ("c", 5.0)]
    options = charts.timeline(
        [1.0, 2.0], [charts.ChartLine("p50", [0.1, None], "c-blue")], unit="seconds", objectives=found
    )
    (series,) = options["series"]
    assert [line["yAxis"] for line in series["markLine"]["data"]] == [1.0, 5.0]
    assert series["markLine"]["precision"] >= 6, "an objective of milliseconds is drawn where it is"
    assert series["data"] == [[1000, 0.1], [2000, None]], "a gap stays a gap"


def test_tiers_tell_how_full_they_are():
    now = past(
        levels=[
            (c.HELD_BLOCKS.name, {"worker": "w"}, 25.0),
            (c.FREE_BLOCKS.name, {"worker": "w"}, 75.0),
            (c.BLOCK_BYTES.name, {"worker": "w"}, 1000.0),
            (c.HELD_BLOCKS.name, {"worker": "of another model"}, 1.0),
            (c.FREE_BLOCKS.name, {"worker": "of another model"}, 9.0),
            (c.BLOCK_BYTES.name, {"worker": "of another model"}, 50.0),
            (c.STORE_LIMIT_BYTES.name, {"tier": "host"}, 1000.0),
            (c.STORE_BYTES.name, {"tier": "host"}, 400.0),
            (c.STORE_LIMIT_BYTES.name, {"tier": "ssd"}, 0.0),
        ]
    )
    seen = past([(c.STORE_HITS.name, {"tier": "host"}, 3.0), (c.STORE_MISSES.name, {}, 1.0)])
    pools, host = tiers(now, seen)
    assert (pools.used_bytes, pools.limit_bytes) == (25_050.0, 100_500.0)
    assert (host.used_bytes, host.limit_bytes, host.hit_share) == (400.0, 1000.0, 0.75)


def test_a_worker_is_found_by_the_name_that_its_metrics_have():
    now = past(levels=[(c.RUNNING.name, {"worker": "decode-0"}, 3.0), (c.RUNNING.name, {"worker": "w"}, 1.0)])
    assert tables.of_worker(now, c.RUNNING.name, "decode-0.ab") == 3.0
    assert tables.of_worker(now, c.WAITING.name, "decode-0.ab") is None


def test_whom_to_ask_and_how_many_there_are():
    cluster = state(replica(metrics_address="h:9"), replica("decode-1", ReplicaState.WAITING, worker_id=None))
    assert [(t.kind, t.name, t.address) for t in _targets(cluster, ())] == [
        ("router", "router-1", "h:2"),
        ("worker", "decode-0.ab", "h:9"),
    ]
    (counts,) = replica_levels(cluster).values()
    assert counts == {
        (("role", "decode"), ("state", "running")): 1.0,
        (("role", "decode"), ("state", "waiting")): 1.0,
    }
    assert replica_levels(None) == {}


def test_attainment_says_the_model_where_there_are_several():
    rows = [AttainmentRow("chat", "t", Outcomes(1.0), model) for model in ("small", "large")]
    assert "small" not in markup.attainment(rows[:1], 0.9)
    both = markup.attainment(rows, 0.9)
    assert "<th>model</th>" in both
    assert both.index("small") < both.index("large")


@pytest.mark.parametrize(
    ("at", "labels"),
    [
        ([], []),
        ([0, 50, 100], ["#1", "#2", "#3"]),
        ([0, 5, 9, 50], ["#1–3", "", "", "#4"]),
        ([0, 9, 18, 27], ["#1–2", "", "#3–4", ""]),
    ],
)
def test_decisions_that_are_close_share_a_label(at, labels):
    marks = [charts.Mark(float(at_s), f"#{number}", "c-red") for number, at_s in enumerate(at, 1)]
    assert charts.mark_labels(marks, apart_s=10.0) == labels


def test_marks_out_of_order_are_drawn_in_order_and_those_beyond_the_chart_are_not():
    marks = [charts.Mark(at_s, f"#{at_s:.0f}", "c-red") for at_s in (90.0, 10.0, 300.0, 12.0)]
    options = charts.timeline([0.0, 100.0], [], unit="count", marks=marks)
    drawn = options["series"][-1]["markLine"]["data"]
    assert [(line["name"], line["label"]["show"]) for line in drawn] == [
        ("#10–12", True),
        ("", False),
        ("#90", True),
    ]


@pytest.mark.parametrize(
    "show",
    [text.number, text.seconds, text.share, text.size, text.rate, text.span, text.clock, markup._whole],
)
@given(value=st.floats())
@settings(max_examples=200, deadline=None)
def test_any_number_can_be_shown(show, value):
    """Processes send these numbers; a page with one that makes no sense must still be there."""
    shown = show(value)
    assert 0 < len(shown) < 500
    assert text.h(shown) == shown
