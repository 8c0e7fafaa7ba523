"""Invariant 14, seen from outside: what the autoscaler orders, against the demand that there really is."""

from collections.abc import Mapping

from baton.core.demand import DemandReport
from baton.core.ids import RouterId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Order, Pool, Resize
from control_plane.autoscaler.live import SILENT_S
from control_plane.autoscaler.values import AutoscalerSettings
from simulator.faults.control_plane.demand import PROMPT_S, Demand, SimDemandRouter
from simulator.faults.control_plane.life import ControlLife
from simulator.faults.control_plane.scenario import MODEL, ControlScenario
from simulator.faults.run_context import RunContext, Violation

INVARIANT = 14
SLACK_S = 0.01
SWITCH_PATIENCE_S = 60.0
"""A role gives replicas to another one no sooner than this after it grew."""
OVERLOADED_LOOKS_MAX = 10
"""Decisions in a row that may leave a pool overloaded although it may grow."""


class ScalingChecker:
    """The checks of the autoscaler of `MODEL`."""

    __slots__ = (
        "_first_look_s",
        "_grew",
        "_last_demand_s",
        "_overloaded_looks",
        "_reported_s",
        "_run",
        "_scenario",
        "_seen",
        "_was_loaded",
    )

    def __init__(self, run: RunContext, scenario: ControlScenario) -> None:
        self._run, self._scenario = run, scenario
        self._reported_s: dict[RouterId, float] = {}
        self._seen: dict[RouterId, int] = {}
        self._grew: dict[Role, tuple[float, int]] = {}
        """When each role was last ordered to grow, and to how many."""
        self._first_look_s: float | None = None
        self._last_demand_s = 0.0
        self._overloaded_looks = 0
        self._was_loaded = False

    @property
    def _now_s(self) -> float:
        return self._run.clock.now_s

    def life_begins(self, life: ControlLife) -> None:
        self._reported_s.clear()
        self._grew.clear()
        self._first_look_s = None
        self._overloaded_looks = 0

    def router_watches(self, router: SimDemandRouter) -> None:
        self._seen.setdefault(router.router_id, 0)

    def reported(self, router: SimDemandRouter, report: DemandReport) -> None:
        self._reported_s[router.router_id] = self._now_s
        requests = sum(load.started for load in report.classes.values())
        if requests > self._seen.get(router.router_id, 0) or report.queued:
            self._last_demand_s = self._now_s
        self._seen[router.router_id] = requests
        self._was_loaded |= bool(report.workers)

    # --- decisions ------------------------------------------------------------------------------------

    def looked(self, state: ClusterState, order: Order | None, demand: Demand) -> None:
        settings = self._scenario.settings
        pool = state.pool(MODEL)
        assert settings is not None
        assert pool is not None
        silent = self._silent(state)
        if silent or not state.routers:
            self._run.counts["autoscaler: blind"] += 1
            self._overloaded_looks = 0
            if order is not None:
                raise Violation(INVARIANT, f"{order} although nothing was heard of {silent or 'any router'}")
            return
        self._first_look_s = self._now_s if self._first_look_s is None else self._first_look_s
        self._grows(settings, pool, order, demand)
        if order is None:
            return
        assert isinstance(order.action, Resize)
        if order.is_advice != settings.is_advice:
            raise Violation(INVARIANT, f"{order}, and is_advice is {settings.is_advice}")
        counts = order.action.counts
        self._is_within(settings, counts)
        for role, count in counts.items():
            if count < pool.count(role):
                self._shrinks(settings, pool, role, counts)
        for role, count in counts.items():
            if count > pool.count(role):
                self._run.counts["autoscaler: grew"] += 1
                self._grew[role] = (self._now_s, count)

    def _silent(self, state: ClusterState) -> list[RouterId]:
        heard = self._reported_s
        return [
            r.router_id
            for r in state.routers
            if self._now_s - heard.get(r.router_id, float("-inf")) > SILENT_S + SLACK_S
        ]

    def _is_within(self, settings: AutoscalerSettings, counts: Mapping[Role, int]) -> None:
        for role, count in counts.items():
            bound = settings.bounds[role]
            if not bound.least <= count <= bound.most:
                raise Violation(INVARIANT, f"{count} {role} workers are ordered, outside {bound}")
        minimum = settings.cost({role: max(bound.least, 1) for role, bound in settings.bounds.items()})
        if settings.ranks_max and settings.cost(counts) > max(settings.ranks_max, minimum):
            raise Violation(INVARIANT, f"{dict(counts)} are ordered, more than {settings.ranks_max} together")

    def _shrinks(
        self, settings: AutoscalerSettings, pool: Pool, role: Role, counts: Mapping[Role, int]
    ) -> None:
        self._run.counts["autoscaler: shrank"] += 1
        have, count = pool.count(role), counts[role]
        if count == 0:
            self._falls_asleep(settings, role)
            return
        if have > settings.bounds[role].most or self._is_limited(settings, pool, counts):
            return
        assert self._first_look_s is not None
        patience_s = min(settings.patience_s, SWITCH_PATIENCE_S) - SLACK_S
        grew_s, grew_to = self._grew.get(role, (float("-inf"), 0))
        quiet_s = self._now_s - max(self._first_look_s, grew_s if grew_to > count else float("-inf"))
        if quiet_s < patience_s:
            raise Violation(
                INVARIANT,
                f"{role} shrinks from {have} to {count} after {quiet_s:.0f} s of {patience_s:.0f} s",
            )
        if any(counts[other] > pool.count(other) for other in counts):
            self._run.counts["autoscaler: switched roles"] += 1
        elif count < have // 2:
            raise Violation(INVARIANT, f"{role} shrinks from {have} to {count} at once")

    def _falls_asleep(self, settings: AutoscalerSettings, role: Role) -> None:
        """Check that the last worker of a role goes only where that is configured, and after idleness."""
        self._run.counts["autoscaler: to zero"] += 1
        idle_s = self._now_s - self._last_demand_s
        may = settings.zero_after_s > 0 and all(bound.least == 0 for bound in settings.bounds.values())
        if not may or idle_s < settings.zero_after_s - settings.interval_s:
            raise Violation(
                INVARIANT,
                f"the last {role} worker is taken away; {idle_s:.0f} s ago there was demand, and "
                f"zero_after_s is {settings.zero_after_s:g}",
            )

    def _is_limited(self, settings: AutoscalerSettings, pool: Pool, counts: Mapping[Role, int]) -> bool:
        """Some limit for all roles together may be what takes replicas away."""
        if settings.rank_hours_per_day:
            return True
        most = settings.ranks_max
        return bool(most) and max(settings.cost(pool.counts), settings.cost(counts)) >= most

    def _grows(self, settings: AutoscalerSettings, pool: Pool, order: Order | None, demand: Demand) -> None:
        """Check that a pool that cannot keep up grows, where it may."""
        role = Role.PREFILL if Role.PREFILL in settings.bounds else Role.AGGREGATED
        have, bound = pool.count(role), settings.bounds[role]
        work = demand.rate(self._now_s) * PROMPT_S
        is_limited = settings.is_advice or self._is_limited(settings, pool, {**pool.counts, role: have + 1})
        grows = (
            order is not None and isinstance(order.action, Resize) and order.action.counts.get(role, 0) > have
        )
        if grows or is_limited or have >= bound.most or work <= have or not self._was_loaded:
            self._overloaded_looks = 0
            return
        self._overloaded_looks += 1
        if self._overloaded_looks > OVERLOADED_LOOKS_MAX:
            raise Violation(
                INVARIANT,
                f"{have} {role} workers have {work:.2f} s of prompts per s for "
                f"{self._overloaded_looks} decisions, up to {bound.most} may be had, and none is started",
            )
