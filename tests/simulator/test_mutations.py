"""The fault simulator must notice when a production decision is broken, or its silence means nothing.

Two things one might try are harmless, and are not here. A router that accepts outputs of an old epoch: the
draw for token i depends on (seed, i) alone and outputs carry their index, so a stale output repeats what the
client has (`the router ignores indices` is what that check rests on). A worker that does not end the old
attempt when a higher epoch comes: the router cancels it too, and a new session ends it.
"""

from itertools import chain

import pytest

from tests.simulator.mutant import Mutant
from tests.simulator.mutant_table import SEEDS_MAX, first_failure, read_page
from tests.simulator.mutants import ALL_MUTANTS

TABLE = read_page()


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant):
    """The seed of the table is tried before all others, so that nobody waits for a hundred quiet ones each
    time. When a change of production makes it quiet, the others are looked through."""
    row = TABLE.get(mutant.name)
    known = () if row is None or row.seed is None else (row.seed,)
    failure = first_failure(mutant, chain(known, range(SEEDS_MAX)))
    assert failure is not None, f"{SEEDS_MAX} seeds did not notice"
    assert failure.invariant in mutant.invariants, failure.message


def test_mutants_have_names_of_their_own():
    names = [mutant.name for mutant in ALL_MUTANTS]
    assert len(set(names)) == len(names)


def test_the_table_names_exactly_the_mutants_that_exist():
    assert TABLE.keys() == {mutant.name for mutant in ALL_MUTANTS}
    assert all(row.seed is not None and row.seed < SEEDS_MAX for row in TABLE.values())
