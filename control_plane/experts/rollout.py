"""Brings ranks from the map there is to another. Events and the time go in, actions come out.

A rank loads an expert beside its work and announces it; then a new epoch of the map names it. What a map
names no longer is dropped when the epochs that named it are unused. At most one old epoch is in use at a
time, except when ranks are lost: a map without them is announced at once.

What always holds: a map names only replicas that have been announced and are not lost; a replica is dropped
only if no map in use names it and another rank holds the expert; no rank holds and loads more experts than it
has memory for; no rank sends or receives more bytes per second than the limit, except for experts that no
rank holds: these are loaded first, and at once.

Memory: a rank loads into a free slot and keeps one free. If all ranks that have something to load wait for
others to load first, one of them uses its last slot for an expert that only another rank has, which can then
be dropped there. So at most one rank has no free slot, and the rollout cannot come to a stop.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import assert_never

from control_plane.experts.load_times import LoadTimes
from control_plane.experts.migrations import migrations
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
    RolloutAction,
    RolloutEvent,
    RolloutLimits,
    RolloutTick,
    TargetSet,
)
from control_plane.experts.values import ExpertKey, ExpertMap, ExpertRank, ExpertRankState, RankId

FAILURES_COUNTED = 32

Replicas = dict[ExpertKey, tuple[RankId, ...]]


@dataclass(slots=True)
class _Wanted:
    """An expert that a rank shall load."""

    key: ExpertKey
    rank: RankId
    failed_s: float = 0.0
    failures: int = 0
    least_s: float = 0.0
    """The shortest time from the last failure to the next attempt."""
    is_spare: bool = False
    """The rank is none of the target's: it loads what another one could not, as long as nobody has it."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way."""

    wanted: _Wanted
    begun_s: float
    deadline_s: float


