"""The requests of `baton bench overload`, and its figures for an overloaded cluster."""

from pathlib import Path

import pytest

from benchmarks.overload import BURST_REQUESTS, FLOOD, QUIET, VARIANTS, floods, run_fairness, run_overload
from benchmarks.placement import PlacementCase, Stage, stage
from simulator.fleet.pools import pool_charts
from simulator.fleet.setup import PoolSizes

CAPACITY = 20.0


@pytest.fixture
def ready(tmp_path: Path) -> Stage:
    """Long prompts for two workers: a few a second are too many."""
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{i / 10:010.7f},{6000 + 40 * (i % 7)},{20 + i % 5}" for i in range(200)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return stage(PlacementCase(trace, "llama-3-70b", "h100", 4, PoolSizes(1, 1), 2.0, 0.1, 0))


def test_a_burst_comes_in_the_middle_and_a_sustained_flood_all_the_time(ready: Stage) -> None:
    kinds = {name: list(demands()) for name, demands in floods(ready, CAPACITY, quiet_requests=90).items()}
    assert {d.tenant for d in kinds["none"]} == {QUIET}
    quiet_s = 90 / (0.3 * CAPACITY)
    for name, count in (("burst", BURST_REQUESTS), ("sustained", int(2 * CAPACITY * quiet_s))):
        flood = [d for d in kinds[name] if d.tenant == FLOOD]
        quiet = [d for d in kinds[name] if d.tenant == QUIET]
        assert [d.at_s for d in quiet] == [d.at_s for d in kinds["none"]]
        assert len(flood) == count
        assert (count - 1) / (flood[-1].at_s - flood[0].at_s) == pytest.approx(2 * CAPACITY)
        assert flood[0].at_s == pytest.approx(quiet_s / 3 if name == "burst" else 0.0)
        assert {d.copy for d in flood}.isdisjoint({0})
        assert [d.number for d in kinds[name]] == list(range(len(kinds[name])))


def test_what_is_refused_early_is_not_computed_in_vain(ready: Stage) -> None:
    early, last = (run_overload(ready, variant, CAPACITY)[0] for variant in VARIANTS[:2])
    assert early.refused > 0
    assert early.wasted_tokens < last.wasted_tokens / 3
    # Few are served in time at five times the capacity, and which ones is chance: two of 200 requests.
    assert early.goodput_share > last.goodput_share - 0.011


def test_a_flood_hardly_takes_from_the_quiet_one(ready: Stage) -> None:
    kinds = floods(ready, 4.0, quiet_requests=60)
    alone = run_fairness(ready, "refuse", "none", kinds["none"]())
    beside = run_fairness(ready, "refuse", "sustained", kinds["sustained"]())
    assert alone.flood_requests == 0
    assert beside.flood_requests == 400
    assert beside.flood_share < 0.8
    for one in (alone, beside):
        missed = one.quiet_refused + one.quiet_late + one.quiet_slow
        assert missed == round((1 - one.quiet_share) * one.quiet_requests)
    assert beside.quiet_share > alone.quiet_share - 0.1


def test_charts_are_one_below_the_other(ready: Stage) -> None:
    _, samples = run_overload(ready, VARIANTS[0], CAPACITY)
    drawing = pool_charts({"first": samples, "second": samples})
    assert drawing.count("<svg") == 3
    assert drawing.index("first") < drawing.index("second")
