"""The autoscaler on observations: sizes it settles at, its first steps, and its reasons."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.config import AutoscaleConfig
from baton.config.router import SloClass, SloConfig
from baton.core.messages import Role
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.settings import objectives_of, settings_of
from control_plane.autoscaler.values import LatencyObjective, PoolBounds, RoleState, RoleSwitch
from tests.unit.control_plane.simulated_cluster import TRAITS, SimulatedCluster, observed, settings

P, D = Role.PREFILL, Role.DECODE
counts = st.integers(0, 30)
states = st.builds(
    RoleState,
    serving=counts,
    starting=counts,
    joining=counts,
    draining=counts,
    waiting_prompt_tokens=st.integers(0, 10**7),
    decoding=st.integers(0, 5000),
)
sights = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 60_000), st.integers(1, 4000), states, states),
    min_size=1,
    max_size=30,
)


def decided(config, sight):
    scaler = Autoscaler(config)
    return [
        scaler.decide(observed(15.0 * i, n, {P: p, D: d}, prompt=prompt, output=output), TRAITS)
        for i, (n, prompt, output, p, d) in enumerate(sight, start=1)
    ]


@hypothesis_settings(max_examples=60, deadline=None)
@given(sights, st.integers(0, 5), st.integers(5, 12), st.sampled_from([0, 8, 15]))
def test_never_beyond_bounds_whatever_is_observed(sight, least, most, total):
    bounds = {P: PoolBounds(least, most), D: PoolBounds(least, most)}
    for decision in decided(settings(bounds=bounds, ranks_max=total), sight):
        assert all(least <= count <= most for count in decision.desired.values())
        if total:
            assert sum(decision.desired.values()) <= max(total, 2 * least)


@hypothesis_settings(max_examples=60, deadline=None)
@given(sights, st.integers(0, 3), st.sampled_from([0, 12, 25]))
def test_unlike_shapes_cost_their_ranks_and_no_worker_takes_the_others_role(sight, least, total):
    bounds = {P: PoolBounds(least, 10), D: PoolBounds(least, 10)}
    config = settings(bounds=bounds, ranks={P: 4}, ranks_max=total)
    for decision, (_, _, _, p, d) in zip(decided(config, sight), sight, strict=True):
        assert all(least <= count <= 10 for count in decision.desired.values())
        cost = 4 * decision.desired[P] + decision.desired[D]
        if total:
            assert cost <= max(total, 5 * max(least, 1))
        assert not decision.switches
        if all(least <= state.have <= 10 for state in (p, d)) and (not total or 4 * p.have + d.have <= total):
            assert not (any(decision.starts.values()) and any(decision.stops.values()))


@hypothesis_settings(max_examples=60, deadline=None)
@given(sights, st.sampled_from([9, 16]))
def test_ranks_that_hold_experts_are_a_part_of_the_limit(sight, total):
    """Three ranks hold the experts of the decode workers, however many these are."""
    bounds = {P: PoolBounds(1, 10), D: PoolBounds(1, 10)}
    config = settings(bounds=bounds, expert_ranks={D: 3}, ranks_max=total)
    for decision in decided(config, sight):
        assert decision.desired[P] + decision.desired[D] + 3 <= total


@hypothesis_settings(max_examples=30, deadline=None)
@given(sights)
def test_switches_starts_and_stops_make_what_there_is_into_what_is_desired(sight):
    for decision, (_, _, _, p, d) in zip(decided(settings(), sight), sight, strict=True):
        after = {P: p.have, D: d.have}
        for switch_role in decision.switches:
            after[switch_role.source] -= switch_role.count
            after[switch_role.target] += switch_role.count
        for role in after:
            assert after[role] + decision.starts[role] - decision.stops[role] == decision.desired[role]
            assert not (decision.starts[role] and decision.stops[role])
        assert bool(decision.reasons) or not decision.is_change


@hypothesis_settings(max_examples=20, deadline=None)
@given(sights)
def test_the_same_observations_give_the_same_decisions(sight):
    assert decided(settings(), sight) == decided(settings(), sight)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [2.0, 5.0, 11.0])
def test_a_steady_load_with_noise_turns_at_most_twice_an_hour(seed, rate):
    cluster = SimulatedCluster(settings(), prefill=8, decode=8, seed=seed)
    cluster.run(30, rate)
    for hour in range(2):
        began_s = cluster.at_s
        cluster.run(60, rate)
        turns = cluster.scaler.journal.reversals(since_s=began_s)
        assert all(count <= 2 for count in turns.values()), f"hour {hour}: {turns}"


def test_more_load_never_wants_fewer():
    wanted = []
    for rate in (0.5, 1, 2, 4, 8, 16):
        cluster = SimulatedCluster(settings(), prefill=1, decode=1)
        cluster.run(90, rate, noise=False)
        wanted.append(dict(cluster.counts))
    for role in (P, D):
        assert [w[role] for w in wanted] == sorted(w[role] for w in wanted)
    assert wanted[-1][P] > wanted[0][P]
    assert wanted[-1][D] > wanted[0][D]


def test_a_step_is_answered_within_a_minute_and_its_end_only_after_the_patience():
    cluster = SimulatedCluster(settings(), prefill=3, decode=3)
    cluster.run(30, 2.0)
    before = cluster.counts[P]
    cluster.run(1, 8.0)
    assert cluster.decisions[-1].desired[P] > before
    cluster.run(20, 8.0)
    needed = cluster.decisions[-1].sized[P].needed
    assert cluster.counts[P] >= needed >= 2 * before
    ended_s = cluster.at_s
    cluster.run(40, 2.0)
    fewer = [d.at_s for d in cluster.decisions if d.at_s > ended_s and d.desired[P] < needed]
    assert fewer[0] - ended_s >= cluster.scaler.settings.patience_s
    assert cluster.counts[P] < needed


def test_a_role_that_lacks_takes_from_one_that_has_too_many_before_anything_starts():
    cluster = SimulatedCluster(settings(), prefill=8, decode=2)
    cluster.run(10, 4.0, prompt=6000, output=50)
    cluster.run(10, 4.0, prompt=500, output=1500)
    switches = [switch_role for d in cluster.decisions for switch_role in d.switches]
    assert switches
    assert all((f.source, f.target) == (P, D) for f in switches)
    first = next(d for d in cluster.decisions if d.switches)
    assert any("prefill to decode" in reason for reason in first.reasons)
    assert not any(d.starts[D] for d in cluster.decisions if d.at_s < first.at_s)


def test_no_switches_where_starting_is_quicker():
    cluster = SimulatedCluster(settings(start_s=5.0, switch_s=20.0), prefill=8, decode=2, start_s=5.0)
    cluster.run(10, 4.0, prompt=6000, output=50)
    cluster.run(10, 4.0, prompt=500, output=1500)
    assert not any(d.switches for d in cluster.decisions)
    assert any(d.starts[D] for d in cluster.decisions)


ZERO = {"bounds": {P: PoolBounds(0, 8), D: PoolBounds(0, 8)}, "zero_after_s": 120.0, "start_s": 20.0}


def test_to_zero_when_idle_and_back_as_soon_as_somebody_waits():
    cluster = SimulatedCluster(settings(**ZERO, hold_s=30.0), prefill=2, decode=2, start_s=20.0)
    cluster.run(10, 1.0)
    cluster.run(1.75, 0.0)
    assert min(cluster.counts.values()) >= 1
    cluster.run(5, 0.0)
    assert cluster.decisions[-1].desired == {P: 0, D: 0}
    decision = cluster.step(0.0, noise=False, queued=3, queued_prompt_tokens=12_000)
    assert min(decision.desired.values()) >= 1
    assert any("back from zero" in reason for reason in decision.reasons)


def test_what_is_still_starting_has_not_been_idle():
    scaler = Autoscaler(settings(**{**ZERO, "zero_after_s": 30.0, "start_s": 60.0}, hold_s=300.0))
    states = [{P: RoleState(serving=1), D: RoleState(starting=1)}] * 8
    states += [{P: RoleState(serving=1), D: RoleState(serving=1)}] * 3
    decisions = [scaler.decide(observed(15.0 * (i + 1), 0, s), TRAITS) for i, s in enumerate(states)]
    asleep = [i for i, d in enumerate(decisions) if d.desired == {P: 0, D: 0}]
    assert asleep == [9, 10], "half a minute after the last of them serves, and not before"


def test_a_start_that_fails_for_ever_keeps_nobody_awake():
    scaler = Autoscaler(settings(**{**ZERO, "zero_after_s": 30.0, "start_s": 40.0}, hold_s=300.0))
    state = {P: RoleState(serving=1), D: RoleState(serving=1, starting=1)}
    decisions = [scaler.decide(observed(15.0 * (i + 1), 0, state), TRAITS) for i in range(14)]
    asleep = [i for i, d in enumerate(decisions) if d.desired == {P: 0, D: 0}]
    assert asleep
    assert 15.0 * asleep[0] > 3 * 40.0


def test_no_zero_where_a_start_takes_longer_than_routers_hold():
    cluster = SimulatedCluster(settings(**{**ZERO, "start_s": 60.0}, hold_s=30.0), prefill=2, decode=2)
    cluster.run(10, 1.0)
    cluster.run(20, 0.0)
    assert min(cluster.counts.values()) >= 1
    assert any("router.queue_wait_s to at least 75 s" in reason for reason in cluster.decisions[-1].reasons)


def test_starts_are_learnt_and_change_what_is_allowed():
    scaler = Autoscaler(settings(**ZERO, hold_s=30.0))
    state = {P: RoleState(serving=1), D: RoleState(serving=1)}
    assert scaler.zero_refused == ""
    scaler.decide(observed(15.0, 5, state, start_s=(55.0,)), TRAITS)
    assert scaler.start_s == 55.0
    assert "69 s" in scaler.zero_refused


def test_a_budget_leaves_all_roles_short_alike():
    cluster = SimulatedCluster(settings(ranks_max=6), prefill=2, decode=2)
    cluster.run(40, 11.0)
    assert sum(cluster.counts.values()) == 6
    sized = cluster.decisions[-1].sized
    shares = [cluster.counts[role] / sized[role].needed for role in (P, D)]
    assert max(shares) - min(shares) < 0.5
    assert any("limited to 6 by the budget" in reason for reason in cluster.decisions[-1].reasons)


def test_a_days_hours_are_not_overspent():
    hours = 96.0
    cluster = SimulatedCluster(settings(rank_hours_per_day=hours), prefill=6, decode=6)
    spent = 0.0
    for _ in range(24 * 240):
        spent += sum(s.paid for s in cluster.states().values()) * 15 / 3600
        cluster.step(9.0, noise=False)
    assert 0.7 * hours < spent <= 1.02 * hours


def test_ranks_are_what_a_budget_limits_and_what_hours_are_spent_on():
    cluster = SimulatedCluster(settings(ranks={P: 4}, ranks_max=14), prefill=1, decode=2)
    cluster.run(40, 11.0)
    assert cluster.counts[P] > 1
    assert 14 - 4 < 4 * cluster.counts[P] + cluster.counts[D] <= 14
    assert any("limited to 14 ranks by the budget" in reason for reason in cluster.decisions[-1].reasons)
    scaler = Autoscaler(settings(ranks={P: 4}, rank_hours_per_day=100.0))
    scaler.decide(observed(15.0, 5, {P: RoleState(serving=2), D: RoleState(serving=1)}), TRAITS)
    assert scaler.memory(15.0).spent[0][1] == pytest.approx(9 * 15 / 3600)


def test_advice_is_recorded_and_said_to_be_advice():
    cluster = SimulatedCluster(settings(is_advice=True), prefill=1, decode=1)
    cluster.run(5, 11.0)
    assert cluster.counts == {P: 1, D: 1}
    assert all(d.is_advice for d in cluster.decisions)
    assert any(d.starts[P] for d in cluster.decisions)


def test_misses_that_sizing_does_not_see_raise_the_demand_it_reckons_with():
    scaler = Autoscaler(settings())
    state = {P: RoleState(serving=10), D: RoleState(serving=10)}
    for i in range(1, 120):
        decision = scaler.decide(observed(15.0 * i, 60, state, missed=12), TRAITS)
    assert decision.sized[P].correction > 1.2
    assert decision.sized[D].correction == 1.0


def needed_after(state, *, minutes=10, rate=60, **more):
    scaler = Autoscaler(settings(**more))
    for i in range(1, minutes * 4 + 1):
        decision = scaler.decide(observed(15.0 * i, rate, state), TRAITS)
    return decision.sized


def test_longer_answers_are_seen_while_they_run():
    usual = needed_after({P: RoleState(serving=3), D: RoleState(serving=2, decoding=20)})
    state = RoleState(serving=2, decoding=250, context_tokens=250 * 5000)
    longer = needed_after({P: RoleState(serving=3), D: state})
    assert longer[D].needed > 2 * usual[D].needed
    assert longer[P].needed == usual[P].needed


def test_what_waits_is_computed_in_as_long_as_a_start_takes_not_sooner():
    state = {P: RoleState(serving=3, waiting_prompt_tokens=2_000_000), D: RoleState(serving=2)}
    quick = needed_after(state, start_s=30.0)[P].needed
    slow = needed_after(state, start_s=240.0)[P].needed
    none = needed_after({P: RoleState(serving=3), D: RoleState(serving=2)})[P].needed
    assert quick > slow > none


def test_one_request_to_an_idle_cluster_is_no_surge():
    scaler = Autoscaler(settings())
    state = {P: RoleState(serving=1), D: RoleState(serving=1)}
    for i in range(1, 60):
        scaler.decide(observed(15.0 * i, 0, state), TRAITS)
    decision = scaler.decide(observed(900.0, 1, state, prompt=60_000), TRAITS)
    assert decision.desired == {P: 1, D: 1}


def test_the_journal_is_bounded_and_counts_what_repeats():
    cluster = SimulatedCluster(settings(), prefill=4, decode=4)
    cluster.run(60, 4.0, noise=False)
    journal = cluster.scaler.journal
    assert len(list(journal)) < 30
    assert sum(entry.repeated for entry in journal) > 150
    small = Journal(3)
    for i, decision in enumerate(cluster.decisions):
        small.add(type(decision)(float(i), {P: i, D: 1}, (RoleSwitch(P, D, 1),), {}, {}, ("",), {}, False))
    last = len(cluster.decisions) - 1
    assert [entry.decision.at_s for entry in small] == [last - 2, last - 1, last]


def test_settings_come_from_the_configuration():
    slo = SloConfig(classes={"fast": SloClass(ttft_s=0.5, tpot_s=0.02)}, default="fast")
    made = settings_of(
        AutoscaleConfig(prefill_max=3, attain=0.9),
        roles=[P, D],
        objectives=objectives_of(slo),
        hold_s=12.0,
        ranks={P: 2, D: 1, Role.AGGREGATED: 8},
    )
    assert made.ranks == {P: 2, D: 1}
    assert made.bounds == {P: PoolBounds(1, 3), D: PoolBounds(1, 8)}
    assert made.objectives == {"": LatencyObjective(0.5, 0.02), "fast": LatencyObjective(0.5, 0.02)}
    assert (made.attain, made.hold_s) == (0.9, 12.0)
    with pytest.raises(ValueError, match="decode_min: 9 is above decode_max, 8"):
        AutoscaleConfig(decode_min=9)
