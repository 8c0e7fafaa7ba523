"""One group of expert ranks: what always holds, whatever comes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.experts import ExpertRankPhase
from control_plane.experts import group_values as v
from tests.unit.control_plane.simulated_experts import EXPERTS, LAYERS, World


class AnyGroup(RuleBasedStateMachine):
    """Ranks that die, hang and fail to load, callers that come and go, and control planes that do."""

    def __init__(self):
        super().__init__()
        self.world = World(3, silence_s=3.0, suspect_silence_s=1.1, rebalance_s=10.0, first_wait_s=5.0)
        self.lives, self.called = 0, 0

    def pick(self, state, number):
        found = sorted(p.rank_id for p in self.world.processes.values() if p.state == state)
        return self.world.processes[found[number % len(found)]] if found else None

    def caller(self, number, *, is_open=True):
        found = sorted(c.name for c in self.world.callers.values() if c.is_open == is_open)
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 9))
    def starts(self, number):
        if process := self.pick("starting", number):
            self.world.hello(process.rank_id)

    @rule(number=st.integers(0, 9))
    def start_fails(self, number):
        if process := self.pick("starting", number):
            process.state = "dead"
            self.world.exit(process)

    @rule(number=st.integers(0, 9))
    def dies(self, number):
        if process := self.pick("running", number):
            self.world.kill(process.rank_id)

    @rule(number=st.integers(0, 9))
    def hangs(self, number):
        if process := self.pick("running", number):
            process.state = "stopped"

    @rule(number=st.integers(0, 9))
    def end_is_known(self, number):
        if process := self.pick("dead", number):
            self.world.exit(process)

    @rule(number=st.integers(0, 9), loads=st.integers(1, 8), is_failure=st.booleans())
    def loads(self, number, loads, is_failure):
        for _ in range(loads):
            process = self.pick("running", number)
            if process and process.orders:
                self.world.answer(process, process.orders[0], "reset" if is_failure else "")

    @precondition(lambda self: len(self.world.callers) < 4)
    @rule()
    def caller_comes(self):
        self.called += 1
        self.world.join(f"w{self.called}/0")

    @rule(number=st.integers(0, 9))
    def caller_comes_again(self, number):
        if name := self.caller(number, is_open=False):
            self.world.join(name)

    @rule(number=st.integers(0, 9), is_process=st.booleans())
    def caller_goes(self, number, is_process):
        if name := self.caller(number):
            self.world.hang_up(name)
            if is_process:
                del self.world.callers[name]

    @rule(number=st.integers(0, 9))
    def caller_uses_the_newest(self, number):
        if name := self.caller(number):
            self.world.use_newest(name)

    @rule(number=st.integers(0, 9), rank=st.integers(0, 9), is_gone=st.booleans())
    def suspects(self, number, rank, is_gone):
        name, process = self.caller(number), self.pick("running", rank) or self.pick("stopped", rank)
        if name and process:
            self.world.suspect(name, process.rank_id, is_gone=is_gone)

    @rule(number=st.integers(0, 9), seed=st.lists(st.integers(0, 1000), min_size=16, max_size=16))
    def counts(self, number, seed):
        if name := self.caller(number):
            self.world.count(name, seed)

    @rule(count=st.integers(0, 5))
    def scale(self, count):
        self.world.send(v.ExpertRanksWanted(count))

    @rule(number=st.integers(0, 9))
    def drain(self, number):
        names = sorted(self.world.group.ranks.entries)
        if names:
            self.world.send(v.ExpertRankDrained(names[number % len(names)]))

    @rule(node=st.sampled_from(["", "n0", "n1"]))
    def avoid(self, node):
        self.world.nodes = 1 if node == "n1" else 2
        self.world.send(v.ExpertNodesAvoided(frozenset({node} - {""})))

    @rule()
    def rebalance(self):
        self.world.send(v.ExpertsRebalanced())

    @rule(after_s=st.sampled_from([0.05, 0.5, 1.0, 1.0, 10.0]))
    def time_goes_on(self, after_s):
        if after_s <= 1.0:
            self.world.beat()
        self.world.tick(after_s)

    @rule()
    def control_plane_restarts(self):
        world, wanted = self.world, self.world.group.ranks.wanted
        self.lives += 1
        for process in list(world.processes.values()):
            if process.state == "dead":
                del world.processes[process.rank_id]
        for caller in world.callers.values():
            caller.is_open = False
        world.restart(f"b{self.lives}")
        for process in list(world.processes.values()):
            if process.state != "stopped":
                world.send(v.ExpertRankAdopted(process.rank_id))
            else:  # it does not answer
                del world.processes[process.rank_id]
        world.send(v.ExpertRanksWanted(wanted))
        for process in list(world.processes.values()):
            if process.state == "running":
                process.orders.clear()
                world.hello(process.rank_id)

    @invariant()
    def everything_has_a_bound(self):
        group = self.world.group
        assert len(group.ranks.entries) <= 64
        if group.rollout is not None:
            assert len(group.rollout.old_epochs) <= 17

    @invariant()
    def nothing_waits_without_a_deadline(self):
        group = self.world.group
        for entry in group.ranks.entries.values():
            assert entry.is_serving or entry.due_s is not None
        if group.rollout is not None and group.rollout.loading.total():
            assert group.next_tick_s is not None

    def teardown(self):
        """Whatever happened, strength comes back when nothing fails any more."""
        world = self.world
        world.send(v.ExpertRanksWanted(3))
        world.nodes = 2
        world.send(v.ExpertNodesAvoided(frozenset()))
        for caller in list(world.callers.values()):
            if not caller.is_open:
                world.join(caller.name)
        for _ in range(90):
            world.run(1.0, every_s=1.0)
            state = world.state()
            ready = [one for one in state.ranks if one.phase is ExpertRankPhase.READY]
            if len(ready) == len(state.ranks) == 3 and world.group.rollout.is_done:
                break
        assert len(world.live()) == len(state.ranks) == 3
        assert all(one.phase is ExpertRankPhase.READY for one in state.ranks)
        assert (state.missing, state.is_ready) == (0, True)
        assert world.group.rollout.is_done
        for name in world.callers:
            assert world.callers[name].newest == state.epoch
            assert all(world.replicas(name).values())
        held = sorted(len(process.held) for process in world.processes.values())
        assert held[-1] <= LAYERS * (EXPERTS // 3 + 1) + 2


TestAnyGroup = AnyGroup.TestCase
TestAnyGroup.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
