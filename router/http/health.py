"""The router's report on itself: whether it is alive and ready, and with which workers. Pure."""

from collections.abc import Sequence
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
    PREDICTOR_HELD,
    QUEUED,
    REFUSED_RETRIES,
    STALE,
)
from baton.telemetry.metrics import Meter
from router.decisions.failure_handling import FailureStatus
from router.decisions.status import RouterStatus, WorkerStatus

OPENNESS = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


class ModelHealth(msgspec.Struct, frozen=True):
    """The status of one model on this router."""

    model: str
    status: RouterStatus
    may_sleep: bool = False
    """The autoscaler may stop all workers of the model, see `is_asleep`."""


class RouterFacts(msgspec.Struct, frozen=True):
    """Facts that all models of a router share."""

    is_draining: bool
    directory: str
    """State of the directory: current, away or none."""
    tenants: dict[str, str] = {}


def health(models: Sequence[ModelHealth], facts: RouterFacts) -> dict[str, Any]:
    """Return the body of /health.

    `status` is ok, degraded (not served as configured, or only some of several models are served), asleep
    (see `is_asleep`) or unavailable. The router is ready if at least one model is served; `models` says
    which.
    """
    reports = {one.model: _model(one, facts) for one in models}
    is_ready = any(one["ready"] for one in reports.values())
    statuses = [one["status"] for one in reports.values()]
    degraded = [one["degraded"] for one in reports.values()]
    return {
        "status": _together(statuses),
        "ready": is_ready,
        "draining": facts.is_draining,
        "model": models[0].model if len(models) == 1 else "",
        "models": reports,
        "degraded": {name: any(one[name] for one in degraded) for name in degraded[0]},
        "predictor": max((one["predictor"] for one in reports.values()), key=lambda one: one["error"]),
        "directory": facts.directory,
        "tenants": facts.tenants,
        "peers": models[0].status.peer_count,
        "sequences": {
            "live": sum(one.status.live for one in models),
            "queued": sum(one.status.queued for one in models),
        },
        "workers": {
            role.value: [
                _worker(worker) for one in models for worker in one.status.workers if worker.role is role
            ]
            for role in Role
        },
    }


def _together(statuses: Sequence[str]) -> str:
    if len(set(statuses)) == 1:
        return statuses[0]
    served = set(statuses) - {"unavailable"}
    return "ok" if served == {"ok", "asleep"} and "unavailable" not in statuses else "degraded"


def _model(one: ModelHealth, facts: RouterFacts) -> dict[str, Any]:
    status = one.status
    sleeps = is_asleep(status, may_sleep=one.may_sleep, directory=facts.directory)
    is_ready = (status.is_ready or sleeps) and not facts.is_draining
    served = "asleep" if sleeps else "degraded" if status.is_degraded else "ok"
    return {
        "status": served if is_ready else "unavailable",
        "ready": is_ready,
        "degraded": {
            "prefill_pool_empty": status.is_prefill_pool_empty,
            "decode_pool_empty": status.is_decode_pool_empty,
            "fallback_in_use": status.is_fallback_in_use,
        },
        "predictor": _predictor(status),
        "sequences": {"live": status.live, "queued": status.queued},
        "workers": {role.value: sum(w.role is role for w in status.workers) for role in Role},
    }


def is_asleep(status: RouterStatus, *, may_sleep: bool, directory: str) -> bool:
    """Return whether the model has no worker because none was needed. The next request is then held until one
    was started. `may_sleep` says that the autoscaler stops idle workers to the last. Without the control
    plane nothing would wake the model."""
    return may_sleep and not status.workers and directory == "current"


def _predictor(status: RouterStatus) -> dict[str, Any]:
    predictor = status.predictor
    note = ""
    if predictor.is_in_use and not predictor.is_trusted:
        note = (
            f"predictions are {predictor.error:.0%} off and say no more than a constant would, see "
            "router.predictor_error_max: placement is by cached prefix until they are better"
        )
    return {
        "in_use": predictor.is_in_use,
        "trusted": predictor.is_trusted,
        "error": round(predictor.error, 4),
        "note": note,
        "calibration": [
            {
                "slo_class": one.slo_class,
                "ttft_count": one.ttft_count,
                "ttft_p90_held": round(one.ttft_held, 4),
                "tpot_count": one.tpot_count,
                "tpot_p90_held": round(one.tpot_held, 4),
            }
            for one in predictor.calibration
        ],
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "model": worker.model,
        "address": worker.address,
        "draining": worker.is_draining,
        "stale": worker.is_stale,
        "breaker": worker.breaker,
        "breaker_reason": worker.breaker_reason,
        "suspended": worker.is_suspended,
        "parked": worker.is_parked,
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
    """Gauges of a model's status. They are updated when somebody reads them, and workers that are gone are
    removed."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._meter, self._model = meter, model
        self._worker_ids: set[str] = set()
        self._counted = FailureStatus()

    def update(self, status: RouterStatus, *, is_asleep: bool = False) -> None:
        meter, model = self._meter, self._model
        meter.set(QUEUED, status.queued, model=model)
        meter.set(PEERS, status.peer_count)
        meter.set(INDEX_BYTES, status.index_bytes, model=model)
        for role in Role:
            count = sum(w.role is role for w in status.workers)
            meter.set(KNOWN_WORKERS, count, model=model, role=role.value)
        meter.set(DEGRADED, status.is_prefill_pool_empty and not is_asleep, model=model, pool="prefill")
        meter.set(DEGRADED, status.is_decode_pool_empty and not is_asleep, model=model, pool="decode")
        predictor = status.predictor
        meter.set(PREDICTOR_FALLBACK, predictor.is_in_use and not predictor.is_trusted, model=model)
        meter.set(PREDICTOR_EXCESS, predictor.error, model=model)
        for one in predictor.calibration:
            name = one.slo_class or "default"
            if one.ttft_count:
                meter.set(PREDICTOR_HELD, one.ttft_held, model=model, slo_class=name, what="ttft")
            if one.tpot_count:
                meter.set(PREDICTOR_HELD, one.tpot_held, model=model, slo_class=name, what="tpot")
        for worker in status.workers:
            self._set_worker(worker)
        self._count(status.failure_handling)
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

    def _count(self, now: FailureStatus) -> None:
        """Add to the counters what happened since the last update."""
        meter, before, model = self._meter, self._counted, self._model
        meter.inc(REFUSED_RETRIES, now.retries_refused - before.retries_refused, model=model)
        meter.inc(BREAKERS_OPENED, now.breakers_opened - before.breakers_opened, model=model)
        meter.inc(HEDGES, now.hedges - before.hedges, model=model, what="started")
        meter.inc(HEDGES, now.hedges_won - before.hedges_won, model=model, what="won")
        meter.inc(HEDGE_WASTE, now.hedge_wasted_tokens - before.hedge_wasted_tokens, model=model)
        self._counted = now
