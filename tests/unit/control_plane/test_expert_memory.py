"""Ranks that survive take over no more experts than their memory holds, and late loads go elsewhere."""

import pytest

from control_plane.experts.load_times import LoadTimes
from control_plane.experts.rollout_values import (
    DropExpert,
    EpochUnused,
    ExpertAnnounced,
    ExpertNotLoaded,
    LoadExpert,
    RolloutLimits,
    RolloutTick,
)
from tests.unit.control_plane.simulated_experts import EXPERTS, LAYERS
from tests.unit.control_plane.test_expert_group import loads_since, ready_world
from tests.unit.control_plane.test_expert_rollout import Script, only, rank

# --- memory -----------------------------------------------------------------------------------------


def world_of(slots_max, **settings):
    """Four ranks with memory for so many experts of each layer."""
    return ready_world(slots_max=slots_max, **settings)


@pytest.mark.parametrize(("lost", "slots_max", "fits"), [(2, 4, True), (2, 3, False), (3, 8, True)])
def test_survivors_take_over_what_their_memory_holds(lost, slots_max, fits):
    world = world_of(slots_max)
    for rank_id in world.live()[:lost]:
        world.kill(rank_id)
    world.run(0.2)
    state = world.state()
    assert (state.missing == 0, state.lacks_memory) == (fits, not fits)
    assert all(len(one.held) <= slots_max * LAYERS + 2 for one in world.processes.values())


def test_what_does_not_fit_is_loaded_when_another_rank_has_come():
    world = world_of(3)
    for rank_id in world.live()[:2]:
        world.kill(rank_id)
    world.run(0.2)
    assert world.state().missing > 0
    world.run(8.0)
    state = world.state()
    assert (state.missing, state.lacks_memory) == (0, False)


def test_ranks_of_unlike_memory_divide_what_is_lost_by_it():
    world = world_of({0: 2, 1: 8, 2: 8, 3: 2})
    world.kill(next(one for one in world.live() if "experts-decode-2." in one))
    world.run(0.2)
    assert world.state().missing == 0
    sizes = {one.rank_id.split(".")[0]: len(one.held) for one in world.processes.values()}
    assert sizes["experts-decode-0"] <= 2 * LAYERS + 2
    assert sizes["experts-decode-1"] >= 4 * LAYERS


def test_a_rank_that_is_full_is_not_ended_for_it():
    """It refuses experts that nobody else has, again and again."""
    world = ready_world()
    world.full = "it is full"
    world.kill(world.live()[0])
    live = set(world.live())
    world.run(3.0)
    assert live <= set(world.live())
    assert world.state().losses == 1
    mark = len(world.log)
    world.run(1.0)
    assert len(loads_since(world, mark)) < 4 * LAYERS * EXPERTS  # it is asked now and then only


# --- times of loads ---------------------------------------------------------------------------------

LIMITS = RolloutLimits(bytes_per_s=1e9, load_timeout_s=60.0)


def test_a_load_may_take_as_long_as_others_say():
    times = LoadTimes(LIMITS)
    assert times.timeout_s(0) == 60.0
    times.took(0.1)
    assert times.timeout_s(0) == 2.0
    assert times.timeout_s(3) == 16.0
    times.took(1.0)
    assert times.timeout_s(0) == 8.0
    assert times.timeout_s(30) == 60.0
    for _ in range(200):
        times.took(0.1)
    assert times.timeout_s(0) == 2.0


def script():
    """Three ranks; what b had is lost, and a load took a tenth of a second."""
    ranks = [rank("a", slots=3), rank("b", slots=3)]
    made = Script({0: ["a"]}, ranks=ranks, experts=3, limits=LIMITS)
    loads = only(made.send(made.target({0: ["a"], 1: ["a"], 2: ["a"]})), LoadExpert)
    assert [one.rank_id for one in loads] == ["a", "a"]
    made.send(ExpertAnnounced(loads[0].load_id), after_s=0.1)
    return made, loads[1]


def test_a_load_that_hangs_is_tried_by_another_rank():
    made, hung = script()
    begun = made.send(RolloutTick(), after_s=59.0)
    assert begun == []  # it began before anything was measured
    actions = made.send(RolloutTick(), after_s=1.0)
    assert only(actions, DropExpert) == [DropExpert(hung.rank_id, hung.key)]
    (load,) = only(actions, LoadExpert)
    assert (load.rank_id, load.key) == ("b", hung.key)
    made.send(ExpertAnnounced(load.load_id), after_s=0.1)
    assert made.named()[hung.key.expert] == {"b"}


def test_a_load_that_hangs_is_given_up_after_what_others_took():
    made, hung = script()
    made.send(ExpertNotLoaded(hung.load_id, "it cannot be read"))
    actions = made.send(RolloutTick(), after_s=0.0)
    assert made.rollout.next_tick_s is not None
    assert made.rollout.next_tick_s <= made.now_s + 2.0
    actions = made.send(RolloutTick(), after_s=2.1)
    assert only(actions, LoadExpert), "the next rank has its turn"


def test_the_first_rank_takes_it_up_again_and_the_other_lets_it_go():
    made, hung = script()
    (spare,) = only(made.send(ExpertNotLoaded(hung.load_id, "it cannot be read")), LoadExpert)
    made.send(ExpertAnnounced(spare.load_id))
    (again,) = only(made.send(RolloutTick(), after_s=1.1), LoadExpert)
    assert again.rank_id == "a"
    made.send(ExpertAnnounced(again.load_id))
    made.send(EpochUnused(max(made.rollout.old_epochs)))
    assert made.named()[hung.key.expert] == {"a"}


def test_a_full_rank_rests():
    made, hung = script()
    (spare,) = only(made.send(ExpertNotLoaded(hung.load_id, "full", is_full=True)), LoadExpert)
    assert spare.rank_id == "b"
    made.send(ExpertNotLoaded(spare.load_id, "full", is_full=True))
    assert not [one for one in only(made.send(RolloutTick(), after_s=1.0), LoadExpert) if one.rank_id == "a"]
    assert [one.rank_id for one in only(made.send(RolloutTick(), after_s=4.1), LoadExpert)] == ["a"]
