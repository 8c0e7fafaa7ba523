"""What the router says about itself: alive, ready, and with which workers. Pure."""

from typing import Any

from baton.core.messages import Role
from baton.telemetry.catalogue import DEGRADED, IN_FLIGHT, INDEXED_BLOCKS, KNOWN_WORKERS, QUEUED
from baton.telemetry.metrics import Meter
from router.core import RouterStatus


def health(status: RouterStatus, *, model: str, is_draining: bool, directory: str) -> dict[str, Any]:
    """`status` is ok, degraded (served, but not as configured) or unavailable."""
    is_ready = status.is_ready and not is_draining
    return {
        "status": "unavailable" if not is_ready else "degraded" if status.is_degraded else "ok",
        "ready": is_ready,
        "draining": is_draining,
        "model": model,
        "degraded": {
            "prefill_pool_empty": status.is_prefill_pool_empty,
            "decode_pool_empty": status.is_decode_pool_empty,
            "fallback_in_use": status.is_fallback_in_use,
        },
        "directory": directory,
        "sequences": {"live": status.live, "queued": status.queued},
        "workers": {role.value: [_worker(w) for w in status.workers if w.role is role] for role in Role},
    }


def _worker(worker: Any) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "address": worker.address,
        "draining": worker.is_draining,
        "stale": worker.is_stale,
        "in_flight": worker.in_flight_count,
        "free_blocks": worker.free_blocks,
        "blocks": worker.block_count,
        "indexed_blocks": worker.indexed_blocks,
    }


class StatusGauges:
    """Copies a status into gauges when somebody looks, and forgets workers that are gone."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._worker_ids: set[str] = set()

    def update(self, status: RouterStatus) -> None:
        meter = self._meter
        meter.set(QUEUED, status.queued)
        for role in Role:
            meter.set(KNOWN_WORKERS, sum(w.role is role for w in status.workers), role=role.value)
        meter.set(DEGRADED, status.is_prefill_pool_empty, pool="prefill")
        meter.set(DEGRADED, status.is_decode_pool_empty, pool="decode")
        for worker in status.workers:
            meter.set(IN_FLIGHT, worker.in_flight_count, worker=worker.worker_id)
            meter.set(INDEXED_BLOCKS, worker.indexed_blocks, worker=worker.worker_id)
        present = {str(worker.worker_id) for worker in status.workers}
        for gone in self._worker_ids - present:
            meter.forget(IN_FLIGHT, worker=gone)
            meter.forget(INDEXED_BLOCKS, worker=gone)
        self._worker_ids = present
