"""The simulator must notice when a production decision is broken, or its silence means nothing.

Two things one might try are harmless, and are not here. A router that accepts outputs of an old epoch: the
draw for token i depends on (seed, i) alone and outputs carry their index, so a stale output repeats what
the client has (`the router ignores indices` is what that check rests on). A worker that does not end the
old attempt when a higher epoch comes: the router cancels it too, and a new session ends it.
"""

import pytest

from baton.sim.runner import SeedReport, run_seed
from tests.sim.mutants import MUTANTS, Mutant

SEEDS_MAX = 200


def first_failure() -> SeedReport | None:
    return next((report for report in map(run_seed, range(SEEDS_MAX)) if not report.is_ok), None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    failure = first_failure()
    assert failure is not None, f"{SEEDS_MAX} seeds did not notice"
    assert failure.invariant in mutant.invariants, failure.message
