"""A fleet whose size changes: what starts, switches roles, drains and costs, and whether sizing agrees with
it."""

import pytest
from typer.testing import CliRunner

from baton.core.messages import Role
from benchmarks.autoscale_loads import AutoscaleLoad, MeanLengths, drawn, of_trace, profile_of
from benchmarks.autoscale_runs import AutoscaleCase, stage
from benchmarks.autoscale_static import best_static
from commands.app import app
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.sizing import DecodeLoad, PromptGroup, decode_needed, prefill_needed
from control_plane.autoscaler.values import (
    AutoscalerSettings,
    LatencyObjective,
    PoolBounds,
    RoleState,
    RoleSwitch,
    ScalingDecision,
)
from loadgen.records import RequestOutcome
from simulator.fleet.fleet import Fleet
from simulator.fleet.scaling import FleetScaling, ScalingSpec, traits_of
from simulator.fleet.scaling_report import figures_of, scaling_section
from simulator.fleet.scaling_rules import HorizontalPodAutoscaler, QueueDepth, make_rule
from simulator.fleet.setup import PoolSizes
from simulator.fleet.workload import FleetRequest, poisson
from tests.unit.control_plane.simulated_cluster import KIND, observed
from tests.unit.simulator.test_fleet import assert_at_rest, spec_of

P, D = Role.PREFILL, Role.DECODE


class Script:
    """A rule that decides what it was told, at its interval's number, and else that nothing changes."""

    def __init__(self, **at):
        self.journal = Journal()
        self._at = {int(number.lstrip("i")): decision for number, decision in at.items()}
        self._number = 0
        self.seen = []

    def decide(self, seen, traits):
        self.seen.append(seen)
        self._number += 1
        have = {role: seen.of(role).have for role in traits}
        switches, starts, stops = self._at.get(self._number, ((), {}, {}))
        return ScalingDecision(seen.at_s, have, switches, starts, stops, ("told",), {}, False)


def scaled(script, requests, *, pools=((P, 2), (D, 2)), **more):
    fleet = Fleet(spec_of(*pools))
    scaling = FleetScaling(fleet, ScalingSpec(**{"start_s": 10.0, "interval_s": 5.0, **more}), script)
    scaling.begin()
    fleet.run(iter(requests))
    return fleet, scaling


def some(count=200, rate=5.0, tokens=200, output=30):
    return poisson(rate=rate, count=count, input_tokens=tokens, output_tokens=output)


def assert_all_served(fleet, count):
    assert len(fleet.stats) == count
    assert all(record.outcome is RequestOutcome.COMPLETED for record in fleet.stats)
    assert_at_rest(fleet)


def test_a_static_fleet_costs_its_workers_times_the_time():
    fleet, scaling = scaled(Script(), some(), gpus_per_worker=4)
    assert scaling.gpu_s == pytest.approx(4 * 4 * fleet.clock.now_s)
    assert_all_served(fleet, 200)


def test_a_started_worker_serves_after_its_delay_and_is_paid_from_the_start():
    script = Script(i2=((), {P: 1}, {}))
    fleet, scaling = scaled(script, some(400, rate=15.0, tokens=4000))
    serving = [seen.of(P).serving for seen in script.seen]
    assert serving[:4] == [2, 2, 2, 3]
    assert [seen.of(P).starting for seen in script.seen][:4] == [0, 0, 1, 0]
    assert script.seen[3].start_s == (10.0,)
    assert scaling.gpu_s == pytest.approx(5 * fleet.clock.now_s - 10.0)
    assert {record.served_by[0] for record in fleet.stats} == {"prefill-0.0", "prefill-1.0", "prefill-2.0"}
    assert_all_served(fleet, 400)


def test_a_stopped_worker_finishes_what_it_has_and_is_paid_until_then():
    script = Script(i2=((), {}, {D: 1}))
    fleet, scaling = scaled(script, some(output=1500))
    assert len(fleet.workers) == 3
    assert script.seen[2].of(D).draining == 1
    assert scaling.drain_s_max > 3.0
    assert 3 * fleet.clock.now_s < scaling.gpu_s < 4 * fleet.clock.now_s
    assert_all_served(fleet, 200)


def test_a_switched_worker_serves_in_its_new_role_and_nothing_is_lost():
    script = Script(i2=((RoleSwitch(P, D, 1),), {}, {}), i4=((RoleSwitch(D, P, 1),), {}, {}))
    fleet, scaling = scaled(script, some())
    assert (scaling.switches, scaling.starts, scaling.stops) == (2, 0, 0)
    assert [seen.of(D).serving for seen in script.seen][3] == 3
    assert sum(len(seen.switch_s) for seen in script.seen) == 2
    assert scaling.gpu_s == pytest.approx(4 * fleet.clock.now_s)
    assert_all_served(fleet, 200)


