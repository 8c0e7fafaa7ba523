"""What must always hold of expert ranks, checked from outside: invariants 15 to 17 of docs/invariants.md."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from baton.core.experts import ExpertDropOrder, ExpertMapUpdate, ExpertRankOrder, ExpertRankRetired
from baton.core.ids import ExpertRankId
from control_plane.experts.group import ExpertRankGroup
from control_plane.experts.group_ranks import ExpertRankLife
from simulator.faults.experts.callers import ExpertDispatch, PieceOnLink, SimExpertCaller
from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.rows import RowPair, RowResults
from simulator.faults.experts.scenario import ExpertScenario
from simulator.faults.run_context import Violation

SLACK_S = 0.2
DISPATCH_S = 0.5
"""No dispatch takes so long where nothing is wrong."""
SERVED_S = 12.0
"""Rows wait no longer for a rank after the last fault, computing aside."""
OUT_FOR_ALL_S = 1.0
"""A rank that does not answer is in no map so long after somebody suspected it."""


class CheckedControl(Protocol):
    """The control plane as it is checked."""

    @property
    def group(self) -> ExpertRankGroup | None: ...
    @property
    def lives(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def since_s(self) -> float: ...


class CheckedWorld(Protocol):
    """The processes that are checked."""

    @property
    def now_s(self) -> float: ...
    @property
    def scenario(self) -> ExpertScenario: ...
    @property
    def counts(self) -> Counter[str]: ...
    @property
    def ranks(self) -> Mapping[ExpertRankId, SimExpertRank]: ...
    @property
    def callers(self) -> Mapping[str, SimExpertCaller]: ...
    @property
    def control(self) -> CheckedControl: ...

    def last_beat_s(self, caller: SimExpertCaller, rank: SimExpertRank) -> float: ...


class ExpertChecker:
    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._highest_epoch: dict[int, int] = {}
        """The last epoch of each life of the control plane."""
        self._suspected_s: dict[ExpertRankId, float] = {}
        self._needs_since_s: dict[str, tuple[bool, float]] = {}
        """Whether each caller waits for ranks, and since when that is so."""
        self._missing_since_s: float | None = None
        self._settled_from_s = 0.0
        """When something last happened that may make experts missing."""

    def something_happened(self) -> None:
        self._settled_from_s = self._world.now_s

    # --- rows -----------------------------------------------------------------------------------------

    def posted(
        self, caller: SimExpertCaller, rank: SimExpertRank, pairs: tuple[RowPair, ...], epoch: int
    ) -> None:
        named = caller.maps.get(epoch, {}).get(rank.rank_id, frozenset[int]())
        wrong = [pair.expert for pair in pairs if pair.expert not in named]
        if wrong:
            raise Violation(
                15,
                f"{caller.name} sends rows for {wrong} to {rank.rank_id}, which epoch {epoch} does not say",
            )

    def accepted(
        self, caller: SimExpertCaller, dispatch: ExpertDispatch, piece: PieceOnLink, results: RowResults
    ) -> None:
        if results.pairs != piece.pairs:
            raise Violation(15, f"{caller.name} takes results of {results.pairs} for {piece.pairs}")
        again = [pair for pair in results.pairs if pair in dispatch.results]
        if again:
            raise Violation(15, f"{caller.name} takes results of {again} a second time")
        self._world.counts["expert rows computed"] += len(results.pairs)

    def done(self, caller: SimExpertCaller, dispatch: ExpertDispatch) -> None:
        if dispatch.results.keys() != dispatch.pairs:
            raise Violation(15, f"{caller.name} ends a dispatch with results of other rows than it sent")
        if dispatch.unserved:
            raise Violation(15, f"{caller.name} ends a dispatch of which rows wait")

    # --- waiting --------------------------------------------------------------------------------------

    def look_at(self, caller: SimExpertCaller) -> None:
        """No row waits for a rank that shows no life, nor for longer than a rank may compute."""
        world, scenario = self._world, self._world.scenario
        for opened in caller.open.values():
            silent_s = world.now_s - world.last_beat_s(caller, opened.rank)
            if silent_s > scenario.answer_timeout_s + SLACK_S:
                raise Violation(
                    17, f"{caller.name} waits for {opened.rank.rank_id}, silent for {silent_s:.2f} s"
                )
        self._is_parked_rightly(caller)
        most_s = SERVED_S + 2 * scenario.compute_timeout_s
        for dispatch in caller.dispatches.values():
            age_s = world.now_s - max(dispatch.began_s, self._settled_from_s)
            if age_s > most_s:
                raise Violation(
                    17, f"a dispatch of {caller.name} is not done {age_s:.1f} s after the last fault"
                )
            stray = [pair for pair in dispatch.unserved if caller.routes.table.has(pair.expert)]
            if stray:
                raise Violation(16, f"{caller.name} keeps {stray} although ranks hold these experts")

    def _is_parked_rightly(self, caller: SimExpertCaller) -> None:
        """A caller that waits for ranks says so, and takes new sequences again when it does not."""
        world, limit_s = self._world, self._world.scenario.park_after_s + SLACK_S
        needs = caller.rows_wait or not len(caller.routes.table.links)
        since_s = self._needs_since_s.setdefault(caller.name, (needs, world.now_s))
        if since_s[0] != needs:
            since_s = self._needs_since_s[caller.name] = (needs, world.now_s)
        if caller.parking.is_parked != needs and world.now_s - since_s[1] > limit_s:
            state = "parked" if caller.parking.is_parked else "not parked"
            what = "waits for ranks" if needs else "has ranks for all its rows"
            raise Violation(16, f"{caller.name} is {state} and {what} for {world.now_s - since_s[1]:.2f} s")

    def suspected(self, rank_id: ExpertRankId, *, is_gone: bool) -> None:
        rank = self._world.ranks.get(rank_id)
        if is_gone and rank is not None and rank.is_alive:
            raise Violation(16, f"{rank_id} lives, and is said to be gone")
        self._suspected_s.setdefault(rank_id, self._world.now_s)

    # --- maps -----------------------------------------------------------------------------------------

    def announced(self, update: ExpertMapUpdate) -> None:
        life = self._world.control.lives
        if update.epoch < self._highest_epoch.get(life, 0):
            raise Violation(17, f"epoch {update.epoch} follows {self._highest_epoch[life]}")
        self._highest_epoch[life] = update.epoch
        for one in update.ranks:
            rank = self._world.ranks.get(one.ref.rank_id)
            if rank is None or not rank.is_alive:
                continue
            if lacking := set(one.experts) - rank.held:
                raise Violation(17, f"the map names {one.ref.rank_id} for {lacking}, which it does not hold")

    def ordered(self, rank_id: ExpertRankId, order: ExpertRankOrder) -> None:
        """No expert is dropped that a map in use names there, and no rank ends that alone has some."""
        if isinstance(order, ExpertRankRetired):
            self._retired(rank_id)
        if not isinstance(order, ExpertDropOrder):
            return
        self._world.counts["experts dropped"] += 1
        for caller in self._world.callers.values():
            if not self._counts(caller):
                continue
            for epoch in (one for one in caller.epochs_in_use if one >= caller.hello_epoch):
                if order.expert in caller.maps[epoch].get(rank_id, frozenset[int]()):
                    what = f"{rank_id} shall drop {order.expert}"
                    raise Violation(17, f"{what}, which epoch {epoch} in use by {caller.name} names")

    def _retired(self, rank_id: ExpertRankId) -> None:
        group, rank = self._world.control.group, self._world.ranks.get(rank_id)
        entry = None if group is None else group.ranks.of(rank_id)
        if group is None or group.rollout is None or rank is None or entry is None:
            return
        if entry.state is not ExpertRankLife.ENDING:
            return  # it was given up already, and does not know it
        named = {
            key.layer * self._world.scenario.experts + key.expert for key in group.rollout.map.replicas()
        }
        if alone := rank.held - named:
            raise Violation(16, f"{rank_id} shall end, and no other rank of the map has {alone}")

    def _counts(self, caller: SimExpertCaller) -> bool:
        """Whether the control plane has to respect what the caller uses: its stream is open, or was until
        lately, and the control plane has had the time to hear of it."""
        world = self._world
        policy = world.scenario.policy
        since_s = world.now_s - caller.stream_since_s
        if caller.stream is None:
            return since_s < policy.caller_gone_s - SLACK_S and world.control.since_s < caller.stream_since_s
        return since_s > SLACK_S

    # --- the group ------------------------------------------------------------------------------------

    def look_at_group(self, group: ExpertRankGroup) -> None:
        self._suspects_are_out(group)
        self._missing_are_loaded(group)

    def _suspects_are_out(self, group: ExpertRankGroup) -> None:
        world = self._world
        if group.rollout is None:
            return
        named = set(group.rollout.map.ranks)
        for rank_id, since_s in list(self._suspected_s.items()):
            rank = world.ranks.get(rank_id)
            if rank is None or rank_id not in named or rank.is_well:
                del self._suspected_s[rank_id]
                continue
            failed_s = rank.seen_alive_s
            begun_s = max(since_s, failed_s, world.control.since_s)
            if world.now_s - begun_s > OUT_FOR_ALL_S + SLACK_S:
                raise Violation(
                    16, f"{rank_id}, which does not answer, is in the map {world.now_s - begun_s:.2f} s later"
                )

    def _missing_are_loaded(self, group: ExpertRankGroup) -> None:
        """Experts that no rank holds are loaded at once, whatever else is to be loaded."""
        world, scenario = self._world, self._world.scenario
        serving = [one for one in group.ranks.serving if one.state is ExpertRankLife.READY]
        total = scenario.expert_total
        present = 0 if group.rollout is None else len(group.rollout.map.replicas())
        if present == total or group.rollout is None or not group.is_placed or not serving:
            self._missing_since_s = None
            return
        processes = [world.ranks.get(one.rank_id) for one in serving if one.rank_id is not None]
        if any(process is None or not process.is_well or process.slow_factor > 1 for process in processes):
            self._missing_since_s = None
            return
        since_s = self._missing_since_s = self._missing_since_s or world.now_s
        # A control plane that begins anew demands no memory back while callers may be on their way to it.
        rebuilt_s = world.control.since_s + (scenario.policy.rebuild_s if world.control.lives > 1 else 0.0)
        begun_s = max(since_s, self._settled_from_s, rebuilt_s)
        slots = sum(one.hello.slots for one in serving if one.hello is not None)
        wait_s = 0.0 if slots * scenario.policy.overcommit_max >= scenario.experts else 1e9
        most_s = wait_s + SLACK_S + 2.0 * scenario.load_s * total + 10 * scenario.latency_s
        if world.now_s - begun_s > most_s:
            raise Violation(
                16, f"{total - present} experts are on no rank for {world.now_s - begun_s:.2f} s, with room"
            )

    # --- the end --------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Strength is back without an order: all ranks, every expert, and every caller on the newest map."""
        world = self._world
        group = world.control.group
        if group is None or group.rollout is None:
            raise Violation(16, "there is no map at the end")
        well = [rank for rank in world.ranks.values() if rank.is_well]
        if len(well) != world.control.wanted or len(group.ranks.serving) != world.control.wanted:
            raise Violation(16, f"{len(well)} ranks at the end, and not {world.control.wanted}")
        replicas = group.rollout.map.replicas()
        if len(replicas) != world.scenario.expert_total:
            raise Violation(
                16, f"{world.scenario.expert_total - len(replicas)} experts have no rank at the end"
            )
        if not group.rollout.is_done:
            raise Violation(16, "what was to be loaded or dropped is not at the end")
        for caller in world.callers.values():
            if caller.routes.epoch != group.rollout.map.epoch:
                raise Violation(
                    16, f"{caller.name} uses epoch {caller.routes.epoch}, not {group.rollout.map.epoch}"
                )
            began_s = min((one.began_s for one in caller.dispatches.values()), default=world.now_s)
            if world.now_s - began_s > DISPATCH_S:
                raise Violation(16, f"a dispatch of {caller.name} is not done at the end")
            if caller.parking.is_parked:
                raise Violation(16, f"{caller.name} is parked at the end")
            if caller.routes.suspected or not caller.routes.is_complete:
                raise Violation(16, f"{caller.name} leaves out {caller.routes.suspected} at the end")

    def is_at_rest(self) -> bool:
        try:
            self.rest()
        except Violation:
            return False
        return True
