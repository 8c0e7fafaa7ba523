"""The autoscaler of a live cluster: reports of routers and the cluster's state in, orders out. Pure.

`control_plane.scaling` gives it a clock and carries its orders out; nothing here waits or reads a clock.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

import msgspec

from baton.core.costs import median_costs
from baton.core.demand import ClassLoad, DemandReport, Traits, WorkerLoad, difference, fell, total
from baton.core.experts import ExpertGroupState
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Order,
    ReplicaState,
    ReplicaStatus,
    Resize,
    RoleOutlook,
)
from control_plane.autoscaler.advice import AdviceFilter
from control_plane.autoscaler.cluster import order_of, roles_of
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.values import (
    AutoscalerMemory,
    AutoscalerSettings,
    Observation,
    RoleState,
    ScalingDecision,
)

SILENT_S = 10.0
"""A router that watches and has not reported for this long is not known to be idle."""
KEPT_MAX = 64
"""Number of starts, drains and role switches remembered while nothing could be decided."""
UNITS = {Role.PREFILL: "s of prompts per s", Role.DECODE: "tokens/s", Role.AGGREGATED: "s of prompts per s"}


class RouterLoads:
    """The totals of each router, and what came since they were last taken."""

    def __init__(self, *, now_s: float) -> None:
        self._taken_s = now_s
        self._latest: dict[RouterId, DemandReport] = {}
        self._reported_s: dict[RouterId, float] = {}
        self._before: dict[RouterId, Mapping[str, ClassLoad]] = {}

    def on_report(self, report: DemandReport, *, now_s: float) -> None:
        router_id = report.router_id
        if router_id not in self._before:
            # Requests that an older router counted before this process began belong to none of its intervals.
            is_new = report.up_s <= now_s - self._taken_s
            self._before[router_id] = {} if is_new else report.classes
        self._latest[router_id], self._reported_s[router_id] = report, now_s

    def silent(self, routers: Collection[RouterId], *, now_s: float) -> list[RouterId]:
        """Return those of `routers` that have reported nothing lately."""
        return sorted(r for r in routers if now_s - self._reported_s.get(r, float("-inf")) > SILENT_S)

    def take(self, routers: Collection[RouterId], *, now_s: float) -> dict[str, ClassLoad]:
        """Return what came since the last call. A router missing from `routers` is gone; it is counted one
        last time."""
        self._taken_s = now_s
        parts: dict[str, list[ClassLoad]] = {}
        for router_id, report in list(self._latest.items()):
            before = self._before[router_id]
            for name, load in report.classes.items():
                earlier = before.get(name, ClassLoad())
                if fell(load, earlier):  # the router counts anew under its old name
                    earlier = ClassLoad()
                parts.setdefault(name, []).append(difference(load, earlier))
            self._before[router_id] = report.classes
            if router_id not in routers:
                del self._latest[router_id], self._reported_s[router_id], self._before[router_id]
        return {name: total(loads) for name, loads in parts.items()}

    @property
    def queued(self) -> tuple[int, int]:
        """Number of sequences that no worker has taken, and the tokens of their prompts."""
        reports = self._latest.values()
        return sum(r.queued for r in reports), sum(r.queued_prompt_tokens for r in reports)

    def workers(self) -> dict[WorkerId, WorkerLoad]:
        """Return the load of each worker, from the router that has the newest report of it."""
        found: dict[WorkerId, WorkerLoad] = {}
        for report in self._latest.values():
            for load in report.workers:
                known = found.get(load.worker_id)
                if known is None or load.age_s < known.age_s:
                    found[load.worker_id] = load
        return found


class TransitionTimes:
    """Measured times of starts, drains and role switches, from repeated views of the replicas."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ReplicaStatus, float]] = {}
        """Replicas by name: their last status, and since when they have it."""
        self.start_s, self.drain_s, self.switch_s = (deque[float](maxlen=KEPT_MAX) for _ in range(3))

    def observe(self, replicas: Iterable[ReplicaStatus], *, life: str, now_s: float) -> None:
        """Compare replicas with the previous view. `life` is that of the control plane: workers of an earlier
        life only seem to start when they are found."""
        present = {r.name: (r, now_s - r.for_s) for r in replicas}
        for name, (was, since_s) in self._known.items():
            now, changed_s = present.get(name, (None, now_s))
            is_same = now is not None and now.worker_id == was.worker_id
            runs = is_same and now is not None and now.state is ReplicaState.RUNNING
            if was.state is ReplicaState.STARTING and runs and f".{life}" in (was.worker_id or ""):
                self.start_s.append(changed_s - since_s)
            elif was.state is ReplicaState.SWITCHING and runs:
                self.switch_s.append(changed_s - since_s)
            elif was.state is ReplicaState.DRAINING and not (
                is_same and now is not None and now.state is was.state
            ):
                self.drain_s.append(changed_s - since_s)
        self._known = present

    def take(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the times of starts, drains and role switches that ended since the last call."""
        taken = tuple(self.start_s), tuple(self.drain_s), tuple(self.switch_s)
        for one in (self.start_s, self.drain_s, self.switch_s):
            one.clear()
        return taken


def typical(all_traits: Iterable[Traits]) -> Traits | None:
    """Return the median of each figure, since workers of one role are taken to be alike. None: no worker
    reported any."""
    listed = list(all_traits)
    costs = median_costs(t.costs for t in listed)
    if costs is None:
        return None
    return Traits(
        costs,
        chunk_tokens=min(t.chunk_tokens for t in listed),
        batch_max=min(t.batch_max for t in listed),
        pool_tokens=min(t.pool_tokens for t in listed),
    )


class LiveAutoscaler:
    """The autoscaler of one model. Call `on_report` and `on_state` as things happen, and `decide` once per
    interval."""

    def __init__(self, settings: AutoscalerSettings, *, model: str, now_s: float) -> None:
        self.settings, self.model = settings, model
        self.scaler = Autoscaler(settings)
        self._loads = RouterLoads(now_s=now_s)
        self._transitions = TransitionTimes()
        self._traits: dict[Role, Traits] = {}
        self._decided_s = now_s
        self._last: tuple[Mapping[Role, int], Mapping[Role, int]] | None = None
        """Counts ordered last, and those desired before that order."""
        self._advised = AdviceFilter(settings.patience_s)
        self._decision: ScalingDecision | None = None
        self._blind = "no interval has ended yet"

    def on_report(self, report: DemandReport, *, now_s: float) -> None:
        self._loads.on_report(report, now_s=now_s)

    def on_state(self, state: ClusterState, *, now_s: float) -> None:
        mine = [r for r in state.replicas if r.model == self.model]
        self._transitions.observe(mine, life=state.life, now_s=now_s)

    def limit(self, ranks_max: int) -> None:
        """Limit all roles together from now on. The limit is below the configured one where other models use
        the rest."""
        if ranks_max != self.scaler.settings.ranks_max:
            self.scaler.settings = msgspec.structs.replace(self.scaler.settings, ranks_max=ranks_max)

    def cost_ranks(self, ranks: Mapping[Role, int], groups: Sequence[ExpertGroupState] = ()) -> None:
        """Count so many ranks for one worker of each role from now on, and the expert ranks of `groups` where
        they are apart from workers. A rollout, or an order, may have changed them."""
        settings = self.scaler.settings
        used = {role: count for role, count in ranks.items() if role in settings.bounds}
        experts = dict(settings.expert_ranks)
        for group in groups:
            if group.model == self.model and group.role in experts and group.wanted_ranks:
                experts[Role(group.role)] = group.wanted_ranks
        if (used, experts) != (settings.ranks, settings.expert_ranks):
            self.scaler.settings = msgspec.structs.replace(settings, ranks=used, expert_ranks=experts)

    def is_at_zero(self, state: ClusterState) -> bool:
        pool = state.pool(self.model)
        return pool is not None and not any(pool.counts.values())

    # --- deciding ---------------------------------------------------------------------------------

    def decide(self, state: ClusterState, *, now_s: float) -> Order | None:
        """Return the order or the advice of this interval, or None if there is nothing new. Nothing is
        decided while a router is silent, since it may have any load."""
        routers = [router.router_id for router in state.routers]
        self._blind = self._blindness(state, routers, now_s)
        if self._blind:
            return None
        seen = self._observe(state, routers, now_s)
        self._decision = decision = self.scaler.decide(seen, self._traits)
        order = order_of(decision, self.model)
        pool = state.pool(self.model)
        have = dict(pool.counts) if pool else {}
        if self.settings.is_advice:
            counts = have if order is None else cast("Resize", order.action).counts
            return order if self._advised.is_news(counts, have, now_s) else None
        if order is None:
            self._last = None
            return None
        assert isinstance(order.action, Resize)
        said = (order.action.counts, have)
        if said == self._last:
            return None
        self._last = said
        return order

    def _blindness(self, state: ClusterState, routers: Collection[RouterId], now_s: float) -> str:
        if state.pool(self.model) is None:
            return f"there is no model {self.model}"
        if not routers:
            return "there is no router"
        if silent := self._loads.silent(routers, now_s=now_s):
            return f"no report from {', '.join(silent[:5])}"
        return ""

    def _observe(self, state: ClusterState, routers: Collection[RouterId], now_s: float) -> Observation:
        classes = self._loads.take(routers, now_s=now_s)
        interval_s = max(self.settings.interval_s, now_s - self._decided_s)
        self._decided_s = now_s
        workers = self._loads.workers()
        queued, queued_tokens = self._loads.queued
        start_s, drain_s, switch_s = self._transitions.take()
        self._learn_traits(workers.values())
        counted = roles_of(state, self.model, self.settings.bounds)
        return Observation(
            at_s=now_s,
            interval_s=interval_s,
            classes=classes,
            roles={role: _loaded(counts, role, workers.values()) for role, counts in counted.items()},
            queued=queued,
            queued_prompt_tokens=queued_tokens,
            start_s=start_s,
            drain_s=drain_s,
            switch_s=switch_s,
        )

    def _learn_traits(self, workers: Iterable[WorkerLoad]) -> None:
        reported = [(w.role, w.traits) for w in workers if w.traits is not None and w.traits.is_usable]
        for role in self.settings.bounds:
            mine = typical(traits for at, traits in reported if at is role)
            # Workers of another role have the same weights and the same device, so their figures apply.
            anybody = typical(traits for _, traits in reported) if role not in self._traits else None
            if (found := mine or anybody) is not None:
                self._traits[role] = found

    # --- state that outlives the process or is shown ------------------------------------------------

    def memory(self, *, now_s: float) -> AutoscalerMemory:
        return msgspec.structs.replace(self.scaler.memory(now_s), traits=dict(self._traits))

    def recall(self, memory: AutoscalerMemory, *, now_s: float, away_s: float) -> None:
        """Restore what an earlier process learnt. `away_s` is the time since it was written."""
        self._traits = {
            role: traits
            for role, traits in memory.traits.items()
            if role in self.settings.bounds and traits.is_usable
        }
        self.scaler.recall(memory, now_s, away_s=away_s)

    def state(self) -> AutoscaleState:
        decision, scaler = self._decision, self.scaler
        sized = decision.sized if decision is not None else {}
        return AutoscaleState(
            mode="advise" if self.settings.is_advice else "on",
            model=self.model,
            text=self._blind,
            roles=tuple(
                RoleOutlook(
                    role=role,
                    demand=one.demand,
                    forecast=one.forecast,
                    unit=UNITS[role],
                    correction=one.correction,
                    needed=one.needed,
                    wanted=decision.desired.get(role, 0) if decision is not None else 0,
                )
                for role, one in sized.items()
            ),
            start_s=scaler.start_s,
            drain_s=scaler.drain_s,
            switch_s=scaler.switch_s,
        )


def _loaded(counts: RoleState, role: Role, workers: Iterable[WorkerLoad]) -> RoleState:
    mine = [load for load in workers if load.role is role]
    return msgspec.structs.replace(
        counts,
        waiting_prompt_tokens=sum(load.waiting_tokens for load in mine),
        decoding=sum(load.decoding for load in mine),
        context_tokens=sum(load.context_tokens for load in mine),
        held_share=sum(load.held_share for load in mine) / max(1, len(mine)),
    )
