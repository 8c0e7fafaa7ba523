"""Rules by which a fleet is scaled: the production autoscaler's, and those it is compared with."""

from collections import deque
from collections.abc import Mapping
from math import ceil
from typing import Literal, get_args

from baton.core.demand import Traits
from baton.core.messages import Role
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.record import Journal
from control_plane.autoscaler.sizing import DecodeLoad, largest_batch
from control_plane.autoscaler.values import AutoscalerSettings, Observation, RoleState, ScalingDecision
from simulator.fleet.scaling import Rule

RuleName = Literal["baton", "hpa", "queue-depth", "static"]
RULES: tuple[RuleName, ...] = get_args(RuleName)

HPA_TOLERANCE = 0.1
HPA_DOWN_WINDOW_S = 300.0
HPA_UP_PODS, HPA_UP_SHARE = 4, 1.0
"""Growth allowed per 15 s, whichever is more: the defaults of `behavior.scaleUp`."""

QUEUE_UP, QUEUE_DOWN = 0.25, 0.02
"""Bounds of the time in which a prefill worker computes the prompts that wait for it, as a part of the
strictest objective for first tokens."""
FULL_UP, FULL_DOWN = 0.7, 0.3
"""Bounds of the part of the decode workers' blocks that is held, or of the sequences that they can decode
within the objective."""
QUEUE_DOWN_AFTER_S = 300.0


def make_rule(name: RuleName, settings: AutoscalerSettings, *, target: float = 0.7) -> Rule:
    """Make a rule by its name. `target` is the load that `hpa` aims at."""
    match name:
        case "baton":
            return Autoscaler(settings)
        case "hpa":
            return HorizontalPodAutoscaler(settings, target=target)
        case "queue-depth":
            return QueueDepth(settings)
        case "static":
            return Static(settings)


class Counting:
    """A rule that computes a count per role from the state of that role alone."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        self.journal = Journal()
        self.settings = settings

    def _desired(self, role: Role, seen: Observation, kind: Traits) -> tuple[int, str]:
        raise NotImplementedError

    def _strictest(self, name: Literal["ttft_s", "tpot_s"]) -> float:
        objectives = [getattr(one, name) for one in self.settings.objectives.values()]
        return min((seconds for seconds in objectives if seconds), default=0.0)

    def _decoding_share(self, state: RoleState, kind: Traits) -> float:
        """Return the running sequences as a part of those that the role's workers can decode within the
        objective."""
        context = state.context_tokens / state.decoding if state.decoding else 1.0
        batch = largest_batch(DecodeLoad(0.0, context, self._strictest("tpot_s")), kind)
        return state.decoding / max(1, state.serving) / batch

    def decide(self, seen: Observation, traits: Mapping[Role, Traits]) -> ScalingDecision:
        desired: dict[Role, int] = {}
        reasons: list[str] = []
        for role, bounds in self.settings.bounds.items():
            have = seen.of(role).have
            count, reason = self._desired(role, seen, traits[role])
            desired[role] = min(bounds.most, max(bounds.least, count))
            if desired[role] != have:
                reasons.append(f"{role}: {reason}")
        decision = ScalingDecision(
            seen.at_s,
            desired,
            (),
            {role: max(0, count - seen.of(role).have) for role, count in desired.items()},
            {role: max(0, seen.of(role).have - count) for role, count in desired.items()},
            tuple(reasons),
            {},
            is_advice=self.settings.is_advice,
        )
        self.journal.add(decision)
        return decision


class Static(Counting):
    """The rule that wants as many replicas as there are."""

    def _desired(self, role: Role, seen: Observation, kind: Traits) -> tuple[int, str]:
        return seen.of(role).have, "static"


class HorizontalPodAutoscaler(Counting):
    """Kubernetes' rule: ceil(replicas × metric / target) over replicas that serve, a tolerance of 10 %, down
    to the highest count recommended in 300 s, up by at most 4 pods or 100 % per 15 s
    (kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale).

    The metric of prefill is the busy share of its workers. The metric of decode is the sequences that run, as
    a part of those that one replica can decode within its objective.
    """

    def __init__(self, settings: AutoscalerSettings, *, target: float) -> None:
        super().__init__(settings)
        self._target = target
        self._recommended = {role: deque[tuple[float, int]]() for role in settings.bounds}

    def _desired(self, role: Role, seen: Observation, kind: Traits) -> tuple[int, str]:
        state = seen.of(role)
        metric = state.busy_share
        if role.decodes:
            share = self._decoding_share(state, kind)
            metric = share if role is Role.DECODE else max(metric, share)
        ratio = metric / self._target
        # Pods that are not ready are left out of the metric, and count as idle when it asks for more.
        count = state.have
        if ratio > 1 + HPA_TOLERANCE:
            count = max(state.have, ceil(state.serving * ratio))
        elif ratio < 1 - HPA_TOLERANCE:
            count = max(1, ceil(state.serving * ratio))
        kept = self._recommended[role]
        kept.append((seen.at_s, count))
        while kept[0][0] < seen.at_s - HPA_DOWN_WINDOW_S:
            kept.popleft()
        wanted = max(n for _, n in kept) if count < state.have else count
        wanted = min(wanted, state.have) if count < state.have else wanted
        most = state.have + max(HPA_UP_PODS, int(HPA_UP_SHARE * state.have))
        return min(wanted, most), f"load {metric:.2f} of a target of {self._target:.2f}"


class QueueDepth(Counting):
    """The rule that adds one replica while much waits, and takes one away when little has waited for 300
    s."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        super().__init__(settings)
        self._calm_since_s: dict[Role, float] = {}

    def _desired(self, role: Role, seen: Observation, kind: Traits) -> tuple[int, str]:
        state = seen.of(role)
        waiting = state.waiting_prompt_tokens + seen.queued_prompt_tokens
        wait_s = waiting / max(1, state.serving) * kind.costs.prompt_token_s
        depth, up, down = wait_s / (self._strictest("ttft_s") or 1.0), QUEUE_UP, QUEUE_DOWN
        if role is Role.DECODE:
            depth, up, down = max(state.held_share, self._decoding_share(state, kind)), FULL_UP, FULL_DOWN
        if depth > down:
            self._calm_since_s.pop(role, None)
        calm_s = seen.at_s - self._calm_since_s.setdefault(role, seen.at_s) if depth <= down else 0.0
        if depth > up and not state.starting:
            return state.have + 1, f"depth {depth:.3g}, above {up:g}"
        if calm_s >= QUEUE_DOWN_AFTER_S:
            self._calm_since_s[role] = seen.at_s
            return state.have - 1, f"depth {depth:.3g}, below {down:g} for {QUEUE_DOWN_AFTER_S:.0f} s"
        return state.have, ""
