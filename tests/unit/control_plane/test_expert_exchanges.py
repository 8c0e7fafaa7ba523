"""Exchanges of experts between ranks, on rows that are small enough to count again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.experts.balancing import Goals, balance
from control_plane.experts.packing import Packing
from control_plane.experts.replicas import load_per_replica_min
from control_plane.experts.returns import bring_back
from control_plane.experts.values import EMPTY

EXPERTS, RANKS = 9, 6


def packing_of(loads, held, nodes, *, counts=None, capacity=None):
    slots = np.array(held, dtype=np.int32)
    if capacity is None:
        capacity = np.full(slots.shape[:2], slots.shape[2])
    packing = Packing(np.array(loads, dtype=float), slots, capacity, np.array(nodes), np.ones(capacity.shape))
    packing.fill(packing.placed[:, :EMPTY].copy() if counts is None else counts)
    return packing


def drawn(seed, *, node_count=3):
    """Two rows on ranks of two to four slots, which held something else before."""
    random = np.random.default_rng(seed)
    capacity = random.integers(2, 5, (2, RANKS))
    capacity[:, 0] = 4
    held = np.full((2, RANKS, 4), EMPTY, dtype=np.int32)
    for row in range(2):
        for rank in range(RANKS):
            number = int(random.integers(capacity[row, rank] + 1))
            held[row, rank, :number] = random.permutation(EXPERTS)[:number]
    counts = np.ones((2, EXPERTS), dtype=np.int64)
    for row in range(2):
        np.add.at(counts[row], random.integers(EXPERTS, size=capacity[row].sum() - EXPERTS), 1)
    before = held.copy()
    loads = random.lognormal(0, 1, (2, EXPERTS))
    nodes = np.arange(RANKS) % node_count
    packing = packing_of(loads, held, nodes, counts=np.minimum(counts, RANKS), capacity=capacity)
    packing.spread()
    return packing, before


def check(packing, before):
    """The accounts are those of the slots, and no rank holds an expert twice or more than it has room for."""
    rows, ranks, _ = packing.slots.shape
    for row in range(rows):
        moved = 0
        for rank in range(ranks):
            experts = packing.slots[row, rank]
            experts = experts[experts != EMPTY].tolist()
            assert len(set(experts)) == len(experts) <= packing.capacity[row, rank]
            assert np.nonzero(packing.holds[row, :, rank])[0].tolist() == sorted(experts)
            assert np.isclose(packing.rank_loads[row, rank], packing.sizes[row, experts].sum())
            moved += len(set(experts) - set(before[row, rank].tolist()))
        assert packing.moved[row] == moved


def nodes_of_experts(packing):
    return (packing.on_node > 0).sum(axis=2)


def test_the_busiest_rank_has_room_made_for_its_expert_by_a_third_rank():
    """Ranks that could give the busiest something smaller are full, and those that are not hold nothing of
    about the same load."""
    loads = [[54, 47, 65, 6, 2, 40, 30, 29, 99]]
    held = [[[0, 1, EMPTY], [2, 3, 4], [5, 6, 7], [8, EMPTY, EMPTY]]]
    capacity = np.array([[2, 3, 3, 1]])
    packing = packing_of(loads, held, [0, 0, 0, 0], capacity=capacity)
    goals = Goals(np.array([100.0]), np.array([100.0]), np.array([np.inf]))
    balance(packing, goals)
    assert packing.rank_loads.max() <= 100
    check(packing, np.array(held))


def test_an_expert_comes_back_if_both_ranks_have_room_for_the_exchange():
    packing = packing_of([[5, 3, 4, 2]], [[[0, 1], [2, 3]]], [0, 0])
    zero, one = np.array([0]), np.array([1])
    packing.move(zero, zero, zero, one, one)
    assert packing.slots.tolist() == [[[3, 1], [2, 0]]]
    assert packing.moved.tolist() == [2]
    before = np.array([[[0, 1], [2, 3]]])
    bring_back(packing, before, zero, np.array([7.9]))
    assert packing.moved.tolist() == [2], "one of the two would have more than the limit"
    bring_back(packing, before, zero, np.array([8.0]))
    assert packing.moved.tolist() == [0]
    check(packing, before)


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]))
@settings(max_examples=300, deadline=None)
def test_exchanges_keep_the_accounts_and_make_no_rank_busier(seed, node_count):
    packing, before = drawn(seed, node_count=node_count)
    check(packing, before)
    busiest = packing.rank_loads.max(axis=1)
    wanted = packing.rank_loads.mean(axis=1)
    balance(packing, Goals(wanted, wanted, np.full(2, np.inf)))
    check(packing, before)
    assert (packing.rank_loads.max(axis=1) <= busiest * (1 + 1e-5)).all()
    busiest, moved, spread = packing.rank_loads.max(axis=1), packing.moved.copy(), nodes_of_experts(packing)
    bring_back(packing, before, np.arange(2), busiest)
    check(packing, before)
    assert (packing.moved <= moved).all()
    assert (packing.rank_loads.max(axis=1) <= busiest * (1 + 1e-9)).all()
    assert (nodes_of_experts(packing) >= np.minimum(spread, 2)).all(), "no expert is on one node only by it"


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]))
@settings(max_examples=50, deadline=None)
def test_an_expert_stays_where_it_would_be_twice_or_on_one_node_only(seed, node_count):
    packing, _ = drawn(seed, node_count=node_count)
    for row in range(2):
        for old in range(RANKS):
            for expert in packing.slots[row, old].tolist():
                for new in range(RANKS):
                    found = packing.stays(np.array(row), np.array(expert), np.array(old), np.array(new))
                    ranks = [] if expert == EMPTY else np.nonzero(packing.holds[row, expert])[0].tolist()
                    nodes = {int(packing.nodes[rank]) for rank in ranks}
                    after = {int(packing.nodes[new if rank == old else rank]) for rank in ranks}
                    assert found == (new in ranks or (len(nodes) > 1 and len(after) == 1))


@given(st.integers(0, 10_000), st.integers(0, 8), st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_the_largest_replica_is_as_small_as_the_slots_allow(seed, more, least):
    loads = np.random.default_rng(seed).lognormal(0, 1.5, (3, EXPERTS))
    slots = np.full(3, EXPERTS * least + more)
    found = load_per_replica_min(loads, slots, most=np.full((3, 1), RANKS), least=least)

    def needed(of_each):
        return np.clip(np.ceil(loads / of_each[:, None]), least, RANKS).sum(axis=1)

    assert (needed(found) <= slots).all()
    smaller = found * (1 - 1e-6)
    can_be_smaller = needed(smaller) <= slots
    all_have_most = (needed(smaller) == EXPERTS * RANKS) | (smaller < 1e-6)
    assert (~can_be_smaller | all_have_most).all()
