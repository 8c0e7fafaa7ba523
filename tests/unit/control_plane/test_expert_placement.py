"""Where experts are placed: what always holds, and what it costs beside a placement from nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import NodeId
from benchmarks.experts.eplb import place_as_eplb
from benchmarks.experts.placement import migration_count, slots_of_ranks
from control_plane.experts.loads import DecayedCounts
from control_plane.experts.migrations import migrations, seconds_at_least
from control_plane.experts.place import balance_of, place
from control_plane.experts.values import (
    EMPTY,
    ExpertKey,
    ExpertMap,
    ExpertRank,
    ExpertRankState,
    ExpertsDoNotFit,
    RankId,
)

LAYERS, EXPERTS = 3, 64


def ranks_of(sizes, *, node_ranks=4):
    return [
        ExpertRank(RankId(f"r{n:03}"), NodeId(f"n{n // node_ranks:02}"), int(size))
        for n, size in enumerate(sizes)
    ]


def with_state(ranks, number, state):
    found = list(ranks)
    one = found[number]
    found[number] = ExpertRank(one.rank_id, one.node_id, one.slots, state)
    return found


def loads_from(seed, *, layers=LAYERS, experts=EXPERTS):
    """Zipf, flat, one hot expert, or most experts without any load."""
    random = np.random.default_rng(seed)
    shares = [
        1 / np.arange(1, experts + 1),
        np.ones(experts),
        np.r_[experts, np.ones(experts - 1)],
        np.r_[np.ones(experts // 4), np.zeros(experts - experts // 4)],
    ][seed % 4]
    return np.stack([random.permutation(shares) for _ in range(layers)]) * random.lognormal(
        0, 0.1, (layers, experts)
    )


def check(found, ranks, *, experts=EXPERTS, layers=LAYERS):
    sizes = {one.rank_id: one.slots for one in ranks if one.state is ExpertRankState.READY}
    assert set(found.map.ranks) == set(sizes)
    for layer in range(layers):
        for name, slots in zip(found.map.ranks, found.map.slots[layer], strict=True):
            held = slots[slots != EMPTY].tolist()
            assert len(held) == len(set(held)) <= sizes[name]
    assert len(found.map.replicas()) == layers * experts, "every expert has a replica"


def nodes_of(found, ranks):
    node = {one.rank_id: one.node_id for one in ranks}
    return {key: {node[name] for name in names} for key, names in found.map.replicas().items()}


@given(st.integers(2, 64), st.sampled_from([0, 0.1, 0.25, 1.2]), st.lists(st.integers(0, 999), max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_map_is_one_that_the_ranks_have_memory_for(rank_count, redundancy, seeds):
    ranks = ranks_of(slots_of_ranks(EXPERTS, rank_count, redundancy))
    current = None
    for seed in [0, *seeds]:
        found = place(loads_from(seed), ranks, current=current)
        check(found, ranks)
        current = found.map


@given(st.sampled_from([4, 8, 16, 32, 64]), st.sampled_from([0, 0.125, 0.25]), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_balance_and_migrations_keep_their_bounds_beside_eplb(rank_count, redundancy, seed):
    """The bounds are of the mean over layers, with counts that change a little, and a tenth that moves."""
    random = np.random.default_rng(seed)
    sizes = slots_of_ranks(EXPERTS, rank_count, redundancy)
    ranks = ranks_of(sizes)
    loads = loads_from(4 * seed, layers=16)
    current = baseline = None
    moved = eplb_moved = 0
    for _ in range(4):
        found = place(loads, ranks, current=current)
        other = place_as_eplb(loads, sizes, group_count=1, node_count=-(-rank_count // 4))
        assert found.balance.mean() >= balance_of(loads, other).mean() - 0.01
        if current is not None:
            moved += migration_count(current.slots, found.map.slots, EXPERTS)
            eplb_moved += migration_count(baseline, other, EXPERTS)
        current, baseline = found.map, other
        loads = loads * random.lognormal(0, 0.05, loads.shape)
        for of_layer in loads:
            moving = random.choice(EXPERTS, 6, replace=False)
            of_layer[moving] = of_layer[random.permutation(moving)]
    assert moved <= eplb_moved / 2


def test_the_same_arguments_give_the_same_map():
    ranks, loads = ranks_of([10] * 8), loads_from(0)
    first, second = place(loads, ranks), place(loads, ranks)
    assert (first.map.slots == second.map.slots).all()


@pytest.mark.parametrize("groups", [1, 8])
def test_nothing_moves_while_counts_stay_the_same(groups):
    ranks, loads = ranks_of([10] * 8), loads_from(0)
    first = place(loads, ranks, group_count=groups)
    again = place(loads, ranks, current=first.map, group_count=groups)
    assert migration_count(first.map.slots, again.map.slots, EXPERTS) == 0


def test_too_little_memory_says_how_many_slots_are_missing():
    ranks = with_state(ranks_of([8] * 8), 3, ExpertRankState.DRAINING)
    with pytest.raises(ExpertsDoNotFit, match="8 slots of each layer are missing") as caught:
        place(loads_from(0), ranks)
    assert caught.value.missing_slots == 8


def test_an_expert_is_on_two_nodes_if_there_are_two_slots_for_each():
    ranks = ranks_of([16] * 8)
    for seed in range(8):
        found = place(loads_from(seed), ranks)
        check(found, ranks)
        assert found.copies == 2
        assert all(len(nodes) == 2 for nodes in nodes_of(found, ranks).values())


def test_replicas_of_an_expert_are_on_different_nodes():
    ranks = ranks_of([10] * 8)
    for seed in range(8):
        found = place(loads_from(seed), ranks)
        several = [key for key, names in found.map.replicas().items() if len(names) > 1]
        assert several
        assert all(len(nodes_of(found, ranks)[key]) > 1 for key in several)


@pytest.mark.parametrize(("slots", "nodes"), [(10, 1), (16, 2)])
def test_groups_stay_whole_on_one_node_or_on_two_if_there_is_memory_for_two(slots, nodes):
    ranks = ranks_of([slots] * 8, node_ranks=2)
    current = None
    for seed in range(6):
        found = place(loads_from(seed), ranks, current=current, group_count=8)
        check(found, ranks)
        assert found.has_whole_groups
        groups = {}
        for (layer, expert), names in nodes_of(found, ranks).items():
            groups.setdefault((layer, expert // 8), set()).update(names)
        assert all(len(names) == nodes for names in groups.values())
        current = found.map


def test_groups_are_given_up_if_a_node_has_no_room_for_its_share():
    ranks = with_state(ranks_of([10] * 8, node_ranks=2), 0, ExpertRankState.LOST)
    found = place(loads_from(0), ranks, group_count=8)
    check(found, ranks)
    assert not found.has_whole_groups


@pytest.mark.parametrize("state", [ExpertRankState.LOST, ExpertRankState.DRAINING])
def test_a_rank_that_leaves_moves_little_more_than_it_held(state):
    ranks, loads = ranks_of([10] * 8), loads_from(0)
    before = place(loads, ranks)
    left = with_state(ranks, 2, state)
    after = place(loads, left, current=before.map)
    check(after, left)
    assert "r002" not in after.map.ranks
    kept = np.delete(before.map.slots, 2, axis=1)
    assert migration_count(kept, after.map.slots, EXPERTS) <= 2 * LAYERS * 10
    assert after.balance.mean() > 0.9


def test_a_rank_that_joins_takes_its_share_and_fewer_experts_move_than_if_all_were_placed_anew():
    ranks, loads = ranks_of([8] * 9), loads_from(1)
    before = place(loads, ranks[:8])
    after = place(loads, ranks, current=before.map)
    check(after, ranks)
    index = after.map.ranks.index("r008")
    assert (after.map.slots[:, index] != EMPTY).all()
    kept = np.concatenate([before.map.slots, np.full((LAYERS, 1, 8), EMPTY)], axis=1)
    anew = place(loads, ranks)
    assert 2 * migration_count(kept, after.map.slots, EXPERTS) < migration_count(
        kept, anew.map.slots, EXPERTS
    )
    assert after.balance.mean() >= anew.balance.mean() - 0.03


def test_a_rank_whose_memory_shrinks_keeps_what_it_has_room_for():
    ranks, loads = ranks_of([10] * 8), loads_from(0)
    before = place(loads, ranks)
    fewer = ranks_of([9] * 8)
    after = place(loads, fewer, current=before.map)
    check(after, fewer)


def test_experts_that_nobody_has_are_loaded_first_the_most_used_first():
    names = (RankId("a"), RankId("b"), RankId("c"))
    target = ExpertMap.of(
        {ExpertKey(0, n): names[:2] for n in range(3)}, epoch=0, layer_count=1, expert_count=3, ranks=names
    )
    nodes = {name: NodeId(f"on-{name}") for name in names} | {RankId("c"): NodeId("on-a")}
    held = {ExpertKey(0, 1): names}
    held[ExpertKey(0, 1)] = (RankId("b"), RankId("c"))
    found = migrations(target, held, np.array([[1.0, 9.0, 5.0]]), nodes=nodes, size_bytes=10)
    assert [(one.expert, one.target, one.source) for one in found] == [
        *((2, "a", None), (0, "a", None)),
        *((1, "a", "c"), (2, "b", None), (0, "b", None)),
    ]
    assert seconds_at_least(found, bytes_per_s=10.0) == 3.0


def test_counts_lose_half_their_weight_in_a_half_life():
    counts = DecayedCounts(1, 2, half_life_s=10.0)
    counts.add(np.array([[8, 0]]), now_s=5.0)
    counts.add(np.array([[0, 3]]), now_s=15.0)
    assert counts.loads(now_s=15.0).tolist() == [[4.0, 3.0]]
    assert counts.loads(now_s=25.0).tolist() == [[2.0, 1.5]]
    assert counts.loads(now_s=1.0).tolist() == [[4.0, 3.0]], "a clock that goes back decays nothing"
