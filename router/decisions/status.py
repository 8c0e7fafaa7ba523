"""The status of the router and of its workers at one moment. Pure."""

from collections.abc import Container

import msgspec

from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.ids import WorkerId
from baton.core.messages import Role
from router.decisions.cluster.snapshot import pairable_fingerprints
from router.decisions.cluster.worker import WorkerView
from router.decisions.failure_handling import FailureHandling, FailureStatus
from router.decisions.placing import Placing
from router.decisions.prediction.status import PredictionErrors, PredictorStatus


class WorkerStatus(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    role: Role
    address: str
    model: str
    fingerprint: str
    is_draining: bool
    is_stale: bool
    """True if no load report came for longer than `worker_silence_s`, so that the worker is assumed busy."""
    in_flight_count: int
    """Sequences of this router that have a phase there."""
    elsewhere_count: int
    """Sequences of other routers there that its reports need not show yet."""
    in_flight_tokens: int
    """Prompt tokens sent there and not computed yet."""
    load: float
    free_blocks: int
    block_count: int
    indexed_blocks: int
    """Blocks of its prefix cache that this router knows."""
    is_index_known: bool
    """False until a snapshot of its prefix cache has come."""
    predictions: PredictionErrors
    """Errors of predictions for what was placed there."""
    block_tokens: int
    costs: StepCosts | None
    """The step costs that the worker reports."""
    breaker: str = "closed"
    """closed | open | half_open, see `router.decisions.breaker`."""
    breaker_reason: str = ""
    is_suspended: bool = False
    """True if the worker gets no new sequence now, because its breaker is open and its pool has others."""
    is_parked: bool = False
    """True if the worker waits for expert ranks, and gets no new sequence until they are back."""


class RouterStatus(msgspec.Struct, frozen=True):
    queued: int
    """Sequences that wait for placement, including those in back-off between two attempts."""
    live: int
    workers: tuple[WorkerStatus, ...]
    is_ready: bool
    """True if a sequence that arrives now can be placed as soon as there is room."""
    is_prefill_pool_empty: bool
    is_decode_pool_empty: bool
    is_fallback_in_use: bool
    """True if no pair of workers is possible, so that both phases run on one worker instead."""
    predictor: PredictorStatus
    peer_count: int = 0
    """Other routers whose work counts here."""
    index_bytes: int = 0
    """Memory of the prefix index."""
    failure_handling: FailureStatus = FailureStatus()

    @property
    def is_degraded(self) -> bool:
        return self.is_prefill_pool_empty or self.is_decode_pool_empty or self.is_fallback_in_use


def router_status(
    placing: Placing,
    failure_handling: FailureHandling,
    config: RouterConfig,
    *,
    queued: int,
    live: int,
    now_s: float,
) -> RouterStatus:
    usable = placing.cluster.snapshot(now_s).pools.usable
    wants_pairs = config.disaggregate
    lacks_pairs = wants_pairs and not pairable_fingerprints(usable)
    may_fall_back = config.fallback_to_other_pool
    suspended = failure_handling.suspended(now_s)
    return RouterStatus(
        queued=queued,
        live=live,
        workers=tuple(_worker(w, placing, failure_handling, suspended, now_s) for w in placing.cluster),
        is_ready=bool(usable) and (not lacks_pairs or may_fall_back),
        is_prefill_pool_empty=not any(w.facts.role.prefills or not wants_pairs for w in usable),
        is_decode_pool_empty=not any(w.facts.role.decodes or not wants_pairs for w in usable),
        is_fallback_in_use=lacks_pairs and may_fall_back and bool(usable),
        predictor=placing.predictor_status(),
        peer_count=placing.peers.count,
        index_bytes=placing.index.byte_count,
        failure_handling=failure_handling.status(),
    )


def _worker(
    worker: WorkerView,
    placing: Placing,
    failure_handling: FailureHandling,
    suspended: Container[WorkerId],
    now_s: float,
) -> WorkerStatus:
    worker_id, hello = worker.worker_id, worker.hello
    breaker = failure_handling.breakers.state(worker_id, now_s=now_s)
    return WorkerStatus(
        worker_id=worker_id,
        role=worker.facts.role,
        address=worker.address,
        model=hello.model,
        fingerprint=hello.fingerprint,
        is_draining=worker.facts.is_draining,
        is_stale=placing.cluster.is_stale(worker, now_s),
        in_flight_count=worker.load.in_flight.sequences,
        elsewhere_count=worker.load.elsewhere.sequences,
        in_flight_tokens=worker.load.in_flight.tokens,
        load=worker.load.load_tokens,
        free_blocks=max(0, worker.load.free_blocks),
        block_count=hello.block_count,
        indexed_blocks=placing.index.block_count(worker_id),
        is_index_known=placing.index.is_known(worker_id),
        predictions=PredictionErrors.of(placing.predictor.corrections_of(worker_id)),
        block_tokens=hello.block_tokens,
        costs=worker.prediction.costs if worker.prediction.are_costs_measured else None,
        breaker=str(breaker.state),
        breaker_reason=breaker.reason,
        is_suspended=worker_id in suspended,
        is_parked=worker.is_parked,
    )
