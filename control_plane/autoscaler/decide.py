"""Decisions about the difference between the replicas that exist and those that are needed.

A pool grows at once. It shrinks only when fewer replicas would have been enough for the whole patience, and
the patience grows each time a step down is followed by a step up. A role that needs more takes replicas from
a role that has had more than it needs for a while, before any is started.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil

from baton.core.demand import Traits
from baton.core.messages import Role
from control_plane.autoscaler.correction import DemandCorrection
from control_plane.autoscaler.demand import DemandEstimator, learnt
from control_plane.autoscaler.limits import RankHoursBudget, within
from control_plane.autoscaler.patience import FACTOR_MIN, SMALL_SHARE, Patience
from control_plane.autoscaler.rate import RateEstimator
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.sizing import (
    aggregated_needed,
    decode_needed,
    decode_strain,
    prefill_needed,
    prompts_missed,
)
from control_plane.autoscaler.values import (
    AutoscalerMemory,
    AutoscalerSettings,
    Observation,
    RoleSizing,
    RoleSwitch,
    ScalingDecision,
)

SLACK = 1.08
"""A pool loses a replica only if the rest would also serve this many times the forecast. The margin is larger
where few requests support the forecast."""
CALM = 0.5
"""A pool whose predicted misses are below this part of the allowed ones can wait for one more replica until
more than the forecast's margin asks for it."""
SWITCH_PATIENCE_S = 60.0
"""A role must have had more replicas than it needs for this long before it gives one to another role. The
time grows with its patience after mistakes."""
STARTS_PATIENCE = 3.0
"""A start that takes longer than this many usual starts counts as failed."""
LEARNT_MAX = 8
"""Number of starts, drains and role switches whose times are remembered."""
NOTHING_KNOWN = "none"
"""Shown in place of a forecast's name while no worker has reported what its steps cost."""
HOLD_SHARE = 0.8
"""Part of the time that routers hold requests within which a cluster at zero must be back."""


