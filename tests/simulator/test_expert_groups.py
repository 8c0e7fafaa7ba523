"""Expert groups in the fault simulator, alone: many seeds are cheap without the other parts."""

from collections import Counter

import pytest

from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.rows import PostedRows, RowPair
from simulator.faults.experts.runner import ExpertRun
from simulator.faults.experts.scenario import RankMoment
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.runner import MUST_HAPPEN

SEEDS = 120
RARE = ("expert rows refused",)
"""Counts that so few seeds need not show."""


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = ExpertRun(RunContext(seed))
        run.play()
        found.update(run.context.counts)
    return found


def test_what_is_tested_really_happened(counts):
    wanted = [name for name in MUST_HAPPEN if name.startswith("expert") and name not in RARE]
    assert len(wanted) > 20
    assert [name for name in wanted if not counts[name]] == []


def test_ranks_are_struck_at_every_moment(counts):
    assert [moment for moment in RankMoment if counts[f"expert ranks struck while {moment}"] < 5] == []


def test_same_seed_same_events():
    digests = []
    for seed in (5, 5, 6):
        run = ExpertRun(RunContext(seed))
        run.play()
        digests.append((run.context.digest, tuple(run.context.counts.items())))
    assert digests[0] == digests[1] != digests[2]


def begun(seed: int) -> ExpertRun:
    """A group that has its experts, before anything strikes."""
    run = ExpertRun(RunContext(seed))
    run.world.control.begin()
    run.world.add_caller()
    run.context.clock.run(until_s=4.0, is_over=lambda: False)
    return run


def test_a_rank_that_does_not_hold_an_expert_refuses_and_computes_nothing():
    world = begun(1).world
    rank = next(iter(world.ranks.values()))
    lacking = next(n for n in range(world.scenario.expert_total) if n not in rank.held)
    sent: list[object] = []
    world.to_caller = lambda rank, name, results: sent.append(results)
    rows = rank.rows
    rank.on_rows(PostedRows("somebody", 0, 0, 0, (RowPair(1, 0, lacking),)))
    world.context.clock.run(until_s=world.now_s + 1.0, is_over=lambda: bool(sent))
    assert [one.refused for one in sent if getattr(one, "slot", None) == 0] == [lacking]
    assert rank.rows == rows


def test_the_checker_notices_rows_for_a_rank_that_the_map_does_not_name():
    world = begun(1).world
    caller, rank = next(iter(world.callers.values())), next(iter(world.ranks.values()))
    lacking = next(n for n in range(world.scenario.expert_total) if n not in rank.held)
    with pytest.raises(Violation, match="invariant 15"):
        world.checker.posted(caller, rank, (RowPair(1, 0, lacking),), caller.routes.epoch)


def test_the_checker_notices_a_rank_that_is_silent_and_waited_for():
    world = begun(2).world
    caller = next(iter(world.callers.values()))
    rank: SimExpertRank = next(iter(caller.open.values())).rank
    rank.stop()
    world.context.clock.run(until_s=world.now_s + 0.3, is_over=lambda: False)
    world.checker.look_at(caller)  # it may be silent for so long
    caller.open[99] = next(one for one in caller.open.values() if one.rank is rank)
    rank.stopped_s = world.now_s - 5.0
    with pytest.raises(Violation, match="invariant 17"):
        world.checker.look_at(caller)
