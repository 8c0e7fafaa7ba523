"""The fault simulator must notice when a production decision is broken, or its silence means nothing.

Two things one might try are harmless, and are not here. A router that accepts outputs of an old epoch: the
draw for token i depends on (seed, i) alone and outputs carry their index, so a stale output repeats what the
client has (`the router ignores indices` is what that check rests on). A worker that does not end the old
attempt when a higher epoch comes: the router cancels it too, and a new session ends it.
"""

from collections.abc import Iterator
from itertools import chain

import pytest

from simulator.faults.run_context import RunContext
from simulator.faults.runner import SeedReport, run_seed
from simulator.faults.scenario import draw_scenario
from tests.simulator.mutants import MUTANTS, STORE_MUTANTS, Mutant

SEEDS_MAX = 300
STORE_SEEDS_MAX = 1500
CAUGHT_BY = {
    "lease book ignores readers": 5,
    "lease never lapses": 15,
    "receiver trusts unsettled reads": 5,
    "generations are not compared": 61,
    "committed before computed": 2,
    "freed after the first of two steps": 13,
    "history forgotten after preemption": 5,
    "a late token is emitted": 2,
    "the oldest never has its turn": 16,
    "planned ahead without end": 9,
    "cache ignores the salt": 3,
    "a lost router is not noticed": 43,
    "a lost worker is not noticed": 12,
    "weights are not compared": 111,
    "the loser of a hedge is heard": 2,
    "a breaker never closes": 2,
    "breakers take whole pools": 33,
    "retries have no budget": 36,
    "hedges have no budget": 3,
    "corrupt copies are taken": 12,
    "corrupt reads are served": 13,
    "loads never end": 22,
    "unwritten blocks are kept": 12,
    "half written blocks are kept": 108,
    "a lost worker keeps its pins": 25,
    "offers are never settled": 12,
}
"""Seeds that notice, where they are not among the first: tried before all others, so that nobody waits for a
hundred quiet ones each time. When a change of production makes one quiet, the others are looked through."""


def first_failure(mutant: Mutant) -> SeedReport | None:
    seeds = store_seeds() if mutant in STORE_MUTANTS else range(SEEDS_MAX)
    known = (seed for name, seed in CAUGHT_BY.items() if name == mutant.name)
    reports = map(run_seed, chain(known, seeds))
    return next((report for report in reports if not report.is_ok), None)


def store_seeds() -> Iterator[int]:
    """Mutants that only seeds which press the store can show."""
    return (
        seed
        for seed in range(STORE_SEEDS_MAX)
        if draw_scenario(RunContext(seed).stream("scenario")).presses_store
    )


@pytest.mark.parametrize("mutant", [*MUTANTS, *STORE_MUTANTS], ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    failure = first_failure(mutant)
    assert failure is not None, f"{SEEDS_MAX} seeds did not notice"
    assert failure.invariant in mutant.invariants, failure.message


def test_what_is_known_of_seeds_is_known_of_mutants():
    assert CAUGHT_BY.keys() <= {mutant.name for mutant in (*MUTANTS, *STORE_MUTANTS)}