def test_a_worker_that_has_not_started_is_given_up_first():
    script = Script(i1=((), {P: 1}, {}), i2=((), {}, {P: 1}))
    fleet, scaling = scaled(script, some())
    assert max(seen.of(P).serving for seen in script.seen) == 2
    assert len(fleet.workers) == 4
    assert scaling.gpu_s == pytest.approx(4 * fleet.clock.now_s + 5.0)


def test_routers_hold_what_comes_while_there_is_no_worker():
    bounds = {P: PoolBounds(0, 4), D: PoolBounds(0, 4)}
    config = AutoscalerSettings(
        bounds=bounds,
        objectives={"": LatencyObjective(1.0, 0.05)},
        interval_s=5.0,
        start_s=10.0,
        hold_s=60.0,
        zero_after_s=60.0,
        patience_s=10.0,
    )
    early, late = list(some(20)), [d._replace(at_s=d.at_s + 400.0) for d in some(20)]
    requests = [d._replace(number=i) for i, d in enumerate([*early, *late])]
    rule = make_rule("baton", config)
    fleet, scaling = scaled(rule, requests)
    zero = [sample for sample in scaling.samples if not any(sample.serving.values())]
    assert zero
    assert all(60.0 < sample.at_s < 420.0 for sample in zero)
    assert_all_served(fleet, 40)
    waited = max(r.ttft_s for r in fleet.stats if r.planned_s > 390.0)
    assert 10.0 < waited < 20.0, "one start, and what looking takes"


def test_advice_changes_nothing():
    script = Script(i2=((), {P: 3}, {}))
    fleet, scaling = scaled(script, some(), is_advice=True)
    assert len(fleet.workers) == 4
    assert scaling.starts == 0
    assert_all_served(fleet, 200)


# --- sizing against the simulator -----------------------------------------------------------------


def missed_share(fleet, *, ttft_s=None, tpot_s=None):
    late = 0
    for record in fleet.stats:
        late += ttft_s is not None and (record.ttft_s is None or record.ttft_s > ttft_s)
        late += tpot_s is not None and record.tpot_s is not None and record.tpot_s > tpot_s
    return late / len(fleet.stats)


@pytest.mark.parametrize("rate", [45.0, 80.0])
def test_as_many_prefill_workers_as_sizing_says_do_and_fewer_do_not(rate):
    """The objective is a TTFT of 150 ms at prompts that take 29 ms, on a queue that theory knows only
    about."""
    spec = spec_of((P, 1), (D, 1))
    kind = traits_of(spec.workers[0][0])
    service_s = kind.costs.prompt_s(0, 1024, chunk_tokens=512)
    prompts = [PromptGroup(1.0, service_s, 0.15)]
    needed = prefill_needed(prompts, work=rate * service_s, missed_max=0.05)
    assert needed > 1
    shares = []
    for count in (needed, needed - 1):
        fleet = Fleet(spec_of((P, count), (D, 3), any_role=False))
        fleet.run(poisson(rate=rate, count=600, input_tokens=1024, output_tokens=2))
        shares.append(missed_share(fleet, ttft_s=0.15))
    assert shares[0] <= 0.05
    assert shares[1] > shares[0]
    assert shares[1] > 0.02


