"""What the router says about itself: alive, ready, and with which workers. Pure."""

from typing import Any

import msgspec

from baton.core.messages import Role
from baton.telemetry.catalogue import (
    BREAKER_OPEN,
    BREAKERS_OPENED,
    DEGRADED,
    HEDGE_WASTE,
    HEDGES,
    IN_FLIGHT,
    INDEX_BYTES,
    INDEXED_BLOCKS,
    KNOWN_WORKERS,
    PEERS,
    PREDICTOR_BIAS,
    PREDICTOR_CHANGES,
    PREDICTOR_ERROR,
    PREDICTOR_EXCESS,
    PREDICTOR_FALLBACK,
    QUEUED,
    REFUSED_RETRIES,
    STALE,
)
from baton.telemetry.metrics import Meter
from router.setbacks import SetbackStatus
from router.status import RouterStatus, WorkerStatus

OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


def health(
    status: RouterStatus,
    *,
    model: str,
    is_draining: bool,
    directory: str,
    tenants: dict[str, str],
    may_sleep: bool = False,
) -> dict[str, Any]:
    """`status` is ok, degraded (served, but not as configured), asleep (see `is_asleep`) or unavailable."""
    sleeps = is_asleep(status, may_sleep=may_sleep, directory=directory)
    is_ready = (status.is_ready or sleeps) and not is_draining
    served = "asleep" if sleeps else "degraded" if status.is_degraded else "ok"
    return {
        "status": served if is_ready else "unavailable",
        "ready": is_ready,
        "draining": is_draining,
        "model": model,
        "degraded": {
            "prefill_pool_empty": status.is_prefill_pool_empty,
            "decode_pool_empty": status.is_decode_pool_empty,
            "fallback_in_use": status.is_fallback_in_use,
        },
        "predictor": _predictor(status),
        "directory": directory,
        "tenants": tenants,
        "peers": status.peer_count,
        "sequences": {"live": status.live, "queued": status.queued},
        "workers": {role.value: [_worker(w) for w in status.workers if w.role is role] for role in Role},
    }


def is_asleep(status: RouterStatus, *, may_sleep: bool, directory: str) -> bool:
    """There is no worker since none was needed, and the next request is held until one was started.
    `may_sleep`: the autoscaler stops idle workers to the last. Without the control plane none would wake."""
    return may_sleep and not status.workers and directory == "current"


def _predictor(status: RouterStatus) -> dict[str, Any]:
    predictor = status.predictor
    note = ""
    if predictor.is_in_use and not predictor.is_trusted:
        note = (
            f"predictions are {predictor.error:.0%} off, more than router.predictor_error_max: placement "
            "is by cached prefix until they are better"
        )
    return {
        "in_use": predictor.is_in_use,
        "trusted": predictor.is_trusted,
        "error": round(predictor.error, 4),
        "note": note,
    }


def _worker(worker: Any) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "address": worker.address,
        "draining": worker.is_draining,
        "stale": worker.is_stale,
        "breaker": worker.breaker,
        "breaker_because": worker.breaker_because,
        "suspended": worker.is_suspended,
        "in_flight": worker.in_flight_count,
        "in_flight_elsewhere": worker.elsewhere_count,
        "free_blocks": worker.free_blocks,
        "blocks": worker.block_count,
        "block_tokens": worker.block_tokens,
        "indexed_blocks": worker.indexed_blocks,
        "costs": None if worker.costs is None else msgspec.structs.asdict(worker.costs),
        "predictions": {
            "ttft_mape": round(worker.predictions.ttft_mape, 4),
            "tpot_mape": round(worker.predictions.tpot_mape, 4),
        },
    }


class StatusGauges:
    """Copies a status into gauges when somebody looks, and forgets workers that are gone."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._worker_ids: set[str] = set()
        self._counted = SetbackStatus()

    def update(self, status: RouterStatus, *, is_asleep: bool = False) -> None:
        meter = self._meter
        meter.set(QUEUED, status.queued)
        meter.set(PEERS, status.peer_count)
        meter.set(INDEX_BYTES, status.index_bytes)
        for role in Role:
            meter.set(KNOWN_WORKERS, sum(w.role is role for w in status.workers), role=role.value)
        meter.set(DEGRADED, status.is_prefill_pool_empty and not is_asleep, pool="prefill")
        meter.set(DEGRADED, status.is_decode_pool_empty and not is_asleep, pool="decode")
        predictor = status.predictor
        meter.set(PREDICTOR_FALLBACK, predictor.is_in_use and not predictor.is_trusted)
        meter.set(PREDICTOR_EXCESS, predictor.error)
        for worker in status.workers:
            self._set_worker(worker)
        self._count(status.setbacks)
        present = {str(worker.worker_id) for worker in status.workers}
        for gone in self._worker_ids - present:
            meter.forget(IN_FLIGHT, worker=gone)
            meter.forget(INDEXED_BLOCKS, worker=gone)
            meter.forget(BREAKER_OPEN, worker=gone)
            meter.forget(STALE, worker=gone)
            meter.forget(PREDICTOR_CHANGES, worker=gone)
            for what in ("ttft", "tpot"):
                meter.forget(PREDICTOR_ERROR, worker=gone, what=what)
                meter.forget(PREDICTOR_BIAS, worker=gone, what=what)
        self._worker_ids = present

    def _set_worker(self, worker: WorkerStatus) -> None:
        meter, name, errors = self._meter, worker.worker_id, worker.predictions
        meter.set(IN_FLIGHT, worker.in_flight_count, worker=name)
        meter.set(INDEXED_BLOCKS, worker.indexed_blocks, worker=name)
        meter.set(BREAKER_OPEN, OPENNESS[worker.breaker], worker=name)
        meter.set(STALE, worker.is_stale or not worker.is_index_known, worker=name)
        meter.set(PREDICTOR_CHANGES, errors.change_count, worker=name)
        if errors.ttft_count:
            meter.set(PREDICTOR_ERROR, errors.ttft_mape, worker=name, what="ttft")
            meter.set(PREDICTOR_BIAS, errors.ttft_bias, worker=name, what="ttft")
        if errors.tpot_count:
            meter.set(PREDICTOR_ERROR, errors.tpot_mape, worker=name, what="tpot")
            meter.set(PREDICTOR_BIAS, errors.tpot_bias, worker=name, what="tpot")

    def _count(self, now: SetbackStatus) -> None:
        """What was added since somebody looked last."""
        meter, before = self._meter, self._counted
        meter.inc(REFUSED_RETRIES, now.retries_refused - before.retries_refused)
        meter.inc(BREAKERS_OPENED, now.breakers_opened - before.breakers_opened)
        meter.inc(HEDGES, now.hedges - before.hedges, what="started")
        meter.inc(HEDGES, now.hedges_won - before.hedges_won, what="won")
        meter.inc(HEDGE_WASTE, now.hedge_wasted_tokens - before.hedge_wasted_tokens)
        self._counted = now
