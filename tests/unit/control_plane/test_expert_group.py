"""One group of expert ranks: scripts of events."""

from dataclasses import replace
from itertools import pairwise

from baton.core.experts import ExpertLoadOrder, ExpertRankPhase
from control_plane.experts import group_values as v
from tests.unit.control_plane.simulated_experts import BYTES, EXPERTS, LAYERS, World


def ready_world(wanted=4, **settings):
    world = World(wanted, **settings)
    world.join("w0/0")
    world.run(0.3)
    assert world.state().is_ready
    return world


def orders_since(world, mark):
    actions = world.log[mark:]
    return [(a.rank_id, a.order) for a in actions if isinstance(a, v.TellExpertRank)]


def loads_since(world, mark):
    return [(rank, o) for rank, o in orders_since(world, mark) if isinstance(o, ExpertLoadOrder)]


def test_the_first_placement_waits_for_all_ranks_and_loads_every_expert_without_a_limit():
    world = World(4, bytes_per_s=1.0)
    world.join("w0/0")
    for rank_id in list(world.processes)[:3]:
        world.hello(rank_id)
    assert loads_since(world, 0) == []
    world.hello(list(world.processes)[3])
    world.run(0.1)
    held = [len(process.held) for process in world.processes.values()]
    assert held == [LAYERS * EXPERTS // 4] * 4
    assert all(len(ranks) == 1 for ranks in world.replicas("w0/0").values())
    state = world.state()
    assert (state.is_ready, state.missing, state.migrations) == (True, 0, 0)


def test_the_first_placement_is_made_without_a_rank_that_does_not_come():
    world = World(4, first_wait_s=10.0)
    for rank_id in list(world.processes)[:3]:
        world.hello(rank_id)
    world.beat()
    world.tick(2.9)
    assert loads_since(world, 0) == []
    for _ in range(4):
        world.beat()
        world.tick(2.0)
    assert len({rank for rank, _ in loads_since(world, 0)}) == 3


def test_a_lost_rank_is_out_of_the_map_at_once_and_survivors_load_the_most_used_experts_first():
    world = ready_world(bytes_per_s=1.0)
    lost = world.live()[0]
    mine = sorted(world.processes[lost].held)
    counts = [1] * (LAYERS * EXPERTS)
    counts[mine[2]] = 50
    world.count("w0/0", counts)
    mark = len(world.log)
    world.kill(lost)
    (announced,) = [a for a in world.log[mark:] if isinstance(a, v.TellExpertCallers)]
    assert lost not in {one.ref.rank_id for one in announced.update.ranks}
    loads = [order.expert for _, order in loads_since(world, mark)]
    assert set(loads[:4]) == set(mine)
    assert loads[0] == mine[2]
    world.run(0.1)
    assert world.state().missing == 0
    world.run(8.0)
    assert len(world.live()) == 4
    assert world.state().losses == 1
    assert all(process.held for process in world.processes.values()), "the successor took its share"


def test_with_second_replicas_nothing_is_missing_after_a_loss():
    world = ready_world(replicas=2.0)
    world.kill(world.live()[0])
    assert world.state().missing == 0
    assert min(len(ranks) for ranks in world.replicas("w0/0").values()) == 1


def test_two_losses_at_once_leave_no_expert_without_a_replica():
    world = ready_world()
    first, second = world.live()[:2]
    world.kill(first)
    world.kill(second)
    world.run(0.1)
    assert world.state().missing == 0


def test_a_rank_that_one_caller_suspects_stays_if_it_beats_and_the_caller_does_not_repeat_it():
    world = ready_world()
    rank_id = world.live()[0]
    world.suspect("w0/0", rank_id)
    world.run(3.0)
    assert rank_id in world.live()
    assert world.state().losses == 0


def test_a_suspected_rank_is_lost_for_all_when_it_is_silent_or_suspected_again_or_by_another():
    def lost_after(*steps):
        world = ready_world()
        world.join("w1/0")
        rank_id = world.live()[0]
        for step in steps:
            step(world, rank_id)
        return world.processes.get(rank_id, None) is None or world.processes[rank_id].state == "dead"

    def suspect(world, rank_id):
        world.suspect("w0/0", rank_id)

    def other(world, rank_id):
        world.suspect("w1/0", rank_id)

    def gone(world, rank_id):
        world.suspect("w0/0", rank_id, is_gone=True)

    def silence(world, rank_id):
        world.processes[rank_id].state = "stopped"
        world.beat()
        world.tick(0.31)

    def half_a_second(world, _):
        for _ in range(5):
            world.beat()
            world.tick(0.1)

    assert lost_after(gone)
    assert lost_after(suspect, other)
    assert lost_after(suspect, silence)
    assert lost_after(silence, suspect)
    assert lost_after(suspect, half_a_second, suspect)
    assert not lost_after(suspect)
    assert not lost_after(silence)


def test_silence_while_the_control_plane_was_held_up_is_no_loss():
    world = ready_world()
    world.now_s += 5.0
    world.send(v.ExpertGroupPaused(5.0))
    world.send(v.ExpertGroupTick())
    assert len(world.live()) == 4


def test_a_joining_rank_takes_its_share_at_once():
    world = ready_world(2)
    world.send(v.ExpertRanksWanted(4))
    world.run(2.0)
    held = sorted(len(process.held) for process in world.processes.values())
    assert held == [LAYERS * EXPERTS // 4] * 4
    migrations = world.state().migrations
    assert LAYERS * EXPERTS // 2 <= migrations <= LAYERS * EXPERTS
    assert world.state().migrated_bytes == BYTES * migrations


def test_scaling_down_loses_no_expert_at_any_moment():
    world = ready_world(4)
    world.send(v.ExpertRanksWanted(2))
    world.run(3.0)
    assert len(world.live()) == 2
    state = world.state()
    assert (state.missing, state.losses, len(state.ranks)) == (0, 0, 2)


def test_a_drained_rank_is_replaced_before_it_goes_where_the_others_have_no_room():
    world = ready_world(2)
    name = world.state().ranks[0].name
    mark = len(world.log)
    world.send(v.ExpertRankDrained(name))
    phases = {one.name: one.phase for one in world.state().ranks}
    assert phases[name] is ExpertRankPhase.DRAINING
    assert len(phases) == 3
    assert len(world.replicas("w0/0")) == LAYERS * EXPERTS
    world.run(3.0)
    names = {one.name for one in world.state().ranks}
    assert name not in names
    assert not [one for one in world.log[mark:] if isinstance(one, v.KillExpertRank)]
    assert len(names) == 2
    assert (world.state().missing, world.state().losses) == (0, 0)


def test_ranks_leave_a_node_that_is_to_be_left():
    world = ready_world(4)
    world.nodes = 1  # what starts from now on is on node n0
    world.send(v.ExpertNodesAvoided(frozenset({"n1"})))
    world.run(4.0)
    assert {process.node for process in world.processes.values()} == {"n0"}
    assert world.state().missing == 0


def test_a_slowed_rank_loses_its_load_at_the_next_rebalance_and_is_tried_again_later():
    world = ready_world(4)
    slow = world.live()[0]
    for process in world.processes.values():
        process.rows, process.busy_s = 1000, 1.0
    world.processes[slow].busy_s = 10.0
    world.run(31.0)
    assert world.processes[slow].held == set()
    assert world.state().missing == 0
    world.run(70.0, every_s=1.0)
    assert world.processes[slow].held


def test_a_rank_of_little_load_is_not_slow():
    world = ready_world(4)
    for process in world.processes.values():
        process.rows, process.busy_s = 10_000, 10.0
    idle = world.processes[world.live()[0]]
    idle.rows, idle.busy_s = 100, 1.0
    world.run(31.0)
    assert idle.held


def test_load_that_moves_is_followed_only_if_that_is_worth_it():
    world = ready_world(4)
    mark = len(world.log)
    world.count("w0/0", [1000] * (LAYERS * EXPERTS))
    world.run(31.0)
    assert loads_since(world, mark) == []
    hot = world.processes[world.live()[0]].held
    world.count("w0/0", [10**6 if n in hot else 1 for n in range(LAYERS * EXPERTS)])
    world.run(31.0)
    assert loads_since(world, mark)
    assert world.state().balance > 0.49, "the two hot experts are on two of four ranks"


def test_an_expert_is_not_dropped_while_a_caller_may_use_the_map_that_names_it():
    world = ready_world(2)
    world.send(v.ExpertRanksWanted(4))
    for process in list(world.processes.values()):
        if process.state == "starting":
            world.hello(process.rank_id)
    old = world.replicas("w0/0")

    def load_all():
        for _ in range(100):
            for process in world.processes.values():
                for order in list(process.orders):
                    world.answer(process, order)
            world.beat()
            world.tick(0.1)

    load_all()
    assert len(world.callers["w0/0"].maps) > 1
    assert all(expert in world.processes[rank].held for expert, ranks in old.items() for rank in ranks)
    world.hang_up("w0/0")
    del world.callers["w0/0"]  # the process has ended
    load_all()
    held = sorted(len(process.held) for process in world.processes.values())
    assert held == [LAYERS * EXPERTS // 4] * 4


def test_a_new_control_plane_goes_on_with_what_ranks_hold_and_callers_use():
    world = ready_world(4, replicas=2.0)
    caller = world.callers["w0/0"]
    before, epoch = world.replicas("w0/0"), caller.newest
    world.restart("b")
    for rank_id in world.live():
        world.send(v.ExpertRankAdopted(rank_id))
    world.send(v.ExpertRanksWanted(4))
    world.join("w0/0")
    mark = len(world.log)
    for rank_id in world.live():
        world.hello(rank_id)
    assert caller.newest > epoch
    assert world.replicas("w0/0") == before
    world.run(8.0)
    assert loads_since(world, mark) == []
    assert world.state().losses == 0
    assert len(world.live()) == 4


def test_a_caller_that_comes_late_to_a_new_control_plane_gets_a_map_above_the_one_that_it_knows():
    world = ready_world(2)
    for _ in range(5):
        world.send(v.ExpertRankDrained(world.state().ranks[0].name))
        world.run(4.0)
    epoch = world.callers["w0/0"].newest
    world.restart("b")
    for rank_id in world.live():
        world.send(v.ExpertRankAdopted(rank_id))
    world.send(v.ExpertRanksWanted(2))
    for rank_id in world.live():
        world.hello(rank_id)
    world.run(1.0)
    world.join("w0/0")
    assert world.callers["w0/0"].newest > epoch


def test_an_adopted_rank_that_does_not_say_hello_is_replaced():
    world = ready_world(2)
    frozen, other = world.live()
    world.restart("b")
    world.send(v.ExpertRankAdopted(frozen))
    world.send(v.ExpertRankAdopted(other))
    world.send(v.ExpertRanksWanted(2))
    world.processes[frozen].state = "stopped"
    world.hello(other)
    world.join("w0/0")
    world.run(20.0)
    assert frozen not in world.live()
    assert len(world.live()) == 2
    assert world.state().missing == 0


def test_a_rank_that_cannot_load_from_the_files_is_started_anew():
    world = World(2)
    world.join("w0/0")
    for rank_id in list(world.processes):
        world.hello(rank_id)
    broken = next(iter(world.processes.values()))
    for _ in range(40):
        if broken.state == "running" and broken.orders:
            world.answer(broken, broken.orders[0], "no such file")
        world.beat()
        world.tick(0.25)
    assert broken.state == "dead"
    world.run(5.0)
    assert world.state().missing == 0


def test_a_process_that_keeps_dying_is_started_ever_more_rarely():
    world = World(1)
    starts = []
    for _ in range(200):
        for process in list(world.processes.values()):
            starts.append(world.now_s)
            world.exit(process)
        world.tick(0.25)
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert gaps[-1] == 8.0


def test_a_stray_rank_is_told_to_end():
    world = ready_world(2)
    one = replace(next(iter(world.processes.values())), rank_id="experts-decode-0.old", state="starting")
    world.processes[one.rank_id] = one
    world.hello(one.rank_id)
    assert one.state == "dead"
    del world.processes[one.rank_id]
    assert len(world.live()) == 2
