"""The simulator must notice when a production decision is broken, or its silence means nothing.

Two things one might try are harmless, and are not here. A router that accepts outputs of an old epoch: the
draw for token i depends on (seed, i) alone and outputs carry their index, so a stale output repeats what
the client has (`the router ignores indices` is what that check rests on). A worker that does not end the
old attempt when a higher epoch comes: the router cancels it too, and a new session ends it.
"""

from collections.abc import Iterator

import pytest

from baton.sim.runner import SeedReport, run_seed
from baton.sim.scenario import draw_scenario
from baton.sim.world import World
from tests.sim.mutants import MUTANTS, STORE_MUTANTS, Mutant

SEEDS_MAX = 300
STORE_SEEDS_MAX = 1500


def first_failure(mutant: Mutant) -> SeedReport | None:
    reports = map(run_seed, store_seeds() if mutant in STORE_MUTANTS else range(SEEDS_MAX))
    return next((report for report in reports if not report.is_ok), None)


def store_seeds() -> Iterator[int]:
    """Those that press the store."""
    return (
        seed for seed in range(STORE_SEEDS_MAX) if draw_scenario(World(seed).stream("scenario")).presses_store
    )


@pytest.mark.parametrize("mutant", [*MUTANTS, *STORE_MUTANTS], ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    failure = first_failure(mutant)
    assert failure is not None, f"{SEEDS_MAX} seeds did not notice"
    assert failure.invariant in mutant.invariants, failure.message
