"""Rules and dashboards: they parse, they name what there is, and alerts come and go as they should."""

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.telemetry import catalogue as cat
from baton.telemetry.alerts import BUDGET, BURNS, OBJECTIVE_MIN, alerts, rules
from baton.telemetry.grafana import model
from baton.telemetry.panels import DASHBOARDS
from baton.telemetry.promql import SCRAPED_LABELS, Promql
from baton.telemetry.render import rendered

ROOT = Path(__file__).parents[3]
METRICS = {m.name: m for m in cat.CATALOGUE}
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and not os.environ.get("CI"),
    reason="no promtool: apt-get install prometheus",
)


def promtool(*args):
    """Its standard output and error; fails if it does."""
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def expressions():
    """(where, expression) of everything that is generated."""
    for group in rules()["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert", rule.get("record")), rule["expr"]
    for dashboard in DASHBOARDS:
        for panel in model(dashboard)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{dashboard.uid}: {panel['title']}", target["expr"]


RECORDED = {rule["record"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule}
SERIES = re.compile(r"\b(baton[a-z0-9_:]*)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left) ?\(([^)]*)\)")


def metric_of(name):
    base = next((name.removesuffix(p) for p in HISTOGRAM_PARTS if name.removesuffix(p) in METRICS), name)
    metric = METRICS[base]
    assert (metric.kind == "histogram") == (base != name), name
    return metric


def unknown(expression):
    """What an expression names that nobody exports."""
    labels = set()
    for name, matchers in SERIES.findall(expression):
        if name in RECORDED:
            labels |= {"slo_class", "model"}
            continue
        try:
            metric = metric_of(name)
        except KeyError:
            yield name
            continue
        known = {*metric.labels, *SCRAPED_LABELS, "le"}
        labels |= known
        for matcher in filter(None, matchers.split(",")):
            label = re.match(r"[a-z_]+", matcher)[0]
            if label not in known:
                yield f"{name}{{{label}}}"
    for names in GROUPING.findall(expression):
        yield from (n for n in re.findall(r"[a-z_]+", names) if n not in labels)


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda v: v[:60])
def test_expressions_name_metrics_and_labels_of_the_catalogue(where, expression):
    assert SERIES.search(expression)
    assert list(unknown(expression)) == []


def test_unknown_names_would_be_noticed():
    assert list(unknown("rate(baton_nonsense_total[5m])")) == ["baton_nonsense_total"]
    assert list(unknown('baton_requests_total{color="red"}')) == ["baton_requests_total{color}"]
    assert list(unknown("sum by (color) (baton_requests_total)")) == ["color"]
    with pytest.raises(AssertionError, match="no label"):
        Promql().gauge(cat.QUEUED, "sum", "worker")
    with pytest.raises(AssertionError, match="no label"):
        Promql().of(cat.QUEUED, worker="w")
    with pytest.raises(AssertionError, match="part"):
        Promql().of(cat.TTFT)


def test_every_metric_is_on_a_dashboard():
    shown = " ".join(query.expression for dashboard in DASHBOARDS for _, query in dashboard.queries())
    names = {metric_of(name).name for name, _ in SERIES.findall(shown)}
    # OpenTelemetry's names repeat Baton's own, for tools that have dashboards of their own.
    own = {name for name in METRICS if not name.startswith("gen_ai_")}
    assert own - names == set()


@needs_promtool
def test_prometheus_accepts_the_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(rendered()["rules/baton.yaml"])
    count = sum(len(group["rules"]) for group in rules()["groups"])
    assert f"{count} rules found" in promtool("check", "rules", path)


def as_prometheus_sees_it(expression):
    return expression.replace("$__rate_interval", "1m").replace("$namespace", ".*")


