"""The IO of the autoscaler: its clock, the routers' reports, and its orders, once per interval."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from baton.config import Config
from baton.config.served_models import device_ranks, each_model
from baton.core.demand import DemandReply, DemandReport
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import AutoscaleState, ClusterState, Decision, Order, Outcome, Pool, Resize
from baton.telemetry import catalogue
from baton.telemetry.metrics import Meter
from control_plane.autoscaler.live import LiveAutoscaler
from control_plane.autoscaler.settings import objectives_of, settings_of
from control_plane.autoscaler.values import AutoscalerMemory, AutoscalerSettings
from control_plane.desired import Operations

log = logging.getLogger(__name__)

REPORTS_PER_INTERVAL = 3
EVERY_S_MAX = 5.0
"""Longest time between two reports of a router, also without an autoscaler."""
AT_ZERO_S = 0.5
"""Time between two reports while there are no workers: a request that arrives then waits for its report
too."""
REMEMBERED_EVERY_S = 60.0


RanksOf = Callable[[Pool], Mapping[Role, int]]


class Remembering(Operations, Protocol):
    """The part of `plane.ControlPlane` that is used here."""

    autoscale: tuple[AutoscaleState, ...]
    meter: Meter

    @property
    def memories(self) -> Mapping[str, AutoscalerMemory]: ...

    def remember(self, memories: Mapping[str, AutoscalerMemory]) -> None:
        """Keep the memories for the next control plane."""
        ...


def scaled_roles(config: Config) -> set[Role]:
    """Return the roles of one model that are scaled. Raises SetupError where the autoscaler could not tell
    which role a request loads."""
    cluster = config.cluster
    has_pairs = bool(cluster.prefill_workers or cluster.decode_workers)
    if has_pairs and cluster.aggregated_workers:
        raise SetupError(
            "autoscale.mode works with prefill and decode workers, or with aggregated workers alone: set "
            "cluster.aggregated_workers=0, or autoscale.mode=off"
        )
    return {Role.PREFILL, Role.DECODE} if has_pairs else {Role.AGGREGATED}


def live_settings(config: Config) -> dict[str, AutoscalerSettings]:
    """Return the settings by model; empty without an autoscaler. Raises SetupError."""
    if config.autoscale.mode == "off":
        return {}
    return {
        name: settings_of(
            one.autoscale,
            roles=scaled_roles(one),
            objectives=objectives_of(one.slo),
            hold_s=one.router.queue_wait_s,
            is_advice=one.autoscale.mode == "advise",
            ranks={role: device_ranks(one, role) for role in Role},
            expert_ranks=dict.fromkeys(Role, one.experts.ranks) if one.experts.parallel == "ranks" else {},
        )
        for name, one in each_model(config).items()
    }


class _ScaledModel:
    """One model's autoscaler, and whether its missing reports were logged."""

    def __init__(self, live: LiveAutoscaler) -> None:
        self.live = live
        self.ranks_max = live.settings.ranks_max
        """Limit of this model alone; 0: none."""
        self._blind, self._is_logged = "", False

    def log_blindness(self, text: str) -> None:
        """Log once that reports are missing, and only if it lasts: routers come and go."""
        if text and text == self._blind and not self._is_logged:
            log.warning("autoscaler of %s decides nothing: %s", self.live.model, text)
        self._is_logged = bool(text) and text == self._blind
        self._blind = text