class ExpertRollout:
    """The rollout of one pool's maps. The caller has the clock and does the actions."""

    def __init__(
        self,
        current: ExpertMap,
        ranks: tuple[ExpertRank, ...],
        *,
        expert_bytes: int,
        limits: RolloutLimits,
    ) -> None:
        """`current` is in use: its ranks hold what it names."""
        self._layers, self._experts = current.layer_count, current.expert_count
        self._expert_bytes, self._limits = expert_bytes, limits
        self.map = current
        self._named: Replicas = {key: tuple(sorted(names)) for key, names in current.replicas().items()}
        self._old: dict[int, Replicas] = {}
        """Maps of earlier epochs that are in use."""
        self._ranks: dict[RankId, ExpertRank] = {}
        self._held: dict[RankId, set[ExpertKey]] = {}
        """What each rank has announced and not been told to drop."""
        self._holders: dict[ExpertKey, set[RankId]] = {}
        """The same, by expert."""
        self._target: Replicas = self._named
        self._wanted: list[_Wanted] = []
        """What is not being loaded yet, in order."""
        self._loads: dict[LoadId, _Load] = {}
        self._loading: Counter[RankId] = Counter()
        """Loads under way by rank."""
        self._loading_keys: Counter[ExpertKey] = Counter()
        self._load_count = 0
        self._times = LoadTimes(limits)
        self._is_first = False
        """Nobody is served before the target is reached, so that nothing is limited."""
        self._is_dirty = False
        """Something happened that another map or a drop may follow from."""
        self._announced_s = -inf
        self._free: dict[RankId, int] = {}
        """Experts that each rank has memory for besides those that it holds and loads."""
        self._sends_from_s: dict[RankId, float] = {}
        self._receives_from_s: dict[RankId, float] = {}
        self._next_tick_s: float | None = None
        self._join(ranks)
        for key, names in self._named.items():
            for name in names:
                self._free[name] -= 1
                self._hold(name, key)

    @property
    def next_tick_s(self) -> float | None:
        """When to call with a tick at the latest; None if only events can change anything."""
        return self._next_tick_s

    @property
    def old_epochs(self) -> tuple[int, ...]:
        """Earlier epochs that are in use, as far as is known here."""
        return tuple(self._old)

    @property
    def loading(self) -> Mapping[RankId, int]:
        """Loads under way by rank."""
        return self._loading

    def held_by(self, rank: RankId) -> Collection[ExpertKey]:
        """What a rank has announced and not been told to drop."""
        return self._held.get(rank, ())

    def is_held(self, keys: Iterable[ExpertKey]) -> bool:
        """Whether some rank has announced each of them."""
        return all(key in self._holders for key in keys)

    def is_loading(self, load_id: LoadId) -> bool:
        return load_id in self._loads

    def needs(self, rank: RankId) -> bool:
        """Whether a map in use names the rank, or it holds or loads an expert that no other rank holds."""
        maps = (self._named, *self._old.values())
        is_named = any(rank in names for named in maps for names in named.values())
        is_sole_holder = any(self._holders[key] == {rank} for key in self._held.get(rank, ()))
        loads = (load.wanted for load in self._loads.values() if load.wanted.rank == rank)
        return is_named or is_sole_holder or any(one.key not in self._holders for one in loads)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or waits."""
        return not (self._wanted or self._loads or self._old or self._is_dirty)

    @property
    def is_done(self) -> bool:
        """Whether the target is reached, and nothing is left to drop."""
        return self.is_idle and self._named == self._next_map()

    def handle(self, event: RolloutEvent, *, now_s: float) -> list[RolloutAction]:
        actions: list[RolloutAction] = []
        self._is_dirty |= not isinstance(event, RolloutTick)
        match event:
            case TargetSet():
                self._set_target(event)
            case ExpertAnnounced(load_id):
                if (load := self._ended(load_id)) is not None:
                    self._times.took(now_s - load.begun_s)
                    self._hold(load.wanted.rank, load.wanted.key)
            case ExpertNotLoaded(load_id, _, is_full):
                self._fail(load_id, now_s, least_s=self._limits.full_retry_s if is_full else 0.0)
            case ExpertRankJoined(rank, held):
                if self._join_with(rank, held):
                    actions += self._announce(now_s)
            case ExpertRankLost(rank_id):
                if self._lose(rank_id):
                    actions += self._announce(now_s)
            case EpochRaised(above):
                self._keep_for(above)
                actions += self._announce(now_s, above=above, is_forced=True)
            case EpochUnused(epoch):
                self._old = {old: named for old, named in self._old.items() if old > epoch}
            case RolloutTick():
                actions += self._give_up_late_loads(now_s)
            case _:
                assert_never(event)
        if self._is_dirty and now_s >= self._announced_s + self._limits.announce_s:
            self._is_dirty = False
            has_more = len(self._holders) > len(self._named)
            if not self._old or has_more:
                actions += self._announce(now_s)
            actions += self._drop()
        actions += self._start_loads(now_s)
        return actions

    # --- events ------------------------------------------------------------------------------------------

    def _join(self, ranks: tuple[ExpertRank, ...]) -> None:
        for rank in ranks:
            before = self._ranks.get(rank.rank_id)
            slots = rank.slots * self._layers
            if before is None:
                self._held[rank.rank_id] = set()
                self._free[rank.rank_id] = slots + self._limits.spare_slots
            else:
                # Memory that a rank has used once is not demanded back: it might be in use.
                self._free[rank.rank_id] += max(0, slots - before.slots * self._layers)
                rank = replace(rank, slots=max(rank.slots, before.slots))
            self._ranks[rank.rank_id] = rank

    def _join_with(self, rank: ExpertRank, held: Iterable[ExpertKey]) -> bool:
        """Add a rank and what it holds. Return whether the map changes."""
        if rank.rank_id in self._ranks:
            return False
        self._join((rank,))
        named = dict(self._named)
        for key in held:
            self._free[rank.rank_id] -= 1
            self._hold(rank.rank_id, key)
            # An earlier epoch in use, which nobody here knows, may name it.
            named[key] = tuple(sorted((*named.get(key, ()), rank.rank_id)))
        self._named = named
        return True

    def _hold(self, rank: RankId, key: ExpertKey) -> None:
        self._held[rank].add(key)
        self._holders.setdefault(key, set()).add(rank)

    def _set_target(self, event: TargetSet) -> None:
        """Ranks that are lost or unknown are no part of it."""
        self._join(tuple(rank for rank in event.ranks if rank.state is not ExpertRankState.LOST))
        self._is_first = event.is_first
        self._target = {
            key: tuple(name for name in names if name in self._held)
            for key, names in event.target.replicas().items()
        }
        failed = {(one.key, one.rank): one for one in self._wanted}
        under_way = {(load.wanted.key, load.wanted.rank) for load in self._loads.values()}
        holders = {key: tuple(sorted(names)) for key, names in self._holders.items()}
        nodes = {rank.rank_id: rank.node_id for rank in self._ranks.values()}
        self._wanted = [
            failed.get((one.key, one.target), _Wanted(one.key, one.target))
            for one in migrations(
                event.target, holders, event.loads, nodes=nodes, size_bytes=self._expert_bytes
            )
            if one.target in self._held and (one.key, one.target) not in under_way
        ]
        for one in (*self._wanted, *(load.wanted for load in self._loads.values())):
            one.is_spare &= one.rank not in self._target.get(one.key, ())

    def _ended(self, load_id: LoadId) -> _Load | None:
        load = self._loads.pop(load_id, None)
        if load is not None:
            self._loading[load.wanted.rank] -= 1
            self._loading_keys[load.wanted.key] -= 1
            if not self._loading_keys[load.wanted.key]:
                del self._loading_keys[load.wanted.key]
        return load

    def _fail(self, load_id: LoadId, now_s: float, *, least_s: float = 0.0) -> None:
        """Want it again after a while, `least_s` at least, and of another rank meanwhile if nobody has it."""
        load = self._ended(load_id)
        if load is None:
            return
        wanted = load.wanted
        self._free[wanted.rank] += 1
        if not wanted.is_spare and self._is_missing(wanted.key):
            self._ask_another(wanted)
        if wanted.is_spare or wanted.rank not in self._target.get(wanted.key, ()):
            return
        wanted.failures, wanted.least_s = min(wanted.failures + 1, FAILURES_COUNTED), least_s
        wanted.failed_s = now_s
        self._wanted.append(wanted)

    def _ask_another(self, wanted: _Wanted) -> None:
        """Have the rank with most memory load an expert in place of the one that could not."""
        if any(one.is_spare and one.key == wanted.key for one in self._wanted):
            return
        # A rank that wants it for the target loads it once, or its memory would be counted twice.
        asked = {one.rank for one in self._wanted if one.key == wanted.key} | {wanted.rank}
        able = [
            one.rank_id
            for one in self._ranks.values()
            if one.rank_id not in asked and one.state is ExpertRankState.READY and self._free[one.rank_id] > 0
        ]
        if able:
            other = max(able, key=lambda one: (self._free[one] - self._loading[one], one))
            self._wanted.insert(0, _Wanted(wanted.key, other, is_spare=True))

    def _give_up_late_loads(self, now_s: float) -> Iterator[RolloutAction]:
        for load_id, load in list(self._loads.items()):
            if now_s >= load.deadline_s:
                self._fail(load_id, now_s)
                yield DropExpert(load.wanted.rank, load.wanted.key)

    def _lose(self, rank_id: RankId) -> bool:
        """Forget a rank. Return whether it was known."""
        if self._ranks.pop(rank_id, None) is None:
            return False
        for key in self._held.pop(rank_id):
            self._forget(rank_id, key)
        del self._free[rank_id]
        self._sends_from_s.pop(rank_id, None)
        self._receives_from_s.pop(rank_id, None)
        self._wanted = [one for one in self._wanted if one.rank != rank_id]
        for load_id in [n for n, load in self._loads.items() if load.wanted.rank == rank_id]:
            self._ended(load_id)
        del self._loading[rank_id]
        self._target = {k: tuple(r for r in names if r != rank_id) for k, names in self._target.items()}
        return True

    def _forget(self, rank: RankId, key: ExpertKey) -> None:
        self._holders[key].remove(rank)
        if not self._holders[key]:
            del self._holders[key]

    # --- maps --------------------------------------------------------------------------------------------

    def _next_map(self) -> Replicas:
        """Replicas of the target that are there, and others in place of those that are not. Replicas that are
        not of the target go first from ranks that need the memory."""
        needs_memory = self._ranks_without_memory()
        found: Replicas = {}
        for key, holders in sorted(self._holders.items()):
            target = self._target.get(key, ())
            kept = [name for name in target if name in holders]
            if len(kept) < max(1, len(target)):
                others = sorted(holders.difference(target), key=lambda name: (name in needs_memory, name))
                for name in others[: max(1, len(target)) - len(kept)]:
                    if not kept or name not in needs_memory:
                        kept.append(name)
            found[key] = tuple(sorted(kept))
        return found

    def _ranks_without_memory(self) -> set[RankId]:
        """Ranks that have something to load, and nowhere to load it."""
        return {one.rank for one in self._wanted if self._free[one.rank] < 2}

    def _announce(self, now_s: float, *, above: int = 0, is_forced: bool = False) -> Iterator[RolloutAction]:
        named = self._next_map()
        if named == self._named and not is_forced:
            return
        self._old[self.map.epoch] = self._named
        self._merge_old_maps()
        if named != self._named:
            self._named = named
        self._announced_s = now_s
        self.map = ExpertMap.of(
            named,
            epoch=max(self.map.epoch, above) + 1,
            layer_count=self._layers,
            expert_count=self._experts,
            ranks=tuple(self._held),
        )
        yield AnnounceMap(self.map)

    def _keep_for(self, epoch: int) -> None:
        """A map of an earlier life is in use, which named nothing but what ranks held when this life began.
        Keep what the maps since then name for as long as it is used."""
        kept: dict[ExpertKey, tuple[RankId, ...]] = {}
        for named in (*self._old.values(), self._named):
            for key, names in named.items():
                kept[key] = tuple({*kept.get(key, ()), *names})
        self._old[epoch] = kept

    def _merge_old_maps(self) -> None:
        """Keep few maps: the two oldest become one that names what either did, and is in use as long as the
        later one."""
        while len(self._old) > self._limits.old_maps_max:
            first, second = sorted(self._old)[:2]
            merged = dict(self._old.pop(first))
            for key, names in self._old[second].items():
                merged[key] = tuple({*merged.get(key, ()), *names})
            self._old[second] = merged

    def _drop(self) -> Iterator[RolloutAction]:
        for key, holders in list(self._holders.items()):
            named = self._named.get(key, ())
            if not named or len(holders) == len(named):
                continue
            in_use = {name for old in self._old.values() for name in old.get(key, ())}
            for rank in sorted(holders - in_use - {*named, *self._target.get(key, ())}):
                self._held[rank].remove(key)
                self._forget(rank, key)
                self._free[rank] += 1
                yield DropExpert(rank, key)

    # --- loads -------------------------------------------------------------------------------------------

    def _start_loads(self, now_s: float) -> Iterator[RolloutAction]:
        waits_s: list[float] = []
        waiting: list[_Wanted] = []
        has_room = False
        for wanted in self._wanted:
            if wanted.is_spare and not self._is_missing(wanted.key):
                continue
            # The last memory of a rank is for experts that no rank holds, and for exchanges. A rank that has
            # something to load and no memory has more to give up than to load, so that not all have none.
            if self._free[wanted.rank] < (1 if self._is_missing(wanted.key) else 2):
                waiting.append(wanted)
                continue
            has_room = True
            if self._loading[wanted.rank] >= self._limits.loads_max:
                waiting.append(wanted)
                continue
            source = self._source(wanted)
            start_s = self._start_s(wanted, source)
            if start_s > now_s:
                waits_s.append(start_s)
                waiting.append(wanted)
            else:
                yield self._start(wanted, source, now_s)
        self._wanted = waiting
        if not (has_room or self._loads or self._old) and (stuck := self._first_of_a_circle()):
            source = self._source(stuck)
            start_s = self._start_s(stuck, source)
            waits_s.append(start_s)
            if start_s <= now_s:
                self._wanted.remove(stuck)
                yield self._start(stuck, source, now_s)
        waits_s += [load.deadline_s for load in self._loads.values()]
        if self._is_dirty:
            waits_s.append(self._announced_s + self._limits.announce_s)
        self._next_tick_s = min((at_s for at_s in waits_s if at_s > now_s), default=None)

    def _source(self, wanted: _Wanted) -> RankId | None:
        """A rank that holds the expert, on the same node if possible; the one that may send first."""

        def cost(rank: RankId) -> tuple[bool, float, RankId]:
            is_far = self._ranks[rank].node_id != self._ranks[wanted.rank].node_id
            return is_far, self._sends_from_s.get(rank, 0.0), rank

        return min(self._holders.get(wanted.key, ()), key=cost, default=None)

    def _start_s(self, wanted: _Wanted, source: RankId | None) -> float:
        limits = self._limits
        retry_s = 0.0
        if wanted.failures:
            retry_s = min(limits.retry_s * 2.0 ** (wanted.failures - 1), limits.retry_max_s)
            if self._is_missing(wanted.key):
                retry_s = min(retry_s, limits.missing_retry_s)
            retry_s = max(retry_s, wanted.least_s)
        if self._is_missing(wanted.key):
            return wanted.failed_s + retry_s
        not_before_s = wanted.failed_s + retry_s
        if self._is_first:
            return not_before_s
        sends_s = self._sends_from_s.get(source, 0.0) if source is not None else 0.0
        return max(not_before_s, sends_s, self._receives_from_s.get(wanted.rank, 0.0))

    def _is_missing(self, key: ExpertKey) -> bool:
        """Whether no rank holds the expert or is loading it."""
        return key not in self._holders and key not in self._loading_keys

    def _start(self, wanted: _Wanted, source: RankId | None, now_s: float) -> LoadExpert:
        until_s = now_s + self._expert_bytes / self._limits.bytes_per_s
        if not (self._is_first or self._is_missing(wanted.key)):
            self._receives_from_s[wanted.rank] = until_s
            if source is not None:
                self._sends_from_s[source] = until_s
        self._loading[wanted.rank] += 1
        self._loading_keys[wanted.key] += 1
        self._free[wanted.rank] -= 1
        self._load_count += 1
        load_id = LoadId(self._load_count)
        self._loads[load_id] = _Load(wanted, now_s, now_s + self._times.timeout_s(wanted.failures))
        return LoadExpert(load_id, wanted.rank, wanted.key, source, self._expert_bytes)

    def _first_of_a_circle(self) -> _Wanted | None:
        """A load whose end lets another rank drop the expert, best a rank that has no memory left at all, and
        otherwise one that waits for memory."""
        needs_memory = self._ranks_without_memory()

        def use(wanted: _Wanted) -> int:
            surplus = self._holders.get(wanted.key, set[RankId]()).difference(self._target[wanted.key])
            if any(self._free[rank] <= 0 for rank in surplus):
                return 0
            return 1 if surplus & needs_memory else 2

        able = [one for one in self._wanted if self._free[one.rank] > 0]
        return min(able, key=use, default=None)
