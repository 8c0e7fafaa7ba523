"""What a store node counts, and its account of itself."""

import time
from collections.abc import Iterator

from baton.core.ids import WorkerId
from baton.core.store import BlocksReady, EndLoad, LoadBlocks, LoadFailed
from baton.telemetry import catalogue
from baton.telemetry.metric import Metric
from baton.telemetry.metrics import Meter
from kv_store.node import events as e
from kv_store.node.counts import NodeStats
from kv_transfer.read import ReadDone

LOADS_MAX = 65_536
"""Loads whose time is being taken, at most."""

Sample = tuple[Metric, float, dict[str, str]]


class StoreMetrics:
    """An observer of the driver; the rest is read from the core's status when somebody looks."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._totals_seen: dict[tuple[str, tuple[str, ...]], float] = {}
        self._paths: dict[int, str] = {}
        """The path of each operation under way."""
        self._loads: dict[tuple[WorkerId, int], tuple[float, int]] = {}
        """When each load was asked for, and how many blocks it has."""

    # --- observer ---------------------------------------------------------------------------------

    def on_event(self, event: e.NodeEvent) -> None:
        match event:
            case e.FromStoreClient(worker_id, LoadBlocks() as load) if len(self._loads) < LOADS_MAX:
                self._loads[worker_id, load.load_id] = (time.monotonic(), len(load.hashes))
            case e.FromStoreClient(worker_id, EndLoad(load_id)):
                self._loads.pop((worker_id, load_id), None)
            case e.StoreClientLost(worker_id):
                self._loads = {key: value for key, value in self._loads.items() if key[0] != worker_id}
            case e.IoDone(op_id):
                self._operation_ended(op_id, event.seconds)
            case ReadDone():
                self.meter.observe(catalogue.STORE_PATH, event.seconds, path="peer_read")
            case _:
                pass

    def on_action(self, action: e.NodeAction) -> None:
        match action:
            case e.ReadSsd(op_id):
                self._paths[op_id] = "ssd_read"
            case e.WriteSsd(op_id):
                self._paths[op_id] = "ssd_write"
            case e.ToStoreClient(worker_id, BlocksReady() as ready):
                self._ready(worker_id, ready)
            case e.ToStoreClient(worker_id, LoadFailed(load_id)):
                self._loads.pop((worker_id, load_id), None)
            case _:
                pass

    def _operation_ended(self, op_id: int, seconds: float) -> None:
        path = self._paths.pop(op_id, None)
        if path is not None:
            self.meter.observe(catalogue.STORE_PATH, seconds, path=path)

    def _ready(self, worker_id: WorkerId, ready: BlocksReady) -> None:
        key = (worker_id, ready.load_id)
        asked_s, count = self._loads.get(key, (0.0, 0))
        if count and ready.first + len(ready.slots) >= count:
            del self._loads[key]
            self.meter.observe(catalogue.STORE_LOAD, time.monotonic() - asked_s)

    # --- on demand --------------------------------------------------------------------------------

    def render(self, status: NodeStats) -> bytes:
        for metric, value, labels in gauges(status):
            self.meter.set(metric, value, **labels)
        for metric, value, labels in totals(status):
            key = (metric.name, tuple(labels.values()))
            self.meter.inc(metric, value - self._totals_seen.get(key, 0.0), **labels)
            self._totals_seen[key] = value
        return self.meter.render()


def gauges(status: NodeStats) -> Iterator[Sample]:
    for tier, facts in status.tiers.items():
        if facts.limit_bytes:
            yield catalogue.STORE_BLOCKS, facts.block_count, {"tier": tier}
            yield catalogue.STORE_BYTES, facts.bytes, {"tier": tier}
            yield catalogue.STORE_LIMIT_BYTES, facts.limit_bytes, {"tier": tier}
            yield catalogue.STORE_PINNED, facts.pinned_count, {"tier": tier}
    for path, speed in status.paths.items():
        if speed.block_count:
            yield catalogue.STORE_BANDWIDTH, 1 / max(speed.second_per_byte, 1e-15), {"path": path}
    yield catalogue.STORE_SESSIONS, status.worker_count, {"kind": "worker"}
    yield catalogue.STORE_SESSIONS, status.peer_count, {"kind": "peer"}


def totals(status: NodeStats) -> Iterator[Sample]:
    """Counters, as they have become."""
    yield catalogue.STORE_MISSES, status.miss_blocks, {}
    for tier, facts in status.tiers.items():
        yield catalogue.STORE_HITS, facts.hit_blocks, {"tier": tier}
        yield catalogue.STORE_STORED, facts.stored_blocks, {"tier": tier}
    for (tier, reason), count in status.dropped.items():
        yield catalogue.STORE_DROPPED, count, {"tier": tier, "reason": reason}
    for tier, count in status.loaded_blocks.items():
        yield catalogue.STORE_LOADED, count, {"tier": tier}
    for tier, count in status.loaded_bytes.items():
        yield catalogue.STORE_LOADED_BYTES, count, {"tier": tier}
    for tier, count in status.corrupt.items():
        yield catalogue.STORE_CORRUPT, count, {"tier": tier}
    for reason, count in status.refused.items():
        yield catalogue.STORE_REFUSED, count, {"reason": reason}
    for reason, count in status.loads_failed.items():
        yield catalogue.STORE_LOADS_FAILED, count, {"reason": reason}
    for path, speed in status.paths.items():
        yield catalogue.STORE_PATH_BYTES, speed.bytes, {"path": path}
    errors = {"read": status.ssd_read_errors, "write": status.ssd_write_errors, "full": status.ssd_full}
    for kind, count in errors.items():
        yield catalogue.STORE_IO_ERRORS, count, {"kind": kind}
    moved = {
        "fetched": status.fetched_bytes,
        "replicated": status.replicated_bytes,
        "served": status.served_bytes,
    }
    for kind, count in moved.items():
        yield catalogue.STORE_PEER_BYTES, count, {"kind": kind}


def accounts(status: NodeStats) -> dict[str, float]:
    """All numbers of the status by dotted name, for `baton store inspect` and tests."""
    found: dict[str, float] = {}
    for tier, facts in status.tiers.items():
        found |= {f"{tier}.{name}": getattr(facts, name) for name in facts.__struct_fields__}
    for path, speed in status.paths.items():
        found |= {f"{path}.{name}": getattr(speed, name) for name in speed.__struct_fields__}
    for (tier, reason), count in status.dropped.items():
        found[f"{tier}.dropped.{reason}"] = count
    for name in ("loaded_blocks", "loaded_bytes", "loads_failed", "refused", "corrupt"):
        found |= {f"{name}.{key}": value for key, value in getattr(status, name).items()}
    plain = {name: getattr(status, name) for name in status.__struct_fields__}
    return found | {name: float(value) for name, value in plain.items() if isinstance(value, int)}
