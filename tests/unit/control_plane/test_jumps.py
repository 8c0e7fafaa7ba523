"""Changes of a rate are distinguished from chance, and the autoscaler follows them."""

from random import Random

import pytest

from baton.core.messages import Role
from control_plane.autoscaler.forecast import Forecaster
from control_plane.autoscaler.jumps import Jumps
from control_plane.autoscaler.values import RoleState
from tests.unit.control_plane.simulated_cluster import TRAITS, SimulatedCluster, observed, poisson, settings

P, D = Role.PREFILL, Role.DECODE


def found(counts):
    """Return (interval, number of latest intervals at the new rate) of each change."""
    jumps = Jumps()
    said = [(n, jumps.observe(count)) for n, count in enumerate(counts, start=1)]
    return [(n, steps) for n, steps in said if steps]


@pytest.mark.parametrize("seed", range(5))
def test_what_trebles_is_seen_within_a_minute_and_where_it_began(seed):
    rng = Random(seed)
    counts = [poisson(rng, 4) for _ in range(60)] + [poisson(rng, 12) for _ in range(20)]
    late = [(n, steps) for n, steps in found(counts) if n > 60]
    n, steps = late[0]
    assert n <= 64
    assert abs((n - steps) - 60) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_what_falls_to_a_third_is_seen_too(seed):
    rng = Random(seed)
    counts = [poisson(rng, 12) for _ in range(60)] + [poisson(rng, 4) for _ in range(20)]
    assert any(60 < n <= 65 for n, _ in found(counts))


def test_chance_seldom_looks_like_a_change():
    alarms = 0
    for seed in range(10):
        rng = Random(seed)
        alarms += len(found([poisson(rng, 9) for _ in range(480)]))
    assert alarms <= 6, "ten runs of two hours"


def test_arrivals_in_bursts_take_more_to_be_a_change():
    rng = Random(3)
    bursts = [4 * poisson(rng, 3) for _ in range(480)]
    assert len(found(bursts)) <= 2
    assert found([*bursts, *[80] * 8])[-1][0] > 480


def test_nothing_at_all_is_no_change():
    assert found([0] * 50) == []
    assert found([0] * 50 + [1, 0, 0]) == []
    assert found([0] * 50 + [2, 1, 0]) == []


def test_forecasts_begin_anew_after_a_jump_and_its_size_is_no_error_of_theirs():
    forecaster = Forecaster(caution=0.75)
    for _ in range(60):
        forecaster.observe(1.0)
    forecaster.restart()
    for _ in range(3):
        forecaster.observe(3.0)
    forecast = forecaster.predict(8)
    assert forecast.value == pytest.approx(3.0, rel=0.05)
    assert forecast.error < 0.1


def stepped(high, **more):
    """Run half an hour of two requests a second, then more; return the cluster and the start of the jump."""
    cluster = SimulatedCluster(settings(**more), prefill=3, decode=3)
    cluster.run(30, 2.0)
    return cluster, cluster.at_s, cluster.run(1.5, high)


def test_after_a_jump_all_that_it_needs_is_ordered_within_a_minute():
    cluster, began_s, _ = stepped(8.0)
    settled = SimulatedCluster(settings(), prefill=3, decode=3)
    settled.run(60, 8.0)
    for role in (P, D):
        ordered = max(d.desired[role] for d in cluster.decisions if d.at_s <= began_s + 60)
        assert ordered >= settled.decisions[-1].sized[role].needed


def test_answers_that_end_first_after_a_jump_are_short_and_say_little():
    scaler = SimulatedCluster(settings()).scaler
    state = {P: RoleState(serving=4), D: RoleState(serving=4)}
    for i in range(1, 81):
        usual = scaler.decide(observed(15.0 * i, 30, state, output=600), TRAITS)
    for i in range(81, 85):
        after = scaler.decide(observed(15.0 * i, 90, state, output=200), TRAITS)
    assert after.sized[D].forecast > 2.4 * usual.sized[D].demand


def steadily(rate, minutes, **more):
    cluster = SimulatedCluster(settings(**more), prefill=2, decode=2)
    cluster.run(minutes, rate, noise=False)
    return cluster


def test_headroom_is_there_before_the_jump_and_only_where_it_is_asked_for():
    without, twice, more = (steadily(6.0, 60, headroom=h) for h in (1.0, 2.0, 4.0))
    for role in (P, D):
        assert without.counts[role] <= twice.counts[role] <= more.counts[role]
        assert more.counts[role] > without.counts[role]
    settled = steadily(24.0, 60)
    assert more.counts[D] >= settled.counts[D], "sequences that decode slow each other down at once"


def test_headroom_is_of_what_is_usual_not_of_a_spike():
    cluster = SimulatedCluster(settings(headroom=2.0), prefill=2, decode=2)
    cluster.run(60, 2.0, noise=False)
    before = cluster.counts[D]
    cluster.run(12, 8.0, noise=False)
    plain = steadily(8.0, 60)
    assert max(d.desired[D] for d in cluster.decisions) <= plain.counts[D] + 1
    assert before >= steadily(4.0, 60).counts[D]