class AutoscalerRunner:
    """The autoscalers of all models. It implements `baton.wire.demand.DemandHandler`; call `run` where
    `autoscale.mode` is not off. Each model is scaled by itself, at the same times."""

    def __init__(
        self,
        settings: Mapping[str, AutoscalerSettings],
        plane: Remembering,
        *,
        ranks_max: int = 0,
        ranks_of: RanksOf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` are by model; if they are empty, reports are accepted and nothing is decided.
        `ranks_max` limits several models together; 0 means no limit. `ranks_of` tells the ranks of one worker
        of each role in the version that a pool wants; without it they are those of the settings."""

        def configured(pool: Pool) -> Mapping[Role, int]:
            return settings[pool.model].ranks if pool.model in settings else {}

        self._ranks_of = ranks_of or configured
        self._plane, self._clock = plane, clock
        self._wake = asyncio.Event()
        self._remembered_s = clock()
        self._ranks_max = ranks_max if len(settings) > 1 else 0
        self._models = deque(
            _ScaledModel(LiveAutoscaler(one, model=name, now_s=clock())) for name, one in settings.items()
        )

    @property
    def is_on(self) -> bool:
        return bool(self._models)

    def _of(self, model: str) -> LiveAutoscaler | None:
        is_only = not model and len(self._models) == 1
        return next((one.live for one in self._models if is_only or one.live.model == model), None)

    def report(self, report: DemandReport) -> DemandReply:
        live = self._of(report.model)
        if live is None:
            return DemandReply(EVERY_S_MAX)
        live.on_report(report, now_s=self._clock())
        if not live.is_at_zero(self._plane.state()):
            return DemandReply(min(EVERY_S_MAX, live.settings.interval_s / REPORTS_PER_INTERVAL))
        if report.queued and not live.settings.is_advice:
            self._wake.set()
        return DemandReply(AT_ZERO_S)

    async def run(self) -> None:
        """Run until cancelled."""
        assert self._models, "autoscale.mode is off"
        for one in self._models:
            if (memory := self._plane.memories.get(one.live.model)) is not None:
                away_s = max(0.0, time.time() - memory.saved_at_s)
                one.live.recall(memory, now_s=self._clock(), away_s=away_s)
        interval_s = self._models[0].live.settings.interval_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._wake.wait()
                self._wake.clear()
                self.look()

    async def _follow(self) -> None:
        """Follow the states of replicas as they change."""
        async for state in self._plane.changes():
            for one in self._models:
                one.live.on_state(state, now_s=self._clock())

    def look(self) -> list[Decision]:
        """End one interval, and return the decisions on what was ordered or advised. The models take turns in
        going first, so that no model is always the last to get workers where the limit is short."""
        decisions = [decision for one in self._models if (decision := self._decide(one)) is not None]
        self._plane.autoscale = tuple(
            sorted((one.live.state() for one in self._models), key=lambda state: state.model)
        )
        self._models.rotate(-1)
        now_s = self._clock()
        if now_s - self._remembered_s >= REMEMBERED_EVERY_S or decisions:
            self._remembered_s = now_s
            self._plane.remember({one.live.model: self._memory(one.live, now_s) for one in self._models})
        return decisions

    def _memory(self, live: LiveAutoscaler, now_s: float) -> AutoscalerMemory:
        return msgspec.structs.replace(live.memory(now_s=now_s), saved_at_s=time.time())

    def _decide(self, one: _ScaledModel) -> Decision | None:
        live, plane, now_s = one.live, self._plane, self._clock()
        state = plane.state()
        live.on_state(state, now_s=now_s)
        if (pool := state.pool(live.model)) is not None:
            live.cost_ranks(self._ranks_of(pool), state.experts)
        if self._ranks_max:
            live.limit(room_for(live.model, state, self._ranks_max, own_max=one.ranks_max, cost=self._cost))
        order = live.decide(state, now_s=now_s)
        decision = plane.order(order) if order is not None else None
        after = live.state()
        one.log_blindness(after.text)
        self._count(after, order, decision)
        return decision

    def _cost(self, pool: Pool) -> int:
        """Return the ranks of a pool's workers, and those that hold their experts apart from them."""
        live, ranks = self._of(pool.model), self._ranks_of(pool)
        settings = live.scaler.settings if live is not None else AutoscalerSettings({}, {})
        return msgspec.structs.replace(settings, ranks=ranks).cost(pool.counts)

    def _count(self, state: AutoscaleState, order: Order | None, decision: Decision | None) -> None:
        meter, model = self._plane.meter, state.model
        meter.inc(catalogue.AUTOSCALE_LOOKS, model=model, outcome="blind" if state.text else "decided")
        for one in state.roles:
            meter.set(catalogue.AUTOSCALE_NEEDED, one.needed, model=model, role=one.role)
            meter.set(catalogue.AUTOSCALE_WANTED, one.wanted, model=model, role=one.role)
            meter.set(catalogue.AUTOSCALE_CORRECTION, one.correction, model=model, role=one.role)
        if order is None or decision is None or not isinstance(order.action, Resize):
            return
        # An accepted order may have been finished already.
        kinds = {Outcome.ADVISED: "advised", Outcome.REFUSED: "refused"}
        meter.inc(catalogue.AUTOSCALE_DECISIONS, model=model, kind=kinds.get(decision.outcome, "ordered"))


def room_for(
    model: str, state: ClusterState, ranks_max: int, *, own_max: int, cost: Callable[[Pool], int]
) -> int:
    """Return the number of ranks that a model may have of `ranks_max` for all: those the others leave, and at
    most `own_max` (0: any). Pure. It is at least one, since the model's own minima and one worker per used
    role are kept in any case."""
    others = sum(cost(pool) for pool in state.pools if pool.model != model)
    room = max(1, ranks_max - others)
    return min(room, own_max) if own_max else room