def test_as_many_decode_workers_as_sizing_says_do():
    spec = spec_of((P, 1), (D, 1))
    kind = traits_of(spec.workers[0][0])
    load = DecodeLoad(4000.0, 400.0, 0.0055)
    needed = decode_needed(load, kind)
    assert needed > 1
    shares = []
    for count in (needed, max(1, needed // 2)):
        fleet = Fleet(spec_of((P, 4), (D, count), any_role=False))
        fleet.run(poisson(rate=20.0, count=600, input_tokens=300, output_tokens=200))
        shares.append(missed_share(fleet, tpot_s=0.0055))
    assert shares[0] <= 0.05 < shares[1]


# --- the rules it is compared with ------------------------------------------------------------------


def state(serving, busy, **more):
    return {P: RoleState(serving=serving, busy_share=busy, **more), D: RoleState(serving=2)}


def hpa():
    config = AutoscalerSettings(bounds={P: PoolBounds(1, 50)}, objectives={"": LatencyObjective(1.0, 0.05)})
    return HorizontalPodAutoscaler(config, target=0.5)


def test_kubernetes_rule_is_the_documented_one():
    rule, traits = hpa(), {P: KIND}

    def asked(at_s, serving, busy, **more):
        return rule.decide(observed(at_s, 0, state(serving, busy, **more)), traits).desired[P]

    assert asked(15.0, 4, 0.54) == 4, "within the tolerance of 10 %"
    assert asked(30.0, 4, 0.8) == 7, "ceil(4 × 0.8 / 0.5)"
    assert asked(45.0, 4, 1.0, starting=3) == 8, "those that are not ready are not counted"
    assert asked(60.0, 8, 0.1) == 8, "down to the most of the last 300 s"
    assert asked(400.0, 8, 0.1) == 2
    assert asked(415.0, 1, 5.0) == 5, "at most four more, or twice as many"


def test_the_queue_depth_rule_adds_and_takes_one_at_a_time():
    rule = QueueDepth(AutoscalerSettings(bounds={P: PoolBounds(1, 50)}, objectives={}))
    traits = {P: KIND}
    deep = observed(15.0, 0, {P: RoleState(serving=2, waiting_prompt_tokens=90_000)})
    assert rule.decide(deep, traits).desired[P] == 3
    for i in range(2, 25):
        calm = rule.decide(observed(15.0 * i, 0, {P: RoleState(serving=3)}), traits)
    assert calm.desired[P] == 2 or any(e.decision.desired[P] == 2 for e in rule.journal)


# --- loads, searches, reports -----------------------------------------------------------------------


def test_profiles_shape_the_rate():
    load = AutoscaleLoad("x", 1000.0, 10.0, "step", lengths=MeanLengths(100, 10))
    requests = list(drawn(load))
    early = sum(d.at_s < 400 for d in requests) / 400
    high = sum(400 <= d.at_s < 650 for d in requests) / 250
    assert early == pytest.approx(4.0, rel=0.15)
    assert high == pytest.approx(13.0, rel=0.15)
    assert list(drawn(load)) == requests
    assert profile_of("spike", 100.0)(55.0) > profile_of("spike", 100.0)(10.0)


def test_a_trace_begins_again_and_shares_nothing_with_before(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{i:02}.000000,{100 + i},{10 + i}" for i in range(30)]
    (tmp_path / "azure.csv").write_text("\n".join(lines))
    load = AutoscaleLoad("t", 120.0, 0.0, "steady", trace=str(tmp_path / "azure.csv"), length_scale=2.0)
    requests, _ = of_trace(load)
    assert 100 < len(requests) < 125
    assert [requests[31].copy, requests[0].copy] == [1, 0]
    assert requests[3].input_tokens == 206
    assert [d.number for d in requests] == list(range(len(requests)))


def test_the_search_ends_at_a_cluster_that_no_smaller_neighbour_beats():
    case = AutoscaleCase(AutoscaleLoad("s", 90.0, 1.0, "steady", lengths=MeanLengths(4000, 200)))
    best, tried = best_static(stage(case), 0.9, PoolSizes(3, 2), progress=lambda _: None)
    assert best is not None
    assert best.met >= 0.9
    assert all(run.gpu_hours >= best.gpu_hours for run in tried if run.met >= 0.9)
    assert any(run.met < 0.9 for run in tried) or best.replicas == "1 prefill + 1 decode"


def test_the_page_has_replicas_and_reasons():
    script = Script(i2=((), {P: 1}, {}))
    _, scaling = scaled(script, some(100))
    figures = figures_of(scaling, rule="script")
    assert figures.starts == 1
    assert figures.replicas_most == 5
    html = scaling_section(figures)
    assert "start 1 prefill" not in html, "the journal is the rule's own, and this one keeps none"
    assert "<polyline" in html
    assert "GPU-hours" in html


def test_the_command_scales_and_says_so(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.000000,2000,50" for i in range(600)]
    (tmp_path / "azure.csv").write_text("\n".join(lines))
    json_to, html = tmp_path / "out.json", tmp_path / "out.html"
    options = "--prefill 4 --decode 4 --autoscale baton --start-up 30 --set autoscale.patience_s=60"
    command = ["simulate", str(tmp_path / "azure.csv"), *options.split()]
    done = CliRunner().invoke(app, [*command, "--json", str(json_to), "--html", str(html)])
    assert done.exit_code == 0, done.output
    assert '"gpu_hours"' in json_to.read_text()
    assert "no more than" in html.read_text()
    wrong = CliRunner().invoke(app, [*command[:2], "--aggregated", "2", "--autoscale", "magic"])
    assert wrong.exit_code == 2
    assert "one of baton, hpa, queue-depth, static" in wrong.output


def test_own_blocks_of_requests_do_not_look_alike_to_the_router():
    """The table's index goes by the first bytes of a hash; with equal ones all requests went to one
    worker."""
    fleet = Fleet(spec_of((P, 4), (D, 2), policy="slo", any_role=False))
    requests = [FleetRequest(i, 0.05 * i, 600, 2, ()) for i in range(200)]
    fleet.run(iter(requests))
    computed = [
        sum(r.prompt_tokens for r in fleet.stats if r.served_by[0] == f"prefill-{n}.0") for n in range(4)
    ]
    assert max(computed) < 0.6 * sum(computed)
    assert all(record.cached_tokens == 0 for record in fleet.stats)
