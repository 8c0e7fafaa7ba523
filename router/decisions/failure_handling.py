"""How the router handles failing and late workers: circuit breakers, retry budgets, hedging. Pure.

`router.decisions.core` reports what happens. Nothing here places or ends a sequence.
"""

from collections.abc import Collection

import msgspec

from baton.config.router import RouterConfig
from baton.core.ids import WorkerId
from baton.core.messages import (
    FailureReason,
    LoadReport,
    Phase,
    RefusalReason,
    SequenceFailed,
    SequenceRefused,
)
from router.decisions.breaker import Breakers, slowness
from router.decisions.cluster.view import ClusterView
from router.decisions.cluster.worker import WorkerView
from router.decisions.flow import Flow
from router.decisions.hedging import Hedging
from router.decisions.migration import Departures
from router.decisions.placement.interface import Placement
from router.decisions.request_state import RequestState
from router.decisions.retry_budgets import WindowBudget


class FailureStatus(msgspec.Struct, frozen=True):
    """Totals since the start, unless a field says otherwise."""

    breakers_opened: int = 0
    retries_left: int = 0
    """Retries that the budget allows now."""
    retries_refused: int = 0
    hedges: int = 0
    hedges_won: int = 0
    hedge_wasted_tokens: int = 0
    """Upper bound of the prompt tokens that cancelled attempts computed in vain."""
    hedges_racing: int = 0
    """Sequences that have two attempts now."""


class FailureHandling:
    def __init__(self, config: RouterConfig, cluster: ClusterView) -> None:
        self._config = config
        self._cluster = cluster
        self.breakers = Breakers(config)
        self.retries = WindowBudget(share=config.retry_share, floor=config.retry_floor)
        self.hedging = Hedging(config)
        self.departures = Departures(migrate_after_s=config.migrate_after_s)

    def status(self) -> FailureStatus:
        hedging = self.hedging
        return FailureStatus(
            breakers_opened=self.breakers.opened_count,
            retries_left=self.retries.left,
            retries_refused=self.retries.refused_count,
            hedges=hedging.started_count,
            hedges_won=hedging.won_count,
            hedge_wasted_tokens=hedging.wasted_tokens,
            hedges_racing=hedging.racing_count,
        )

    def suspended(self, now_s: float) -> frozenset[WorkerId]:
        """Return the workers that get no new sequence now."""
        if not self.breakers.any_open:
            return frozenset()
        roles = {w.worker_id: w.facts.role for w in self._cluster if not w.facts.is_draining}
        return self.breakers.suspended(roles, now_s=now_s)

    def check(self) -> None:
        self.breakers.check()
        self.hedging.check()

    # --- what happens -----------------------------------------------------------------------------

    def started(self, flow: Flow, placement: Placement, *, is_first: bool, now_s: float) -> None:
        """Note that an attempt began."""
        for worker_id in placement.phases:
            self.breakers.placed(worker_id, flow.name, now_s=now_s)
        if is_first and not flow.is_backup:
            self.hedging.placed()
        delay_s = None if flow.generated or flow.is_backup else self.hedging.delay_s(placement.forecast)
        flow.hedge_at_s = float("inf") if delay_s is None else now_s + delay_s
        flow.placed_s = now_s

    def advanced(self, flow: Flow, worker_id: WorkerId, before: RequestState, *, now_s: float) -> None:
        """Note that a message of the worker took the sequence on from state `before`."""
        self.breakers.worked(worker_id, flow.name, now_s=now_s)
        if before is RequestState.PREFILLING and len(flow.generated) == 1:
            self.hedging.observe_first_token(now_s - flow.placed_s)
        if flow.state is RequestState.DONE:
            self.retries.earn(now_s)

    def answered(self, flow: Flow, *, now_s: float) -> None:
        """Note that the router is about to end the sequence, because its client has all that it wants."""
        if flow.state is RequestState.DECODING:
            for worker_id in flow.phases:
                self.breakers.worked(worker_id, flow.name, now_s=now_s)
        self.retries.earn(now_s)

    def is_planned(self, message: SequenceFailed, sources: Collection[WorkerId]) -> bool:
        """Whether the attempt failed because the worker that it read KV from is draining."""
        of_source = (FailureReason.SOURCE_LOST, FailureReason.SOURCE_REFUSED, FailureReason.TRANSFER)
        return message.reason in of_source and any(map(self._is_leaving, sources))

    def failed(
        self, worker: WorkerView, message: SequenceFailed, sources: Collection[WorkerId], now_s: float
    ) -> None:
        """Note that an attempt failed at the worker. `sources` are the workers that it read KV from."""
        if worker.is_leaving or self.is_planned(message, sources):
            return
        match message.reason:
            case FailureReason.INTERNAL:
                reason = f"internal: {message.message}"
                self.breakers.failed(worker.worker_id, reason, now_s=now_s, seq_id=message.seq_id)
            case FailureReason.TRANSFER:
                for worker_id in (worker.worker_id, *sources):
                    reason = f"transfer: {message.message}"
                    self.breakers.failed(worker_id, reason, now_s=now_s, seq_id=message.seq_id)
            case _:
                pass  # the fault is the source's, nobody's, or reported by the source itself

    def refused(self, worker: WorkerView, message: SequenceRefused, now_s: float) -> None:
        if message.reason is RefusalReason.NO_ROOM and not worker.is_leaving:
            reason = f"refused: {message.message}"
            self.breakers.failed(
                worker.worker_id, reason, now_s=now_s, seq_id=message.seq_id, is_refusal=True
            )

    def lost(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Note that the worker's session ended."""
        self.departures.lost(worker.worker_id)
        if not worker.is_leaving:
            self.breakers.failed(worker.worker_id, f"lost: {reason}", now_s=now_s)

    def reported(self, worker: WorkerView, report: LoadReport, now_s: float) -> None:
        slow = slowness(report.costs, worker.hello.costs)
        if slow is not None and not worker.is_blameless:
            role = worker.facts.role
            peers = (w.worker_id for w in self._cluster if w.facts.role is role)  # hardly ever looked at
            self.breakers.reported(worker.worker_id, slow, peers, now_s=now_s)

    def overdue(self, flow: Flow, now_s: float) -> None:
        """Note that the first token is overdue and a backup attempt began."""
        for worker_id, phase in flow.phases.items():
            if phase is not Phase.DECODE and not self._is_blameless(worker_id):
                reason = f"no first token within {now_s - flow.placed_s:.2f} s"
                self.breakers.failed(worker_id, reason, now_s=now_s, seq_id=flow.name)

    def _is_leaving(self, worker_id: WorkerId) -> bool:
        worker = self._cluster.get(worker_id)
        return worker is not None and worker.is_leaving

    def _is_blameless(self, worker_id: WorkerId) -> bool:
        worker = self._cluster.get(worker_id)
        return worker is not None and worker.is_blameless
