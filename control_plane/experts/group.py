"""One group of expert ranks: which processes there are, what they hold, and which map callers use. Pure:
events and the time go in, actions come out.

It joins four parts: the processes (`group_ranks`), the callers and the epochs that they use
(`group_callers`), the placement (`group_placement`), and its rollout (`rollout`).

What always holds: the map names only experts that live ranks have announced; a rank is told to drop an expert
only when no epoch in use names it there; every wait has a deadline. When faults stop, every expert gets a
replica again and there are as many ranks as are wanted.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import assert_never

import numpy as np

from baton.core.experts import (
    ExpertCallerHello,
    ExpertCountsReport,
    ExpertDropOrder,
    ExpertEpochUsed,
    ExpertLoaded,
    ExpertLoadFailed,
    ExpertLoadOrder,
    ExpertMapRank,
    ExpertMapUpdate,
    ExpertRankBeat,
    ExpertRankHello,
    ExpertRankRetired,
    ExpertRankSuspected,
)
from baton.core.ids import NodeId, WorkerId, replica_name
from control_plane.experts import group_values as v
from control_plane.experts.group_callers import ExpertCallerBook
from control_plane.experts.group_placement import ExpertPlacer
from control_plane.experts.group_ranks import ExpertRankBook, ExpertRankEntry, ExpertRankLife
from control_plane.experts.loads import DecayedCounts
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
    LoadId,
    RolloutEvent,
    RolloutLimits,
    RolloutTick,
)
from control_plane.experts.values import ExpertKey, ExpertMap, ExpertRank, RankId

Actions = Iterator[v.ExpertGroupAction]

ANNOUNCE_S, ANNOUNCE_EXPERT_S = 0.02, 20e-6
"""The shortest time between two maps, and what it is longer by for each expert: maps of many experts take a
while to make and to read."""


EXPERTS_MAX = 1_000_000
"""Experts of all layers of one model."""


class ExpertRankGroup:
    """The one who calls it has the clock and does the actions, in order."""

    def __init__(self, group: str, prefix: str, policy: v.ExpertGroupPolicy, *, life: str) -> None:
        """`prefix` is the beginning of the ranks' names. `life` is unique per control plane process."""
        self.name, self.policy = group, policy
        self.ranks = ExpertRankBook(prefix, policy, life=life)
        self.callers = ExpertCallerBook(policy)
        self.placer: ExpertPlacer | None = None
        """None until a rank has said how many experts there are."""
        self.rollout: ExpertRollout | None = None
        """None until the first placement can be made."""
        self.counts: DecayedCounts | None = None
        self.losses = self.migrations = self.copied = 0
        self.is_placed = False
        """Every expert had a replica once. What is loaded from then on counts as a migration."""
        self._adopted: set[str] = set()
        """Names of adopted ranks that have not said hello yet."""
        self._rebuild_until_s: float | None = None
        self._first_due_s: float | None = None
        """When a first placement waits no longer for ranks that have not said hello."""
        self._is_first_late = False
        self._ranks_seen: object = None
        """What the last placement was made for, apart from loads."""

    # --- what others see -----------------------------------------------------------------------------

    @property
    def next_tick_s(self) -> float | None:
        dues = [self.ranks.next_tick_s, self.callers.next_tick_s, *self._silence_dues()]
        if self.rollout is not None and self.placer is not None:
            dues += [self.rollout.next_tick_s, self.placer.next_tick_s]
        else:
            dues.append(self._first_due_s if not self._is_first_late else None)
        if self._rebuild_until_s is not None:
            dues.append(self._rebuild_until_s)
        return min((due for due in dues if due is not None), default=None)

    @property
    def expert_bytes(self) -> int:
        return max((e.hello.expert_bytes for e in self.ranks.entries.values() if e.hello), default=0)

    # --- events --------------------------------------------------------------------------------------

    def handle(self, event: v.ExpertGroupEvent, *, now_s: float) -> list[v.ExpertGroupAction]:
        if isinstance(event, v.ExpertRankSaid) and isinstance(event.report, ExpertRankBeat):
            self._on_beat(event, event.report, now_s)
            return []
        return [*self._handle(event, now_s), *self._settle(now_s)]

    def _handle(self, event: v.ExpertGroupEvent, now_s: float) -> Actions:
        match event:
            case v.ExpertRanksWanted(count):
                self.ranks.wanted, self.ranks.is_known = count, True
            case v.ExpertNodesAvoided(nodes):
                self.ranks.avoided = nodes
            case v.ExpertRankAdopted(rank_id):
                self._adopted.add(replica_name(WorkerId(rank_id)))
                self._rebuild_until_s = self._first_due_s = now_s + self.policy.rebuild_s
                yield from self.ranks.adopt(rank_id, replica_name(WorkerId(rank_id)), now_s=now_s)
            case v.ExpertRankSaid():
                yield from self._on_rank(event, now_s)
            case v.ExpertRankHungUp(rank_id, stream):
                entry = self.ranks.of(rank_id)
                if entry is not None and entry.stream == stream and entry.state is not ExpertRankLife.ENDING:
                    yield from self._lose(entry, "its stream to the control plane ended", now_s)
            case v.ExpertRankExited(rank_id, reason):
                if (entry := self.ranks.of(rank_id)) is not None:
                    yield from self._forget(entry, now_s)
                    self._adopted.discard(entry.name)
                    self.ranks.exited(entry, reason, now_s=now_s)
            case v.ExpertCallerSaid():
                yield from self._on_caller(event, now_s)
            case v.ExpertCallerHungUp(caller, stream):
                self.callers.hung_up(caller, stream, now_s=now_s)
            case v.ExpertsRebalanced():
                if self.placer is not None:
                    self.placer.want()
            case v.ExpertRankDrained(name, wanted):
                self.ranks.wanted = self.ranks.wanted if wanted is None else wanted
                entry = self.ranks.entries.get(name)
                if entry is not None and entry.state is ExpertRankLife.READY:
                    self.ranks.drain(entry, now_s=now_s)
            case v.ExpertGroupPaused(for_s):
                for entry in self.ranks.entries.values():
                    entry.beat_s = min(now_s, entry.beat_s + for_s)
            case v.ExpertGroupTick():
                yield from self._tick(now_s)
            case _:
                assert_never(event)

    def _settle(self, now_s: float) -> Actions:
        """Do what follows from any event: start and stop ranks, place experts, end old epochs."""
        yield from self.ranks.converge(now_s=now_s)
        serving = tuple((entry.rank_id, entry.state) for entry in self.ranks.serving)
        ranks = serving, self.ranks.wanted, self.ranks.coming > 0
        if ranks != self._ranks_seen and self.placer is not None:
            self._ranks_seen = ranks
            self.placer.want()
        yield from self._place(now_s)
        yield from self._end_old_epochs(now_s)
        yield from self._retire_drained(now_s)

    # --- events of ranks -----------------------------------------------------------------------------

    def _on_beat(self, event: v.ExpertRankSaid, beat: ExpertRankBeat, now_s: float) -> None:
        entry = self.ranks.of(event.rank_id)
        if entry is None or entry.stream != event.stream:
            return
        entry.beat_s = now_s
        if isfinite(beat.busy_s):
            entry.rows, entry.busy_s = beat.rows, beat.busy_s

    def _on_rank(self, event: v.ExpertRankSaid, now_s: float) -> Actions:
        entry = self.ranks.of(event.rank_id)
        if isinstance(event.report, ExpertRankHello):
            yield from self._on_hello(event, event.report, now_s)
            return
        if entry is None or entry.stream != event.stream or not entry.is_serving:
            return
        entry.beat_s = now_s
        match event.report:
            case ExpertLoaded(load_id, _, is_copied):
                entry.load_failures = 0
                self.copied += is_copied
                if self.rollout is not None and self.rollout.is_loading(LoadId(load_id)):
                    self.migrations += self.is_placed
                yield from self._roll(ExpertAnnounced(LoadId(load_id)), now_s)
            case ExpertLoadFailed(load_id, expert, reason, is_full):
                is_ours = self.rollout is not None and self.rollout.is_loading(LoadId(load_id))
                if self.rollout is not None and is_ours and not is_full:
                    entry.load_failures += not self.rollout.is_held(self._keys([expert]))
                yield from self._roll(ExpertNotLoaded(LoadId(load_id), reason, is_full), now_s)
                if entry.load_failures >= self.policy.load_failures_max:
                    yield from self._lose(entry, f"it cannot load experts: {reason}", now_s)
            case ExpertRankBeat():
                pass

    def _on_hello(self, event: v.ExpertRankSaid, hello: ExpertRankHello, now_s: float) -> Actions:
        entry = self.ranks.of(event.rank_id)
        sizes = (hello.layer_count, hello.expert_count)
        if entry is None or entry.state not in (ExpertRankLife.STARTING, ExpertRankLife.READY):
            stray = ExpertRankRetired("the control plane does not know this rank")
            yield v.TellExpertRank(event.rank_id, stray)
            return
        if entry.state is ExpertRankLife.READY:
            yield from self._lose(entry, "its stream to the control plane broke", now_s)
            return
        if min(*sizes, hello.slots, hello.expert_bytes) < 1 or sizes[0] * sizes[1] > EXPERTS_MAX:
            yield self.ranks.kill(entry, f"it says that it has {sizes} experts, which cannot be", now_s=now_s)
            return
        if self.placer is not None and self.placer.sizes != sizes:
            yield self.ranks.kill(entry, "its model has other experts than the group's", now_s=now_s)
            return
        if self.placer is None:
            self.placer = ExpertPlacer(*sizes, group_count=max(1, hello.group_count), policy=self.policy)
            self.counts = DecayedCounts(*sizes, half_life_s=self.policy.half_life_s)
        self._adopted.discard(entry.name)
        if self._first_due_s is None:
            self._first_due_s = now_s + self.policy.first_wait_s
        self.ranks.ready(entry, hello, event.stream, now_s=now_s)
        if self.rollout is not None and hello.held:
            rank = self._rank_of(entry)
            yield from self._roll(ExpertRankJoined(rank, self._keys(hello.held)), now_s)

    def _keys(self, experts: Iterable[int]) -> tuple[ExpertKey, ...]:
        assert self.placer is not None
        layers, count = self.placer.sizes
        return tuple(ExpertKey(*divmod(n, count)) for n in sorted(set(experts)) if 0 <= n < layers * count)

    def _rank_of(self, entry: ExpertRankEntry) -> ExpertRank:
        """The rank with memory for all that it holds already."""
        assert entry.hello is not None
        assert entry.rank_id is not None
        held = -(-len(entry.hello.held) // max(1, entry.hello.layer_count))
        return ExpertRank(RankId(entry.rank_id), NodeId(entry.hello.node), max(entry.hello.slots, held))

    def _lose(self, entry: ExpertRankEntry, reason: str, now_s: float) -> Actions:
        """Take a rank out of the map and kill its process."""
        yield from self._forget(entry, now_s)
        if entry.state not in (ExpertRankLife.WAITING, ExpertRankLife.KILLING):
            yield self.ranks.kill(entry, reason, now_s=now_s)

    def _forget(self, entry: ExpertRankEntry, now_s: float) -> Actions:
        """Take a rank out of the map at once, if it may be in it."""
        if not entry.is_serving or entry.rank_id is None:
            return
        self.losses += 1
        if self.placer is not None:
            self.placer.speeds.forget(entry.rank_id)
        yield from self._roll(ExpertRankLost(RankId(entry.rank_id)), now_s)

    # --- events of callers ---------------------------------------------------------------------------

    def _on_caller(self, event: v.ExpertCallerSaid, now_s: float) -> Actions:
        caller, report = event.caller, event.report
        if isinstance(report, ExpertCallerHello):
            is_known = self.callers.hello(caller, event.stream, report.epoch)
            if self.rollout is None:
                return
            if not is_known and report.epoch >= self.rollout.map.epoch:
                yield from self._roll(EpochRaised(report.epoch), now_s)
            else:
                epoch = self.rollout.map.epoch
                self.callers.sent(epoch, now_s=now_s, caller=caller)
                yield v.TellExpertCallers(self._update(self.rollout.map), caller)
            return
        if not self.callers.is_open(caller, event.stream):
            return
        match report:
            case ExpertEpochUsed(epoch):
                self.callers.used(caller, epoch)
            case ExpertCountsReport():
                self._count(report, now_s)
            case ExpertRankSuspected():
                yield from self._on_suspected(caller, report, now_s)

    def _count(self, report: ExpertCountsReport, now_s: float) -> None:
        sizes = (report.layer_count, report.expert_count)
        is_ours = self.placer is not None and self.placer.sizes == sizes
        if self.counts is not None and is_ours and len(report.counts) == sizes[0] * sizes[1]:
            self.counts.add(np.array(report.counts, dtype=np.int64).reshape(sizes), now_s=now_s)

    def _on_suspected(self, caller: str, said: ExpertRankSuspected, now_s: float) -> Actions:
        entry = self.ranks.of(said.rank_id)
        if entry is None or not entry.is_serving:
            return
        policy = self.policy
        suspects = entry.suspects = {
            name: at_s for name, at_s in entry.suspects.items() if now_s - at_s < policy.suspect_forget_s
        }
        first_s = suspects.setdefault(caller, now_s)
        is_silent = now_s - entry.beat_s > policy.suspect_silence_s
        is_repeated = now_s - first_s >= policy.suspect_again_s
        if said.is_gone or is_silent or is_repeated or len(suspects) > 1:
            yield from self._lose(entry, f"{caller} got no answer: {said.reason}", now_s)

    # --- time ----------------------------------------------------------------------------------------

    def _silence_dues(self) -> Iterator[float]:
        for entry in self.ranks.entries.values():
            if entry.is_serving:
                yield entry.beat_s + self._silence_s(entry)

    def _silence_s(self, entry: ExpertRankEntry) -> float:
        """How long a rank may be silent. One that is suspected may be so for a shorter time."""
        since_s = max(entry.suspects.values(), default=None)
        is_suspected = since_s is not None and since_s + self.policy.suspect_forget_s > entry.beat_s
        return self.policy.suspect_silence_s if is_suspected else self.policy.silence_s

    def _tick(self, now_s: float) -> Actions:
        for entry in list(self.ranks.entries.values()):
            if entry.is_serving and now_s >= entry.beat_s + self._silence_s(entry):
                yield from self._lose(entry, f"no sign of life for {now_s - entry.beat_s:.1f} s", now_s)
        self.callers.forget(now_s=now_s)
        if self._rebuild_until_s is not None and now_s >= self._rebuild_until_s:
            self._rebuild_until_s = None
        self._is_first_late |= self._first_due_s is not None and now_s >= self._first_due_s
        yield from self._roll(RolloutTick(), now_s)

    # --- placement -----------------------------------------------------------------------------------

    def _place(self, now_s: float) -> Actions:
        if self.placer is None or self.counts is None:
            return
        if self.rollout is None and not self._can_begin():
            return
        if self.rollout is None:
            yield from self._begin(now_s)
        assert self.rollout is not None
        target = self.placer.look(
            self.ranks, self.counts.loads(now_s=now_s), self.rollout, is_first=not self.is_placed, now_s=now_s
        )
        if target is not None:
            yield from self._roll(target, now_s)

    def _can_begin(self) -> bool:
        """Whether a first placement can be made: of all ranks, or after a while of those that are there."""
        serving = self.ranks.serving
        if not serving:
            return False
        if self._rebuild_until_s is not None:
            return not self._adopted
        if len(serving) >= self.ranks.wanted:
            return True
        assert self.placer is not None
        return self._is_first_late and self.placer.fits(serving)

    def _begin(self, now_s: float) -> Actions:
        """Start with a map of what ranks hold, which is nothing if they are new."""
        assert self.placer is not None
        layers, count = self.placer.sizes
        serving = self.ranks.serving
        held: dict[ExpertKey, list[RankId]] = {}
        for entry in serving:
            assert entry.hello is not None
            for key in self._keys(entry.hello.held):
                held.setdefault(key, []).append(RankId(entry.hello.ref.rank_id))
        ranks = tuple(self._rank_of(entry) for entry in serving)
        ids = tuple(rank.rank_id for rank in ranks)
        epoch = self.callers.highest + 1
        found = ExpertMap.of(held, epoch=epoch, layer_count=layers, expert_count=count, ranks=ids)
        limits = RolloutLimits(
            bytes_per_s=self.policy.bytes_per_s, announce_s=ANNOUNCE_S + layers * count * ANNOUNCE_EXPERT_S
        )
        expert_bytes = max(1, self.expert_bytes)
        self.rollout = ExpertRollout(found, ranks, expert_bytes=expert_bytes, limits=limits)
        self.placer.want()
        yield from self._announce(found, now_s)

    def _retire_drained(self, now_s: float) -> Actions:
        for entry in list(self.ranks.entries.values()):
            if entry.state is not ExpertRankLife.DRAINING or entry.rank_id is None:
                continue
            rank_id = RankId(entry.rank_id)
            is_unused = not (self.ranks.wanted or len(self.callers))
            if self.rollout is not None and self.rollout.needs(rank_id) and not is_unused:
                continue
            yield from self._roll(ExpertRankLost(rank_id), now_s)
            yield self.ranks.retire(entry, now_s=now_s)

    # --- the rollout ---------------------------------------------------------------------------------

    def _roll(self, event: RolloutEvent, now_s: float) -> Actions:
        if self.rollout is None:
            return
        for action in self.rollout.handle(event, now_s=now_s):
            match action:
                case AnnounceMap(found):
                    yield from self._announce(found, now_s)
                case LoadExpert():
                    yield from self._load(action)
                case DropExpert(rank_id, key):
                    yield v.TellExpertRank(rank_id, ExpertDropOrder(self._number(key)))

    def _load(self, action: LoadExpert) -> Actions:
        source = self.ranks.of(action.source) if action.source is not None else None
        ref = source.hello.ref if source is not None and source.hello is not None else None
        order = ExpertLoadOrder(action.load_id, self._number(action.key), ref)
        yield v.TellExpertRank(action.rank_id, order)

    def _number(self, key: ExpertKey) -> int:
        assert self.placer is not None
        return key.layer * self.placer.sizes[1] + key.expert

    def _announce(self, found: ExpertMap, now_s: float) -> Actions:
        self.is_placed |= len(found.replicas()) == found.layer_count * found.expert_count
        self.callers.sent(found.epoch, now_s=now_s)
        yield v.TellExpertCallers(self._update(found))

    def _update(self, found: ExpertMap) -> ExpertMapUpdate:
        held: dict[RankId, list[int]] = {}
        for key, names in sorted(found.replicas().items()):
            for name in names:
                held.setdefault(name, []).append(self._number(key))
        ranks: list[ExpertMapRank] = []
        for name, experts in sorted(held.items()):
            entry = self.ranks.of(name)
            assert entry is not None, name
            assert entry.hello is not None, name
            ranks.append(ExpertMapRank(entry.hello.ref, tuple(experts)))
        return ExpertMapUpdate(found.epoch, found.layer_count, found.expert_count, tuple(ranks))

    def _end_old_epochs(self, now_s: float) -> Actions:
        """Callers of an earlier control plane may be on their way while ranks are adopted."""
        if self.rollout is None or not (old := self.rollout.old_epochs) or self._rebuild_until_s is not None:
            return
        lowest = self.callers.lowest
        unused = [epoch for epoch in old if lowest is None or epoch < lowest]
        if unused:
            yield from self._roll(EpochUnused(max(unused)), now_s)
