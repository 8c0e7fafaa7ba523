"""Rates that ramp and burst, and random users and disconnects."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import SetupError
from loadgen.arrivals import Burst, RateShape, parse_burst, parse_ramp, parse_warp
from loadgen.disconnects import Disconnects
from loadgen.lengths import TraceScaling, make_plan, time_scale_for
from loadgen.traces import Trace, TraceFormat, TraceRequest
from loadgen.users import Users, read_keys

factors = st.floats(0.1, 10)
seconds = st.floats(0, 50)


@st.composite
def shapes(draw):
    at = sorted(draw(st.sets(seconds.map(lambda s: round(s, 2)), max_size=4)))
    points = tuple((s, draw(factors)) for s in at)
    lengths = st.floats(0.5, 20)
    bursts = tuple(Burst(draw(seconds), draw(lengths), draw(factors)) for _ in range(draw(st.integers(0, 2))))
    return RateShape(points, bursts)


@given(shapes(), st.lists(st.floats(0, 300), min_size=2, max_size=30))
@settings(max_examples=100, deadline=None)
def test_as_many_requests_have_come_as_the_factors_integral_says(shape, steady):
    steady = sorted(steady)
    warped = shape.warp(steady)
    assert warped == sorted(warped)
    edges = {0.0, *(at for at, _ in shape.points)}
    for burst in shape.bursts:
        edges |= {burst.at_s, burst.at_s + burst.duration_s}
    for before, after in zip(steady, warped, strict=True):
        inside = sorted({0.0, after, *(e for e in edges if 0 < e < after)})
        # The rate is linear between two edges, so Simpson's rule is exact; a step at an edge is taken from
        # inside.
        integral = sum(shape.factor_at((a + b) / 2) * (b - a) for a, b in pairwise(inside))
        assert integral == pytest.approx(before, rel=1e-6, abs=1e-6)


def test_bursts_and_ramps_as_they_are_written():
    assert parse_ramp("0.5:2:60") == ((0.0, 0.5), (60.0, 2.0))
    assert parse_warp("0:1,60:3,90:1") == ((0, 1), (60, 3), (90, 1))
    assert parse_burst("30:5:4") == Burst(30, 5, 4)
    burst = RateShape(bursts=(Burst(10, 5, 2),))
    assert burst.warp([0, 10, 12, 20, 21]) == [0, 10, 11, 15, 16]
    assert RateShape().warp([3.0, 4.0]) == [3.0, 4.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: parse_ramp("1:2"),
        lambda: parse_ramp("1:2:0"),
        lambda: parse_warp("0:1,x:2"),
        lambda: parse_burst("1:2:inf"),
        lambda: RateShape(((0.0, 0.0),)),
        lambda: RateShape(((5.0, 1.0), (5.0, 2.0))),
        lambda: RateShape(bursts=(Burst(0, 0, 2),)),
        lambda: Disconnects(share=1.5),
        lambda: Disconnects(share=0.5, mean_s=0),
        lambda: Users(tenants=-1),
    ],
)
def test_shapes_that_make_no_sense_are_refused(make):
    with pytest.raises(SetupError):
        make()


def trace(count, *, sessions=0):
    return Trace(
        TraceFormat.AZURE,
        tuple(
            TraceRequest(
                2.0 * i, 100, 50, row=i, session=str(i % sessions) if sessions else None,
                slo_class="own" if i == 1 else "",
            )
            for i in range(count)
        ),
    )  # fmt: skip


def test_a_rate_is_met():
    whole = trace(101)
    plan = make_plan(whole, TraceScaling(time_scale=time_scale_for(whole, 5.0)), spread=True, seed=0)
    assert 100 / (plan.requests[-1].at_s - plan.requests[0].at_s) == pytest.approx(5.0)
    with pytest.raises(SetupError, match="--rate"):
        time_scale_for(trace(1), 5.0)


def test_disconnects_are_the_same_requests_in_every_run():
    def planned(share, mean_s=None):
        drawn = Disconnects(share, mean_s, seed=3)
        return make_plan(trace(2000), TraceScaling(), spread=False, seed=0, disconnects=drawn).requests

    by_tokens, by_time = planned(0.25), planned(0.25, 2.0)
    chosen = [r.index for r in by_tokens if r.disconnect]
    assert 420 < len(chosen) < 580
    assert chosen == [r.index for r in by_time if r.disconnect]
    assert all(1 <= r.disconnect.after_tokens < 50 for r in by_tokens if r.disconnect)
    mean_s = sum(r.disconnect.after_s for r in by_time if r.disconnect) / len(chosen)
    assert 1.6 < mean_s < 2.4
    assert not any(r.disconnect for r in planned(0.0))


def test_tenants_are_even_and_keep_their_sessions(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who\nacme sk-1\n\nzeta sk-2\n")
    users = Users("chat", 3, read_keys(keys))
    assert users.first_key == "sk-1"
    assert Users().first_key == ""
    plan = make_plan(trace(900, sessions=300), TraceScaling(), spread=False, seed=0, users=users)
    names = [r.tenant for r in plan.requests]
    assert set(names) == {"acme", "zeta", "tenant-2"}
    assert all(230 < names.count(name) < 370 for name in set(names))
    assert all(a.tenant == b.tenant for a, b in zip(plan.requests, plan.requests[300:], strict=False))
    assert {r.slo_class for r in plan.requests} == {"chat", "own"}
    assert (users.key_of("zeta"), users.key_of("tenant-2")) == ("sk-2", None)
    keys.write_text("acme\n")
    with pytest.raises(SetupError, match="keys:1"):
        read_keys(keys)