class Autoscaler:
    """The decisions for one model. Call `decide` once per interval; `journal` keeps the decisions."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        self.settings = settings
        self.journal = Journal()
        self._demand = DemandEstimator(settings)
        missed_max = max(1e-3, 1 - settings.attain)
        # TTFT and TPOT each get half of the misses that are allowed for both.
        self._missed_max = missed_max / 2 if len(settings.bounds) > 1 else missed_max
        self._attainment = {role: DemandCorrection(missed_max=self._missed_max) for role in settings.bounds}
        self._patience = {role: Patience(settings.patience_s) for role in settings.bounds}
        self._hours = RankHoursBudget(settings.rank_hours_per_day)
        self._learnt = {name: deque[float](maxlen=LEARNT_MAX) for name in ("start", "drain", "switch")}
        self._busy_s: float | None = None
        """Last instant at which there was something to do."""
        self._complete_s: float | None = None
        """Last instant at which nothing was being started, or the first instant of all."""

    @property
    def start_s(self) -> float:
        return learnt(self.settings.start_s, self._learnt["start"])

    @property
    def switch_s(self) -> float:
        return learnt(self.settings.switch_s, self._learnt["switch"])

    @property
    def drain_s(self) -> float:
        return learnt(self.settings.drain_s, self._learnt["drain"])

    @property
    def zero_refused(self) -> str:
        """Reason why the cluster does not scale to zero although that is configured. Empty: it does."""
        allowed_s = HOLD_SHARE * self.settings.hold_s
        if self.start_s > allowed_s:
            return (
                f"starts take {self.start_s:.0f} s and routers hold requests for "
                f"{self.settings.hold_s:.0f} s: to scale to zero, raise router.queue_wait_s to at least "
                f"{ceil(self.start_s / HOLD_SHARE)} s"
            )
        return ""

    def memory(self, at_s: float) -> AutoscalerMemory:
        learnt = {name: tuple(values) for name, values in self._learnt.items()}
        return AutoscalerMemory(
            start_s=learnt["start"],
            drain_s=learnt["drain"],
            switch_s=learnt["switch"],
            corrections={role: one.factor for role, one in self._attainment.items()},
            patience={role: one.factor for role, one in self._patience.items()},
            spent=self._hours.history(at_s),
        )

    def recall(self, memory: AutoscalerMemory, at_s: float, *, away_s: float) -> None:
        """Restore what an earlier process learnt, before the first decision. `away_s` is the time since
        `memory` was written."""
        for name, values in (
            ("start", memory.start_s),
            ("drain", memory.drain_s),
            ("switch", memory.switch_s),
        ):
            self._learnt[name].extend(values)
        for role in self.settings.bounds:
            self._attainment[role].factor = memory.corrections.get(role, 1.0)
            self._patience[role].factor = memory.patience.get(role, FACTOR_MIN)
        self._hours.restore([(ago_s + away_s, hours) for ago_s, hours in memory.spent], at_s)

    def decide(self, seen: Observation, traits: Mapping[Role, Traits]) -> ScalingDecision:
        """Decide for one interval. `traits` are those that the workers of each role reported last; a role
        without them keeps its replicas."""
        self._learn(seen, traits)
        reasons: list[str] = []
        sized = {role: self._sized(role, seen, traits) for role in self.settings.bounds}
        have = {role: seen.of(role).have for role in sized}
        wanted = {
            role: self._wanted(role, have[role], sized[role], reasons)
            for role in sized
            if not self._is_calm(role, seen, sized[role], traits)
        }
        wanted = {role: wanted.get(role, have[role]) for role in sized}
        wanted = self._asleep(seen, wanted, reasons)
        needed, ranks_max = {role: s.needed for role, s in sized.items()}, self._ranks_max(seen.at_s)
        wanted = within(wanted, needed, self.settings, ranks_max=ranks_max, reasons=reasons)
        wanted = self._one_at_a_time(have, wanted, ranks_max)
        switches = self._switches(seen, have, wanted, reasons)
        decision = self._decision(seen, have, wanted, switches, sized, reasons)
        for role, count in decision.desired.items():
            self._patience[role].decided(count - have[role], have[role], seen.at_s)
        self.journal.add(decision)
        return decision

    # --- what is needed ---------------------------------------------------------------------------

    def _learn(self, seen: Observation, traits: Mapping[Role, Traits]) -> None:
        for name, values in (("start", seen.start_s), ("drain", seen.drain_s), ("switch", seen.switch_s)):
            self._learnt[name].extend(values)
        # Replicas that start were asked for and could not be used yet, so the cluster does not count as idle.
        # A start that fails for ever does not keep the cluster awake.
        starts = any(state.starting or state.joining for state in seen.roles.values())
        if not starts or self._complete_s is None:
            self._complete_s = seen.at_s
        is_young = starts and seen.at_s - self._complete_s <= STARTS_PATIENCE * self.start_s
        if not seen.is_idle or is_young or self._busy_s is None:
            self._busy_s = seen.at_s
        paid = self.settings.cost({role: seen.of(role).paid for role in self.settings.bounds})
        self._hours.add(seen.at_s, seen.interval_s, paid)
        prompts_by = traits.get(Role.PREFILL) or traits.get(Role.AGGREGATED)
        if prompts_by is not None:
            self._demand.observe(seen, prompts_by)
            self._demand.observe_running(seen, traits.get(Role.DECODE) or prompts_by)
            self._judge(seen, prompts_by, traits)

    def _judge(self, seen: Observation, prompts_by: Traits, traits: Mapping[Role, Traits]) -> None:
        loads = seen.classes.values()
        for role, attainment in self._attainment.items():
            state, kind = seen.of(role), traits.get(role)
            if kind is None or not state.serving:
                continue
            if state.starting or state.joining or state.draining:
                attainment.forget()
                continue
            judged = missed = 0
            if role.prefills:
                judged = sum(c.started for c in loads)
                hopeless = self._demand.hopeless_share(prompts_by)
                missed = max(0, sum(c.ttft_missed for c in loads) - round(hopeless * judged))
            if role.decodes:
                judged = max(judged, sum(c.ended for c in loads))
                missed += sum(c.tpot_missed for c in loads)
            attainment.observe(
                at_s=seen.at_s,
                interval_s=seen.interval_s,
                judged=judged,
                missed=missed,
                strain=self._strain(role, state.serving, kind, self._signal(role).mean),
            )

    def _strain(self, role: Role, serving: int, kind: Traits, demand: float) -> float:
        """Predicted misses as `DemandCorrection.observe` wants them. For decode it is 1 where the objective
        is just met, and falls fast below."""
        ask, asked = self._demand, demand * self._attainment[role].factor
        if role.prefills:
            return prompts_missed(ask.prompts(kind), work=asked, servers=serving) / self._missed_max
        return decode_strain(ask.decoding(asked), kind, replicas=serving)

    def _steps(self, seconds: float) -> int:
        return max(1, ceil(seconds / self.settings.interval_s))

    def _sized(self, role: Role, seen: Observation, traits: Mapping[Role, Traits]) -> RoleSizing:
        kind = traits.get(role)
        if kind is None:
            needed = max(seen.of(role).have, 1 if seen.queued else 0)
            return RoleSizing(0.0, 0.0, 0.0, NOTHING_KNOWN, 1.0, needed, needed)
        signal = self._signal(role)
        # The forecast is for the moment at which a replica started now would help. Only a surge counts of the
        # load that will be over by then: sizing for the present mean as well would follow chance, and its
        # replicas would stay for the whole patience.
        far = signal.predict(self._steps(self.start_s))
        upper = max(far.upper, signal.surge, signal.jumped) if signal.is_ready else signal.least
        if role is Role.DECODE:
            upper = max(upper, self._demand.running_tokens_per_s)
        factor = self._attainment[role].factor
        needed = max(self._needed(role, seen, kind, upper * factor), self._for_a_jump(role, seen, kind))
        slack = self._needed(role, seen, kind, max(SLACK, 1 + signal.doubt) * upper * factor)
        floor = self._patience[role].floor(
            max(needed, slack), seen.at_s, mistake_s=self.start_s + self.drain_s
        )
        return RoleSizing(signal.mean, upper, far.error, far.model, factor, needed, floor)

    def _needed(self, role: Role, seen: Observation, kind: Traits, demand: float) -> int:
        ask = self._demand
        if role is Role.DECODE:
            load = ask.decoding(demand)
            return decode_needed(load, kind)
        work = demand + ask.backlog_rate(servers=seen.of(role).serving, start_s=self.start_s)
        if role is Role.PREFILL:
            return prefill_needed(ask.prompts(kind), work=work, missed_max=self._missed_max)
        # Output tokens grow with the prompts, by the same margin.
        mean = ask.prefill.mean
        tokens = ask.decode.mean * (demand / mean if mean else 1.0)
        return aggregated_needed(
            ask.prompts(kind), ask.decoding(tokens), kind, work=work, missed_max=self._missed_max
        )

    def _is_calm(
        self, role: Role, seen: Observation, sized: RoleSizing, traits: Mapping[Role, Traits]
    ) -> bool:
        """Return True if only the forecast's margin asks for little more, and the expected load will be
        served well. At the border between n and n + 1 replicas, chance would otherwise cross it again and
        again."""
        kind, have, signal = traits.get(role), seen.of(role).have, self._signal(role)
        little = max(1, int(SMALL_SHARE * have))
        if kind is None or not 0 < have < sized.needed <= have + little:
            return False
        if signal.jumped or signal.surge or self._for_a_jump(role, seen, kind) > have:
            return False
        expected = signal.predict(self._steps(self.start_s)).value
        if role is Role.DECODE:
            expected = max(expected, self._demand.running_tokens_per_s)
        return self._attainment[role].is_good and self._strain(role, have, kind, expected) < CALM

    def _signal(self, role: Role) -> RateEstimator:
        return self._demand.decode if role is Role.DECODE else self._demand.prefill

    def _for_a_jump(self, role: Role, seen: Observation, kind: Traits) -> int:
        """Replicas that can serve `headroom` times the usual load until newly started ones help. A queue of
        prompts may grow meanwhile for as long as the objective allows; sequences that decode slow each other
        down at once."""
        signal = self._signal(role)
        if self.settings.headroom <= 1 or not signal.is_ready:
            return 0
        jump = self.settings.headroom * signal.usual * self._attainment[role].factor
        if role is not Role.PREFILL:
            return self._needed(role, seen, kind, jump)
        alone_s = self.start_s + self.settings.interval_s
        return ceil(jump * alone_s / (alone_s + self._demand.ttft_s))

    def _wanted(self, role: Role, have: int, sized: RoleSizing, reasons: list[str]) -> int:
        unit = "tokens/s" if role is Role.DECODE else "s of prompts per s"
        if sized.needed > have and sized.model != NOTHING_KNOWN:
            back = "" if have else "back from zero; "
            reasons.append(
                f"{role}: {back}{sized.forecast:.3g} {unit} forecast ({sized.demand:.3g} now, error "
                f"{sized.error:.2g}, {sized.model}; x{sized.correction:.2f} from attainment) takes "
                f"{sized.needed}, there are {have}"
            )
            return sized.needed
        if sized.floor is not None and sized.floor < have:
            # At most half of the pool goes at once, since a drain cannot be undone.
            wanted = max(sized.floor, have // 2)
            patience_s = self._patience[role].waited_s
            reasons.append(
                f"{role}: no more than {sized.floor} of {have} were needed for {patience_s:.0f} s "
                f"({sized.forecast:.3g} {unit} forecast)"
            )
            return wanted
        return have

    def _asleep(self, seen: Observation, wanted: dict[Role, int], reasons: list[str]) -> dict[Role, int]:
        """Scale to zero after long idleness, and keep at least one replica of each role otherwise."""
        after_s = self.settings.zero_after_s
        may = after_s > 0 and all(b.least == 0 for b in self.settings.bounds.values())
        assert self._busy_s is not None
        idle_s = seen.at_s - self._busy_s
        if may and idle_s >= after_s:
            if not (refused := self.zero_refused):
                if any(seen.of(role).have for role in wanted):
                    reasons.append(f"zero: nothing to do for {idle_s:.0f} s")
                return dict.fromkeys(wanted, 0)
            reasons.append(f"not to zero: {refused}")
        sleeps = not any(wanted.values()) and not any(seen.of(role).have for role in wanted)
        if may and sleeps and seen.is_idle:
            return wanted
        for role, count in wanted.items():
            if count < 1:
                if not seen.of(role).have:
                    reasons.append(f"{role}: back from zero, {seen.queued} requests wait")
                wanted[role] = 1
        return wanted

    # --- bounds, budgets, role switches -----------------------------------------------------------

    def _ranks_max(self, at_s: float) -> int:
        """Return the ranks that may run at once; 0: any number."""
        most, allowed = self.settings.ranks_max, self._hours.allowed(at_s)
        return most if allowed is None or 0 < most <= allowed else allowed

    def _one_at_a_time(
        self, have: dict[Role, int], wanted: dict[Role, int], ranks_max: int
    ) -> dict[Role, int]:
        """Let one role shrink and another grow one after the other where their workers have unlike shapes. An
        order for both would make workers switch roles, and keep a shape that nobody chose for their new role.
        Growth comes first, unless bounds or devices are against it."""
        settings = self.settings
        grown = {role: max(have[role], count) for role, count in wanted.items()}
        shrunk = {role: min(have[role], count) for role, count in wanted.items()}
        if not settings.has_unlike_shapes:
            return wanted
        for counts in (grown, shrunk):
            are_bounded = all(b.least <= counts[role] <= b.most for role, b in settings.bounds.items())
            if counts == wanted or (are_bounded and (not ranks_max or settings.cost(counts) <= ranks_max)):
                return counts
        return wanted

    def _switches(
        self,
        seen: Observation,
        have: dict[Role, int],
        wanted: dict[Role, int],
        reasons: list[str],
    ) -> tuple[RoleSwitch, ...]:
        """Choose replicas that switch their role, and reduce `wanted` accordingly."""
        if set(have) != {Role.PREFILL, Role.DECODE} or self.switch_s >= self.start_s:
            return ()
        if self.settings.has_unlike_shapes:
            return ()  # a worker keeps its shape, which the other role was not given
        for source, target in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            lacking = wanted[target] - have[target]
            patience = self._patience[source]
            lately = patience.most(seen.at_s, SWITCH_PATIENCE_S * patience.factor / FACTOR_MIN)
            keep = min(max(lately, self.settings.bounds[source].least, 1), wanted[source])
            spare = min(have[source] - keep, seen.of(source).serving - 1)
            count = min(lacking, spare)
            if count > 0:
                wanted[source] = min(wanted[source], have[source] - count)
                reasons.append(
                    f"{count} of {source} to {target}: {source} can do with {keep} of {have[source]}, and a "
                    f"role switch takes {self.switch_s:.0f} s, a start {self.start_s:.0f} s"
                )
                return (RoleSwitch(source, target, count),)
        return ()

    def _decision(
        self,
        seen: Observation,
        have: dict[Role, int],
        wanted: dict[Role, int],
        switches: tuple[RoleSwitch, ...],
        sized: Mapping[Role, RoleSizing],
        reasons: list[str],
    ) -> ScalingDecision:
        after = dict(have)
        for switch_role in switches:
            after[switch_role.source] -= switch_role.count
            after[switch_role.target] += switch_role.count
        return ScalingDecision(
            at_s=seen.at_s,
            desired=wanted,
            switches=switches,
            starts={role: max(0, wanted[role] - after[role]) for role in wanted},
            stops={role: max(0, after[role] - wanted[role]) for role in wanted},
            reasons=tuple(reasons),
            sized=sized,
            is_advice=self.settings.is_advice,
        )