@needs_promtool
def test_prometheus_parses_every_panel(tmp_path):
    queries = itertools.chain.from_iterable(dashboard.queries() for dashboard in DASHBOARDS)
    records = [
        {"record": f"panel:{index}", "expr": as_prometheus_sees_it(query.expression)}
        for index, (_, query) in enumerate(queries)
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", path)


def test_panels_have_room_and_names_of_their_own():
    for dashboard in DASHBOARDS:
        panels = model(dashboard)["panels"]
        assert len({p["id"] for p in panels}) == len(panels)
        taken = set()
        for place in (p["gridPos"] for p in panels):
            cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
            assert not cells & taken, dashboard.uid
            assert place["x"] + place["w"] <= 24
            taken |= cells
        json.dumps(panels)


def test_every_alert_is_in_the_runbook():
    text = (ROOT / "docs/operations.md").read_text()
    headings = {line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")}
    assert {alert.name for alert in alerts()} <= headings


def test_the_fastest_burn_can_be_reached_with_the_lowest_objective():
    assert max(burn.factor for burn in BURNS) * (1 - OBJECTIVE_MIN) < 1
    burns = [alert.expression for alert in alerts() if "SloBurn" in alert.name]
    assert all(expression.count(BUDGET) == 2 for expression in burns)


# --- what alerts do ----------------------------------------------------------------------------------

SLO = 'baton_slo_requests_total{{model="m",slo_class="chat",tenant="t",outcome="{}"}}'


def requests(met, missed, *, minutes, quota=0):
    """Return series of one class with these requests per minute."""
    rates = {"met": met, "missed_ttft": missed, "refused_quota": quota}
    return {SLO.format(outcome): f"0+{rate}x{minutes}" for outcome, rate in rates.items() if rate}


def worker(**values):
    return {f'baton_{name}{{worker="w"}}': f"{value}x30" for name, value in values.items()}


def group(**values):
    return {f'baton_{name}{{group="g"}}': f"{value}x30" for name, value in values.items()}


def phases(**counts):
    return {f'baton_expert_ranks{{group="g",phase="{name}"}}': f"{n}x30" for name, n in counts.items()}


def balances(**values):
    name = "baton_expert_rank_balance_ratio"
    return {f'{name}{{group="g",layers="{layers}"}}': f"{v}x50" for layers, v in values.items()} | SOMEBODY


IDLE = {"running_sequences": "0", "waiting_sequences": "0", "prefill_leased_sequences": "0"}
SOMEBODY = {"baton_router_queued_sequences": "0x5000"}
"""Else BatonNoRouter is true everywhere."""

CASES = {
    "nobody is there": ({"up": "1x10"}, "5m", {"BatonNoRouter"}),
    "all is well": (requests(100, 1, minutes=70) | SOMEBODY, "1h", set()),
    "everything misses": (requests(0, 100, minutes=70) | SOMEBODY, "1h", {"BatonSloBurnFast"}),
    "a third misses for hours": (
        requests(60, 35, minutes=400) | SOMEBODY,
        "6h30m",
        {"BatonSloBurnFast", "BatonSloBurnSlow"},
    ),
    "a fifth misses for a day": (
        requests(80, 20, minutes=1600) | SOMEBODY,
        "26h",
        {"BatonSloBurnSlow"},
    ),
    "it was bad and is well again": (
        {SLO.format("met"): "0+100x90", SLO.format("missed_ttft"): "0+900x50 45000x40"} | SOMEBODY,
        "80m",
        {"BatonSloBurnSlow"},  # the page ends, what was lost of the budget stays
    ),
    "a tenant beyond its quota": (requests(100, 0, minutes=70, quota=900) | SOMEBODY, "1h", set()),
    "a pool is empty": (
        {'baton_router_degraded_ratio{model="m",pool="decode"}': "1x30"} | SOMEBODY,
        "5m",
        {"BatonPoolDegraded"},
    ),
    "a pool was empty for a moment": (
        {'baton_router_degraded_ratio{model="m",pool="decode"}': "1 1 0x30"} | SOMEBODY,
        "5m",
        set(),
    ),
    "refusals": (
        {
            f'baton_requests_total{{model="m",outcome="{o}"}}': f"0+{n}x40"
            for o, n in (("refused", 10), ("completed", 90))
        }
        | SOMEBODY,
        "30m",
        {"BatonRefusing"},
    ),
    "failures": (
        {
            f'baton_requests_total{{model="m",outcome="{o}"}}': f"0+{n}x40"
            for o, n in (("failed", 3), ("completed", 90))
        }
        | SOMEBODY,
        "30m",
        {"BatonFailing"},
    ),
    "wrong requests are not refusals": (
        {
            f'baton_requests_total{{model="m",outcome="{o}"}}': f"0+{n}x40"
            for o, n in (("invalid", 90), ("completed", 10))
        }
        | SOMEBODY,
        "30m",
        set(),
    ),
    "a replica dies again and again": (
        {'baton_replica_restarts_total{replica="decode-0",cause="exited"}': "0+1x40"} | SOMEBODY,
        "30m",
        {"BatonReplicasRestarting"},
    ),
    "replicas do not start": (
        {'baton_replica_workers{model="m",role="decode",state="starting"}': "1x40"} | SOMEBODY,
        "30m",
        {"BatonReplicasMissing"},
    ),
    "blocks leak": (worker(kv_held_blocks="3", **IDLE) | SOMEBODY, "20m", {"BatonBlocksLeaking"}),
    "blocks are in use": (
        worker(kv_held_blocks="3", **{**IDLE, "running_sequences": "1"}) | SOMEBODY,
        "20m",
        set(),
    ),
    "blocks are quarantined": (
        worker(kv_quarantined_blocks="2") | SOMEBODY,
        "20m",
        {"BatonBlocksQuarantined"},
    ),
    "leases leak": (worker(prefill_leased_sequences="2") | SOMEBODY, "25m", {"BatonLeasesLeaking"}),
    "leases are read": (
        worker(prefill_leased_sequences="2")
        | {'baton_transfer_reads_total{worker="d",outcome="ok"}': "0+50x30"}
        | SOMEBODY,
        "25m",
        set(),
    ),
    "leases end unread": (worker(leases_expired_total="0+2") | SOMEBODY, "25m", {"BatonLeasesExpiring"}),
    "a worker is not heard": (worker(router_stale_ratio="1") | SOMEBODY, "5m", {"BatonEventStreamStalled"}),
    "predictions are off": (
        {'baton_predictor_fallback_ratio{model="m"}': "1x30"} | SOMEBODY,
        "20m",
        {"BatonPredictorOff"},
    ),
    "a breaker is open": (worker(router_breaker_open_ratio="1") | SOMEBODY, "10m", {"BatonBreakerOpen"}),
    "retries are refused": (
        {"baton_router_refused_retries_total": "0+3x30"} | SOMEBODY,
        "20m",
        {"BatonRetriesRefused"},
    ),
    "a read was corrupt": (
        {'baton_transfer_reads_total{worker="d",outcome="corrupt"}': "0x5 1x30"} | SOMEBODY,
        "10m",
        {"BatonTransferCorrupt"},
    ),
    "a store is away": (
        worker(store_joined_ratio="0") | {'baton_store_limit_bytes{tier="host"}': "1000x30"} | SOMEBODY,
        "10m",
        {"BatonStoreAway"},
    ),
    "no store is wanted": (worker(store_joined_ratio="0") | SOMEBODY, "10m", set()),
    "a stored block was corrupt": (
        {'baton_store_corrupt_blocks_total{instance="n",tier="ssd"}': "0x5 1x30"} | SOMEBODY,
        "10m",
        {"BatonStoreCorrupt"},
    ),
    "a disk fails": (
        {'baton_store_ssd_errors_total{instance="n",kind="read"}': "0+1x30"} | SOMEBODY,
        "20m",
        {"BatonStoreDiskFailing"},
    ),
    "experts have no replica": (
        group(expert_missing_experts="3") | SOMEBODY,
        "5m",
        {"BatonExpertsMissing"},
    ),
    "experts had no replica for a moment": (
        {'baton_expert_missing_experts{group="g"}': "3 0x30"} | SOMEBODY,
        "5m",
        set(),
    ),
    "a worker is parked": (
        {'baton_parked_workers{worker="decode-0"}': "0x4 1x60"} | SOMEBODY,
        "8m",
        {"BatonWorkersParked"},
    ),
    "a worker was parked for a moment": (
        {'baton_parked_workers{worker="decode-0"}': "0x4 1 0x60"} | SOMEBODY,
        "8m",
        set(),
    ),
    "a group is below strength": (
        group(expert_wanted_ranks="4") | phases(ready=3, starting=1) | SOMEBODY,
        "25m",
        {"BatonExpertRanksMissing"},
    ),
    "a group has no ready rank at all": (
        group(expert_wanted_ranks="2") | phases(ready=0, lost=2) | SOMEBODY,
        "25m",
        {"BatonExpertRanksMissing"},
    ),
    "a group has all its ranks": (
        group(expert_wanted_ranks="4", expert_missing_experts="0") | phases(ready=4) | SOMEBODY,
        "25m",
        set(),
    ),
    "ranks are lost again and again": (
        group(expert_rank_losses_total="0+1") | SOMEBODY,
        "25m",
        {"BatonExpertRanksLost"},
    ),
    "two ranks were lost": (
        {'baton_expert_rank_losses_total{group="g"}': "0x5 1x5 2x30"} | SOMEBODY,
        "25m",
        set(),
    ),
    "one rank has all the load": (balances(mean=0.4, worst=0.2), "45m", {"BatonExpertsUneven"}),
    "one layer is uneven": (balances(mean=0.8, worst=0.2), "45m", set()),
    "the directory is full": (
        {"baton_directory_dropped_blocks_total": "0+10x40"} | SOMEBODY,
        "35m",
        {"BatonDirectoryFull"},
    ),
}


def test_every_alert_is_tried():
    tried = set().union(*(fires for _, _, fires in CASES.values()))
    assert tried == {alert.name for alert in alerts()}


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    """All cases in one run. promtool compares labels and texts of alerts too, so it is asked for the built-in
    series ALERTS instead, which has the names."""
    (tmp_path / "rules.yaml").write_text(rendered()["rules/baton.yaml"])
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
                    "eval_time": at,
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(fires)
                    ],
                }
            ],
        }
        for name, (series, at, fires) in CASES.items()
    ]
    path = tmp_path / "tests.yaml"
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    promtool("test", "rules", path)
