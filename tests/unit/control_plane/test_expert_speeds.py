"""Ranks of unlike speed: each gets load as far as its speed goes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import ExpertRankId, NodeId
from control_plane.experts.place import balance_of, place
from control_plane.experts.speeds import slots_to_use, speeds_of
from control_plane.experts.values import EMPTY, ExpertRank

LAYERS, EXPERTS, SLOTS = 4, 64, 24


def ranks_of(speeds, *, node_ranks=4):
    return [
        ExpertRank(ExpertRankId(f"r{n:03}"), NodeId(f"n{n // node_ranks}"), SLOTS, speed=speed)
        for n, speed in enumerate(speeds)
    ]


def loads_from(seed):
    random = np.random.default_rng(seed)
    shares = 1 / (np.arange(EXPERTS) + 8)
    return np.stack([random.permutation(shares) for _ in range(LAYERS)]) * 1e4


def rank_loads(loads, found):
    """Loads of ranks as [L, R], counted one replica at a time."""
    totals = np.zeros((len(loads), len(found.map.ranks)))
    for (layer, expert), names in found.map.replicas().items():
        for name in names:
            totals[layer, found.map.ranks.index(name)] += loads[layer, expert] / len(names)
    return totals


@given(st.lists(st.sampled_from([0.25, 0.5, 0.9]), min_size=1, max_size=3), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_load_is_balanced_by_what_a_rank_can_compute(slow, seed):
    speeds = [1.0] * (8 - len(slow)) + slow
    ranks, loads = ranks_of(speeds, node_ranks=8), loads_from(seed)
    before = place(loads_from(seed + 1), ranks_of([1.0] * 8, node_ranks=8))
    found = place(loads, ranks, current=before.map)
    for slots in found.map.slots.reshape(-1, SLOTS):
        held = slots[slots != EMPTY].tolist()
        assert len(held) == len(set(held))
    relative = rank_loads(loads, found) / speeds_of(ranks)
    balance = loads.sum(axis=1) / 8 / relative.max(axis=1)
    assert balance == pytest.approx(found.balance)
    assert balance == pytest.approx(balance_of(loads, found.map.slots, speeds_of(ranks)))
    assert balance.mean() > 0.9


@pytest.mark.parametrize("groups", [1, 8])
def test_a_rank_that_became_slow_loses_load_at_the_next_placement(groups):
    ranks, loads = ranks_of([1.0] * 8), loads_from(3)
    before = place(loads, ranks, group_count=groups)
    ranks[2] = replace(ranks[2], speed=0.1)
    after = place(loads, ranks, current=before.map, group_count=groups)
    share = rank_loads(loads, after)[:, 2] / loads.sum(axis=1)
    assert (rank_loads(loads, before)[:, 2] / loads.sum(axis=1)).min() > 0.11
    assert share.max() < 2 * 0.1 / 7.1


def test_only_differences_of_speed_count():
    loads = loads_from(5)
    one = place(loads, ranks_of([1.0] * 8))
    two = place(loads, ranks_of([4.0] * 8))
    assert (one.map.slots == two.map.slots).all()


def test_a_rank_that_stands_still_counts_as_a_twentieth():
    assert speeds_of(ranks_of([1.0, 0.0])) == pytest.approx(np.array([1.0, 0.05]) / 0.525)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 3.0)), min_size=1, max_size=20),
    st.floats(0.0, 1.2),
)
def test_slow_ranks_use_fewer_slots_unless_they_are_needed(ranks, part):
    slots, speeds = np.array([one for one, _ in ranks]), np.array([one for _, one in ranks])
    needed = int(part * slots.sum())
    used = slots_to_use(slots, speeds, needed=needed)
    assert (used >= 1).all()
    assert (used <= slots).all()
    assert used.sum() >= min(needed, slots.sum())
    is_fast = speeds >= np.median(speeds)
    assert (used[is_fast] == slots[is_fast]).all()
