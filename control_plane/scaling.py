"""The autoscaler's clock and hands: routers' reports in, orders out, an interval at a time."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from baton.config import Config
from baton.core.demand import DemandHeard, DemandReport
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import AutoscaleState, Decision, Order, Outcome, Resize
from baton.telemetry import catalogue
from baton.telemetry.metrics import Meter
from control_plane.autoscaler.live import LiveAutoscaler
from control_plane.autoscaler.settings import objectives_of, settings_of
from control_plane.autoscaler.values import Memory, Settings
from control_plane.desired import Operations

log = logging.getLogger(__name__)

REPORTS_PER_INTERVAL = 3
EVERY_S_MAX = 5.0
"""Between two reports of a router; also where nobody scales."""
AT_ZERO_S = 0.5
"""While there are no workers: a request that comes then waits for its report, too."""
REMEMBERED_EVERY_S = 60.0


class Remembering(Operations, Protocol):
    """`plane.ControlPlane`, as far as it matters here."""

    autoscale: AutoscaleState | None
    meter: Meter

    @property
    def memory(self) -> Memory | None: ...

    def remember(self, memory: Memory) -> None:
        """For the next life of the control plane."""
        ...


def scaled_roles(config: Config) -> set[Role]:
    """Raises SetupError where the autoscaler could not tell which role a request's load is for."""
    cluster = config.cluster
    has_pairs = bool(cluster.prefill_workers or cluster.decode_workers)
    if has_pairs and cluster.both_workers:
        raise SetupError(
            "autoscale.mode works with prefill and decode workers, or with those of role both alone: set "
            "cluster.both_workers=0, or autoscale.mode=off"
        )
    return {Role.PREFILL, Role.DECODE} if has_pairs else {Role.BOTH}


def live_settings(config: Config) -> Settings:
    """Raises SetupError."""
    return settings_of(
        config.autoscale,
        roles=scaled_roles(config),
        objectives=objectives_of(config.slo),
        hold_s=config.router.queue_wait_s,
        is_advice=config.autoscale.mode == "advise",
    )


class Scaling:
    """`baton.wire.demand.DemandHandler`; `run` where `autoscale.mode` is not off."""

    def __init__(
        self,
        settings: Settings | None,
        plane: Remembering,
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` None: reports are heard, and nothing is decided."""
        self._plane, self._clock = plane, clock
        self._wake = asyncio.Event()
        self._remembered_s = clock()
        self._blind, self._is_blind_told = "", False
        self._live: LiveAutoscaler | None = None
        if settings is not None:
            self._live = LiveAutoscaler(settings, model=model, now_s=clock())

    @property
    def is_on(self) -> bool:
        return self._live is not None

    def report(self, report: DemandReport) -> DemandHeard:
        live = self._live
        if live is None:
            return DemandHeard(EVERY_S_MAX)
        live.heard(report, now_s=self._clock())
        if not live.is_at_zero(self._plane.state()):
            return DemandHeard(min(EVERY_S_MAX, live.settings.interval_s / REPORTS_PER_INTERVAL))
        if report.queued and not live.settings.is_advice:
            self._wake.set()
        return DemandHeard(AT_ZERO_S)

    async def run(self) -> None:
        """Until cancelled."""
        live = self._live
        assert live is not None, "autoscale.mode is off"
        if (memory := self._plane.memory) is not None:
            away_s = max(0.0, time.time() - memory.saved_at_s)
            live.recall(memory, now_s=self._clock(), away_s=away_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(live))
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(live.settings.interval_s):
                        await self._wake.wait()
                self._wake.clear()
                self.look()

    async def _follow(self, live: LiveAutoscaler) -> None:
        """Phases of replicas, as they change."""
        async for state in self._plane.changes():
            live.saw(state, now_s=self._clock())

    def look(self) -> Decision | None:
        """One interval is over. What was ordered or advised, if anything was."""
        live, plane, now_s = self._live, self._plane, self._clock()
        assert live is not None
        state = plane.state()
        live.saw(state, now_s=now_s)
        order = live.decide(state, now_s=now_s)
        decision = plane.order(order) if order is not None else None
        plane.autoscale = live.state()
        self._tell_blindness(plane.autoscale.text)
        self._count(plane.autoscale, order, decision)
        if now_s - self._remembered_s >= REMEMBERED_EVERY_S or decision is not None:
            self._remembered_s = now_s
            memory = live.memory(now_s=now_s)
            plane.remember(msgspec.structs.replace(memory, saved_at_s=time.time()))
        return decision

    def _tell_blindness(self, text: str) -> None:
        """Once, when it lasts: routers come and go."""
        if text and text == self._blind and not self._is_blind_told:
            log.warning("the autoscaler decides nothing: %s", text)
        self._is_blind_told = bool(text) and text == self._blind
        self._blind = text

    def _count(self, state: AutoscaleState, order: Order | None, decision: Decision | None) -> None:
        meter = self._plane.meter
        meter.inc(catalogue.AUTOSCALE_LOOKS, outcome="blind" if state.text else "decided")
        for one in state.roles:
            meter.set(catalogue.AUTOSCALE_NEEDED, one.needed, role=one.role)
            meter.set(catalogue.AUTOSCALE_WANTED, one.wanted, role=one.role)
            meter.set(catalogue.AUTOSCALE_CORRECTION, one.correction, role=one.role)
        if order is None or decision is None or not isinstance(order.action, Resize):
            return
        # What was accepted may be done already.
        kinds = {Outcome.ADVISED: "advised", Outcome.REFUSED: "refused"}
        meter.inc(catalogue.AUTOSCALE_DECISIONS, kind=kinds.get(decision.outcome, "ordered"))
