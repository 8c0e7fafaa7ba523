"""The rollout of expert maps: scripts of events, and what always holds whatever comes."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.ids import NodeId
from control_plane.experts.place import place
from control_plane.experts.rollout import ExpertRollout
from control_plane.experts.rollout_values import (
    AnnounceMap,
    DropExpert,
    EpochRaised,
    EpochUnused,
    ExpertAnnounced,
    ExpertNotLoaded,
    ExpertRankJoined,
    ExpertRankLost,
    LoadExpert,
    RolloutLimits,
    RolloutTick,
    TargetSet,
)
from control_plane.experts.values import (
    ExpertKey,
    ExpertMap,
    ExpertRank,
    ExpertRankState,
    ExpertsDoNotFit,
    RankId,
)

BYTES = 100
LIMITS = RolloutLimits(bytes_per_s=100.0, spare_slots=2, load_timeout_s=30.0, retry_s=1.0)
ONE_EXPERT_S = 1.0


def rank(name, node="n0", slots=1, state=ExpertRankState.READY):
    return ExpertRank(RankId(name), NodeId(node), slots, state)


def expert_map(replicas, ranks, *, experts, layers=1, epoch=0):
    named = {ExpertKey(0, expert): names for expert, names in replicas.items()}
    ids = tuple(one.rank_id for one in ranks)
    return ExpertMap.of(named, epoch=epoch, layer_count=layers, expert_count=experts, ranks=ids)


def loads_of(*values):
    return np.array([values], dtype=float)


class Script:
    """A rollout of one layer, and every action so far."""

    def __init__(self, replicas, *, ranks, experts, limits=LIMITS):
        self.ranks, self.experts = ranks, experts
        current = expert_map(replicas, ranks, experts=experts)
        self.rollout = ExpertRollout(current, tuple(ranks), expert_bytes=BYTES, limits=limits)
        self.now_s = 0.0

    def send(self, event, *, after_s=0.0):
        self.now_s += after_s
        return self.rollout.handle(event, now_s=self.now_s)

    def target(self, replicas, *, ranks=None, loads=None):
        ranks = ranks or self.ranks
        loads = np.ones((1, self.experts)) if loads is None else loads
        return TargetSet(expert_map(replicas, ranks, experts=self.experts), tuple(ranks), loads)

    def named(self):
        return {key.expert: set(names) for key, names in self.rollout.map.replicas().items()}


def only(actions, kind):
    return [one for one in actions if isinstance(one, kind)]


def test_a_rank_is_needed_while_it_loads_what_nobody_has():
    script = Script({0: ("a",)}, ranks=[rank("a", slots=2), rank("b", slots=2)], experts=2)
    (load,) = only(script.send(script.target({0: ("a",), 1: ("b",)})), LoadExpert)
    assert script.rollout.needs(RankId("b"))
    script.send(ExpertAnnounced(load.load_id), after_s=1.0)
    assert script.rollout.needs(RankId("b"))


def test_a_rank_that_loads_what_another_holds_may_leave():
    script = Script({0: ("a",)}, ranks=[rank("a"), rank("b")], experts=1)
    (load,) = only(script.send(script.target({0: ("a", "b")})), LoadExpert)
    assert load.rank_id == "b"
    assert not script.rollout.needs(RankId("b"))


def test_an_expert_moves_only_after_it_is_announced_and_is_dropped_only_when_the_old_epoch_is_unused():
    script = Script({0: ["a"], 1: ["b"]}, ranks=[rank("a", slots=2), rank("b", slots=2)], experts=2)
    (load,) = script.send(script.target({0: ["b"], 1: ["b"]}))
    assert (load.rank_id, load.key, load.source) == ("b", ExpertKey(0, 0), "a")
    assert script.named() == {0: {"a"}, 1: {"b"}}

    (announced,) = script.send(ExpertAnnounced(load.load_id))
    assert announced.map.epoch == 1
    assert script.named() == {0: {"b"}, 1: {"b"}}

    assert script.send(EpochUnused(0)) == [DropExpert(RankId("a"), ExpertKey(0, 0))]
    assert script.rollout.is_done


def test_two_full_ranks_exchange_their_only_replicas():
    script = Script({0: ["a"], 1: ["b"]}, ranks=[rank("a"), rank("b")], experts=2)
    waiting = script.send(script.target({0: ["b"], 1: ["a"]}))
    assert len(waiting) == 2
    for load in waiting:
        script.send(ExpertAnnounced(load.load_id))
    for epoch in range(3):
        script.send(EpochUnused(epoch))
    assert script.named() == {0: {"b"}, 1: {"a"}}
    assert script.rollout.is_done


def test_bytes_per_second_are_bounded_at_both_ends():
    ranks = [rank("a", slots=4), rank("b", slots=4), rank("c", slots=4)]
    script = Script({0: ["a"], 1: ["a"], 2: ["a"]}, ranks=ranks, experts=3)
    first = script.send(script.target({0: ["b"], 1: ["c"], 2: ["b"]}))
    assert len(first) == 1, "the only source sends one at a time"
    assert script.rollout.next_tick_s == ONE_EXPERT_S
    assert script.send(RolloutTick(), after_s=0.5) == []
    assert len(script.send(RolloutTick(), after_s=0.5)) == 1


def test_experts_without_a_replica_come_first_the_most_used_first():
    ranks = [rank("a", slots=8), rank("b", slots=8), rank("c", slots=8)]
    script = Script({0: ["a"], 1: ["b"], 2: ["b"], 3: ["a"]}, ranks=ranks, experts=4)
    (announced,) = script.send(ExpertRankLost(RankId("b")))
    assert announced.map.ranks == ("a", "c")
    assert script.named() == {0: {"a"}, 3: {"a"}}
    left = [ranks[0], ranks[2]]
    target = script.target(
        {0: ["a", "c"], 1: ["c"], 2: ["c"], 3: ["a"]}, ranks=left, loads=loads_of(9, 1, 5, 0)
    )
    actions = only(script.send(target), LoadExpert)
    assert [one.key.expert for one in actions] == [2, 1, 0]
    assert [one.source for one in actions] == [None, None, "a"], "those that no rank holds take no turns"


def test_an_expert_that_no_rank_holds_is_tried_again_soon_and_without_regard_to_limits():
    script = Script({}, ranks=[rank("a", slots=4)], experts=2)
    first, second = script.send(script.target({0: ["a"], 1: ["a"]}))
    for failures in range(3):
        script.send(ExpertNotLoaded(first.load_id, "reset"))
        assert script.rollout.next_tick_s == script.now_s + LIMITS.missing_retry_s, failures
        (first,) = script.send(RolloutTick(), after_s=LIMITS.missing_retry_s)
    assert second.key.expert == 1


def test_a_first_placement_is_not_limited_and_a_rank_loads_a_few_experts_at_once():
    ranks = [rank("a", slots=20), rank("b", slots=20)]
    script = Script({}, ranks=ranks, experts=12)
    target = script.target({expert: ["a", "b"] for expert in range(12)})
    loads = only(script.send(replace(target, is_first=True)), LoadExpert)
    assert Counter(one.rank_id for one in loads) == {"a": LIMITS.loads_max, "b": LIMITS.loads_max}
    while loads:
        loads += only(script.send(ExpertAnnounced(loads.pop(0).load_id)), LoadExpert)
        assert max(Counter(one.rank_id for one in loads).values(), default=0) <= LIMITS.loads_max
        script.send(EpochUnused(script.rollout.map.epoch - 1))
    assert script.now_s == 0.0
    assert script.named() == {expert: {"a", "b"} for expert in range(12)}


def test_maps_follow_one_another_no_faster_than_asked_but_a_lost_rank_is_out_at_once():
    limits = replace(LIMITS, announce_s=0.1)
    script = Script({2: ["b"]}, ranks=[rank("a", slots=4), rank("b")], experts=3, limits=limits)
    first, second = script.send(script.target({0: ["a"], 1: ["a"], 2: ["b"]}))
    assert len(script.send(ExpertAnnounced(first.load_id))) == 1
    assert script.send(ExpertAnnounced(second.load_id), after_s=0.05) == []
    assert script.rollout.next_tick_s == 0.1
    (announced,) = script.send(RolloutTick(), after_s=0.06)
    assert set(announced.map.replicas()) == {(0, 0), (0, 1), (0, 2)}
    (announced,) = script.send(ExpertRankLost(RankId("b")))
    assert set(announced.map.replicas()) == {(0, 0), (0, 1)}


def test_experts_that_no_map_named_are_announced_while_an_old_epoch_is_in_use():
    script = Script({0: ["a"], 1: ["b"]}, ranks=[rank("a", slots=4), rank("b")], experts=2)
    script.send(ExpertRankLost(RankId("b")))
    (load,) = script.send(script.target({0: ["a"], 1: ["a"]}))
    (announced,) = script.send(ExpertAnnounced(load.load_id))
    assert set(announced.map.replicas()) == {(0, 0), (0, 1)}
    assert script.rollout.old_epochs == (0, 1)


def test_a_rank_that_joins_with_experts_is_named_for_them_and_may_be_told_to_drop_them():
    script = Script({0: ["a"]}, ranks=[rank("a", slots=2)], experts=2)
    keys = (ExpertKey(0, 0), ExpertKey(0, 1))
    (announced,) = script.send(ExpertRankJoined(rank("b", slots=2), keys))
    assert script.named() == {0: {"a"}, 1: {"b"}}
    drops = script.send(EpochUnused(announced.map.epoch - 1))
    assert drops == [DropExpert(RankId("b"), keys[0])], "an earlier epoch might have named it"
    assert script.rollout.held_by(RankId("b")) == {keys[1]}


def test_a_map_is_announced_again_above_an_epoch_that_somebody_knows():
    script = Script({0: ["a"]}, ranks=[rank("a")], experts=1)
    (announced,) = script.send(EpochRaised(7))
    assert announced.map.epoch == 8
    assert announced.map.replicas() == {(0, 0): ("a",)}
    assert set(script.rollout.old_epochs) == {0, 7}


def test_what_an_earlier_life_named_is_kept_while_its_map_is_in_use():
    script = Script({0: ["a"]}, ranks=[rank("a", slots=2), rank("b", slots=2)], experts=1)
    (load,) = script.send(script.target({0: ["b"]}))
    script.send(ExpertAnnounced(load.load_id))
    assert script.named() == {0: {"b"}}
    script.send(EpochRaised(7))
    assert script.send(EpochUnused(6)) == []
    assert script.send(EpochUnused(7)) == [DropExpert(RankId("a"), ExpertKey(0, 0))]


def test_a_lost_rank_is_left_out_while_an_old_epoch_is_still_in_use():
    script = Script({0: ["a", "b"]}, ranks=[rank("a", slots=2), rank("b"), rank("c")], experts=1)
    (load,) = script.send(script.target({0: ["c", "b"]}))
    script.send(ExpertAnnounced(load.load_id))
    (announced,) = only(script.send(ExpertRankLost(RankId("b"))), AnnounceMap)
    assert announced.map.epoch == 2
    assert "b" not in script.named()[0]


def test_a_rank_whose_last_replica_would_go_keeps_it_until_another_has_announced():
    script = Script({0: ["a"]}, ranks=[rank("a"), rank("b")], experts=1)
    (load,) = script.send(script.target({0: ["b"]}))
    assert script.send(ExpertNotLoaded(load.load_id, "no memory")) == []
    assert script.named() == {0: {"a"}}
    assert script.rollout.next_tick_s == 1.0
    (again,) = script.send(RolloutTick(), after_s=1.0)
    script.send(ExpertAnnounced(again.load_id))
    assert script.named() == {0: {"b"}}


def test_failures_of_the_same_load_are_tried_ever_more_rarely():
    script = Script({0: ["a"]}, ranks=[rank("a"), rank("b")], experts=1)
    (load,) = script.send(script.target({0: ["b"]}))
    waits = []
    for _ in range(4):
        script.send(ExpertNotLoaded(load.load_id, "reset"))
        waits.append(script.rollout.next_tick_s - script.now_s)
        (load,) = script.send(RolloutTick(), after_s=waits[-1])
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_load_that_nobody_answers_is_dropped_and_tried_again():
    script = Script({0: ["a"]}, ranks=[rank("a"), rank("b")], experts=1)
    (load,) = script.send(script.target({0: ["b"]}))
    assert script.send(RolloutTick(), after_s=29.0) == []
    assert script.send(RolloutTick(), after_s=1.0) == [DropExpert(RankId("b"), load.key)]
    assert script.send(ExpertAnnounced(load.load_id)) == [], "the rank was told to drop it"
    assert script.named() == {0: {"a"}}


def test_a_rank_that_wants_an_expert_itself_is_not_asked_in_place_of_another():
    ranks = [rank("a"), rank("b", slots=2), rank("c", slots=2)]
    script = Script({0: ["a"]}, ranks=ranks, experts=1)
    script.send(script.target({0: ["b", "c"]}))
    script.send(ExpertRankLost(RankId("a")))
    sent = only(script.send(RolloutTick(), after_s=31.0), LoadExpert)
    sent += only(script.send(RolloutTick(), after_s=31.0), LoadExpert)
    assert len({one.rank_id for one in sent}) == len(sent)


def test_a_new_target_forgets_what_is_not_wanted_any_more():
    ranks = [rank("a", slots=2), rank("b", slots=2)]
    script = Script({0: ["a"], 1: ["b"]}, ranks=ranks, experts=2)
    (load,) = script.send(script.target({0: ["a", "b"], 1: ["b"]}))
    script.send(script.target({0: ["a"], 1: ["b"]}))
    assert script.send(ExpertAnnounced(load.load_id)) == [DropExpert(RankId("b"), ExpertKey(0, 0))]
    assert script.rollout.is_done


class AnyRollout(RuleBasedStateMachine):
    """A cluster that does what it is told and sometimes fails; its callers keep epochs in use for a while."""

    LAYERS, EXPERTS, SLOTS = 2, 6, 3

    def __init__(self):
        super().__init__()
        self.now_s, self.made = 0.0, 4
        self.ranks = {f"r{n}": rank(f"r{n}", f"n{n % 2}", self.SLOTS) for n in range(4)}
        loads = np.ones((self.LAYERS, self.EXPERTS))
        first = place(loads, list(self.ranks.values())).map
        limits = replace(LIMITS, old_maps_max=2)
        self.rollout = ExpertRollout(first, tuple(self.ranks.values()), expert_bytes=BYTES, limits=limits)
        self.held = {name: Counter() for name in self.ranks}
        for key, names in first.replicas().items():
            for name in names:
                self.held[name][key] = 1
        self.maps = {first.epoch: first}
        self.latest = first.epoch
        self.loads, self.sent, self.lost = {}, [], set()

    def send(self, event):
        for action in self.rollout.handle(event, now_s=self.now_s):
            match action:
                case LoadExpert():
                    self.load(action)
                case AnnounceMap(found):
                    self.announce(found)
                case DropExpert():
                    self.drop(action)

    def load(self, action):
        assert action.rank_id in self.ranks
        assert action.source is None or self.held[action.source][action.key]
        assert self.held[action.rank_id][action.key] == 0
        under_way = {(one.rank_id, one.key) for one in self.loads.values()}
        assert (action.rank_id, action.key) not in under_way, "a rank loads an expert twice"
        missing = not any(held[action.key] for held in self.held.values())
        if not missing or any(one.key == action.key for one in self.loads.values()):
            self.sent.append((self.now_s, action))
        self.loads[action.load_id] = action
        used = sum(self.held[action.rank_id].values())
        loading = sum(one.rank_id == action.rank_id for one in self.loads.values())
        assert used + loading <= self.LAYERS * self.SLOTS + LIMITS.spare_slots

    def announce(self, found):
        assert found.epoch > self.latest
        self.latest = found.epoch
        self.maps[found.epoch] = found
        for key, names in found.replicas().items():
            assert all(self.held[name][key] for name in names), "a map names what has not been announced"
        named = set(found.replicas())
        assert named == {key for held in self.held.values() for key, count in held.items() if count}

    def drop(self, action):
        late = [n for n, one in self.loads.items() if (one.rank_id, one.key) == (action.rank_id, action.key)]
        if late:
            assert self.held[action.rank_id][action.key] == 0
            for number in late:
                del self.loads[number]
            return
        assert self.held[action.rank_id][action.key] == 1
        for found in self.maps.values():
            assert action.rank_id not in found.replicas().get(action.key, ()), "an epoch in use names it"
        self.held[action.rank_id][action.key] = 0
        assert any(held[action.key] for held in self.held.values()), "the last replica was dropped"

    @rule(seed=st.integers(0, 2**16), draining=st.integers(-3, 3))
    def rebalance(self, seed, draining):
        loads = np.random.default_rng(seed).pareto(1.0, (self.LAYERS, self.EXPERTS))
        ranks = list(self.ranks.values())
        if draining >= 0:
            at = draining % len(ranks)
            ranks[at] = rank(ranks[at].rank_id, ranks[at].node_id, self.SLOTS, ExpertRankState.DRAINING)
        try:
            found = place(loads, ranks, current=self.rollout.map)
        except ExpertsDoNotFit:
            return
        self.send(TargetSet(found.map, tuple(ranks), loads))

    @precondition(lambda self: len(self.ranks) > 2)
    @rule(number=st.integers(0, 9))
    def lose(self, number):
        name = sorted(self.ranks)[number % len(self.ranks)]
        del self.ranks[name], self.held[name]
        self.lost.add(name)
        self.loads = {n: one for n, one in self.loads.items() if one.rank_id != name}
        self.send(ExpertRankLost(RankId(name)))
        assert all(name not in names for names in self.rollout.map.replicas().values())

    @precondition(lambda self: len(self.maps) < 8)
    @rule(above=st.integers(0, 40))
    def raise_epoch(self, above):
        # Somebody knows the map of that epoch, and uses it until it is said to be unused.
        self.maps.setdefault(above, self.rollout.map)
        self.send(EpochRaised(above))
        assert self.latest > above

    @precondition(lambda self: len(self.ranks) < 6)
    @rule(experts=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=6))
    def join_with_experts(self, experts):
        name = f"r{self.made}"
        keys = tuple(ExpertKey(*one) for one in sorted(experts))
        self.ranks[name], self.held[name] = rank(name, f"n{self.made % 2}", self.SLOTS), Counter(keys)
        self.made += 1
        self.send(ExpertRankJoined(self.ranks[name], keys))

    @precondition(lambda self: len(self.ranks) < 6)
    @rule()
    def join(self):
        name = f"r{self.made}"
        self.ranks[name], self.held[name] = rank(name, f"n{self.made % 2}", self.SLOTS), Counter()
        self.made += 1

    @precondition(lambda self: bool(self.loads))
    @rule(number=st.integers(0, 99))
    def loaded(self, number):
        load = self.loads.pop(sorted(self.loads)[number % len(self.loads)])
        self.held[load.rank_id][load.key] = 1
        self.send(ExpertAnnounced(load.load_id))

    @precondition(lambda self: bool(self.loads))
    @rule(number=st.integers(0, 99))
    def fails(self, number):
        load = self.loads.pop(sorted(self.loads)[number % len(self.loads)])
        self.send(ExpertNotLoaded(load.load_id, "reset"))

    @precondition(lambda self: len(self.maps) > 1)
    @rule(number=st.integers(0, 9))
    def unused(self, number):
        old = sorted(set(self.maps) - {self.latest})
        epoch = old[number % len(old)]
        self.maps = {one: found for one, found in self.maps.items() if one > epoch}
        self.send(EpochUnused(epoch))

    @rule(after_s=st.sampled_from([0.0, 0.3, 1.0, 31.0]))
    def tick(self, after_s):
        self.now_s += after_s
        self.send(RolloutTick())

    @invariant()
    def bytes_are_bounded(self):
        for end in ("rank_id", "source"):
            last = {}
            for at_s, load in self.sent:
                name = getattr(load, end)
                if name is not None:
                    assert at_s - last.get(name, -9.0) >= ONE_EXPERT_S - 1e-9
                    last[name] = at_s

    @invariant()
    def old_maps_are_few(self):
        assert len(self.rollout.old_epochs) <= 2

    @invariant()
    def every_expert_that_is_held_is_named(self):
        held = {key for of_rank in self.held.values() for key, count in of_rank.items() if count}
        assert set(self.rollout.map.replicas()) <= held

    def teardown(self):
        """Whatever happened, a cluster that fails no more reaches the next target."""
        ranks = list(self.ranks.values())
        loads = np.ones((self.LAYERS, self.EXPERTS))
        try:
            found = place(loads, ranks, current=self.rollout.map)
        except ExpertsDoNotFit:
            return
        self.send(TargetSet(found.map, tuple(ranks), loads))
        for _ in range(400):
            if self.rollout.is_done:
                break
            for epoch in sorted(set(self.maps) - {self.latest}):
                del self.maps[epoch]
                self.send(EpochUnused(epoch))
            for number in sorted(self.loads):
                load = self.loads.pop(number)
                self.held[load.rank_id][load.key] = 1
                self.send(ExpertAnnounced(number))
            self.now_s = max(self.now_s, self.rollout.next_tick_s or self.now_s)
            self.send(RolloutTick())
        assert self.rollout.is_done
        assert self.rollout.map.replicas() == {
            key: tuple(n for n in self.rollout.map.ranks if n in names)
            for key, names in found.map.replicas().items()
        }


TestAnyRollout = AnyRollout.TestCase
TestAnyRollout.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
