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
from tests.simulator.mutant import Mutant
from tests.simulator.mutants import ALL_MUTANTS, MUTANTS

SEEDS_MAX = 60
STORE_SEEDS_MAX = 400


def first_failure(mutant: Mutant) -> SeedReport | None:
    seeds = store_seeds() if mutant in MUTANTS["store"] else range(SEEDS_MAX)
    known = () if mutant.known_seed is None else (mutant.known_seed,)
    reports = map(run_seed, chain(known, seeds))
    return next((report for report in reports if not report.is_ok), None)


def store_seeds() -> Iterator[int]:
    """Yield the seeds that press the store, because no other shows a mutant of it."""
    return (
        seed
        for seed in range(STORE_SEEDS_MAX)
        if draw_scenario(RunContext(seed).stream("scenario")).presses_store
    )


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    failure = first_failure(mutant)
    if failure is None:
        pytest.xfail("no seed notices this mutant yet: a checker or a scenario is missing")
    if failure.invariant not in mutant.invariants:
        pytest.xfail(f"noticed as another invariant: {failure.message}")


def test_mutants_have_names_of_their_own():
    names = [mutant.name for mutant in ALL_MUTANTS]
    assert len(set(names)) == len(names)
