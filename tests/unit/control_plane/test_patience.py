"""The time for which replicas stay that are not needed."""

from control_plane.autoscaler.patience import FACTOR_MIN, Patience

BASE_S, STEP_S = 300.0, 15.0


def watched(patience, needed, *, since_s, until_s, mistake_s=0.0):
    """Return the floor at each step."""
    steps = range(int((until_s - since_s) / STEP_S))
    return [patience.floor(needed, since_s + n * STEP_S, mistake_s=mistake_s) for n in steps]


def mistaken():
    """Make a step down and, soon after it, a small step up."""
    patience = Patience(BASE_S)
    patience.floor(3, 0.0, mistake_s=0.0)
    patience.decided(-1, 4, 0.0)
    patience.decided(1, 3, 60.0)
    assert patience.seconds(0.0) > FACTOR_MIN * BASE_S
    return patience


def test_nothing_is_known_before_the_patience_has_passed():
    floors = watched(Patience(BASE_S), 2, since_s=0, until_s=BASE_S + STEP_S)
    assert floors[:-1] == [None] * (len(floors) - 1)
    assert floors[-1] == 3


def test_one_replica_more_than_is_needed_stays_for_longer_than_several():
    floors = watched(Patience(BASE_S), 2, since_s=0, until_s=FACTOR_MIN * BASE_S + 2 * STEP_S)
    assert floors[int(FACTOR_MIN * BASE_S / STEP_S) - 1] == 3
    assert floors[-1] == 2


def test_a_mistake_holds_back_one_replica_for_long_and_not_all_of_a_peak():
    patience = mistaken()
    long_s = patience.seconds(0.0)
    watched(patience, 8, since_s=100, until_s=400)
    floors = watched(patience, 3, since_s=400, until_s=400 + long_s + 60)
    at_base = int(BASE_S / STEP_S)
    assert floors[at_base - 2] >= 8, "the peak is within the patience"
    assert floors[at_base + 1] == 4, "all but one go after the patience that it began with"
    assert floors[int(long_s / STEP_S) - 3] == 4
    assert floors[-1] == 3
    assert patience.waited_s == long_s


def test_a_large_pool_holds_back_a_tenth():
    patience = mistaken()
    watched(patience, 60, since_s=100, until_s=400)
    floors = watched(patience, 40, since_s=400, until_s=800)
    assert floors[-1] == 44
    assert patience.waited_s == BASE_S


def test_patience_is_no_shorter_than_what_a_mistake_costs_twice():
    floors = watched(Patience(BASE_S), 1, since_s=0, until_s=900, mistake_s=400.0)
    assert floors.count(None) == int(800 / STEP_S) + 1
