"""What is derived from the state of a group of expert ranks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.experts import ExpertRankPhase
from control_plane.expert_summary import (
    BusyExpert,
    busiest,
    has_experts_listed,
    is_whole,
    layer_shares,
    listed,
    ready_count,
)
from tests.unit.control_plane.expert_groups import group, large, rank


def test_the_busiest_experts_are_those_far_above_an_even_share_of_their_layer():
    loads = [100.0] * 64 + [1.0] * 64
    loads[64 + 9] = 65.0
    two_layers = group(layer_count=2, expert_loads=tuple(loads), expert_replicas=(3,) * 128)
    assert busiest(two_layers, 2) == [BusyExpert(1, 9, 32.5, 3), BusyExpert(0, 0, 1.0, 3)]
    assert busiest(large()) == busiest(group(expert_loads=(0.0,) * 256)) == []


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_shares_of_a_layer_are_one_in_the_mean(layer_count, expert_count, data):
    total = layer_count * expert_count
    loads = data.draw(st.lists(st.floats(0, 1e9), min_size=total, max_size=total))
    found = layer_shares(
        group(
            layer_count=layer_count,
            expert_count=expert_count,
            expert_loads=tuple(loads),
            expert_replicas=(1,) * total,
        )
    )
    assert [len(shares) for shares in found] == [expert_count] * layer_count
    for layer, shares in enumerate(found):
        has_load = sum(loads[layer * expert_count : (layer + 1) * expert_count]) > 0
        assert sum(shares) / expert_count == pytest.approx(float(has_load))


def test_experts_that_are_listed_in_part_count_as_not_listed():
    assert has_experts_listed(group())
    for wrong in ({"expert_loads": (1.0,)}, {"expert_replicas": ()}, {"layer_count": 5}, {"layer_count": 0}):
        assert not has_experts_listed(group(**wrong))
        assert layer_shares(group(**wrong)) == []


def test_a_group_is_whole_with_all_its_ranks_and_no_other_ones():
    assert is_whole(group())
    assert not is_whole(group(is_ready=False))
    assert not is_whole(group(wanted_ranks=3))
    assert not is_whole(group(wanted_ranks=5))
    assert not is_whole(group(rank(0), rank(1, ExpertRankPhase.DRAINING)))
    assert not is_whole(group(rank(0), rank(1, ExpertRankPhase.STARTING), wanted_ranks=1))


phases = st.sampled_from(list(ExpertRankPhase))
ranks = st.lists(st.tuples(phases, st.floats(0, 1)), min_size=1, max_size=40)


@given(ranks, st.integers(1, 20))
def test_ranks_that_need_attention_are_listed_before_any_others(made, count):
    found = group(*(rank(i, phase, load=load) for i, (phase, load) in enumerate(made)))
    shown = listed(found, count)
    assert len(shown) == min(count, len(made))
    assert len({r.name for r in shown}) == len(shown)
    left_out = [r for r in found.ranks if r not in shown]
    if any(r.phase is not ExpertRankPhase.READY for r in left_out):
        assert ready_count(msgspec.structs.replace(found, ranks=tuple(shown))) == 0
    elif left_out:
        ready = [r.load for r in shown if r.phase is ExpertRankPhase.READY]
        assert min(ready, default=1.0) >= max(r.load for r in left_out)
