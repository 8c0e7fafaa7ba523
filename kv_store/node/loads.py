"""What the workers of this host load."""

from baton.core.store import (
    BlocksReady,
    EndLoad,
    LoadBlocks,
    LoadFailed,
    StoreToWorker,
    Tier,
)
from kv_store.node.context import LOADS_OPEN_MAX, Context
from kv_store.node.events import ToWorker
from kv_store.node.promotion import LATE, REASONS, Bringer, Demand
from kv_store.node.size_classes import HostCopy
from kv_store.node.workers import ProtocolError, Worker


class Loads:
    """Loads, from LoadBlocks to EndLoad or to the worker's end."""

    def __init__(self, context: Context, bringer: Bringer) -> None:
        self._context = context
        self._bringer = bringer
        self.is_draining = False
        """Blocks that are here can still be loaded; nothing is fetched."""

    def load(self, worker: Worker, load: LoadBlocks) -> StoreToWorker | None:
        """Start a load. An answer now is a refusal."""
        load_id = load.load_id
        if load_id in worker.loads:
            raise ProtocolError(f"load {load_id} twice")
        if len(set(load.hashes)) != len(load.hashes):
            raise ProtocolError(f"load {load_id} wants a block twice")
        limit_s = min(load.time_left_s, self._context.config.load_timeout_s)
        reason = ""
        if len(worker.loads) >= LOADS_OPEN_MAX:
            reason = "too many loads are open"
        elif not self._context.ends_later(limit_s):
            reason = LATE
        if reason:
            self._context.counts.loads_failed[reason] += 1
            return LoadFailed(load_id, 0, reason)

        def tell_ready(demand: Demand, first: int, copies: list[HostCopy], tiers: list[Tier]) -> None:
            self._ready(worker, load_id, demand, first, copies, tiers)

        def tell_failed(first: int, message: str) -> None:
            self._context.counts.loads_failed[message if message in REASONS else "source failed"] += 1
            self._context.emit(ToWorker(worker.worker_id, LoadFailed(load_id, first, message)))

        demand = Demand(
            space=worker.space,
            hashes=load.hashes,
            holder=worker.holder,
            deadline_s=self._context.now_s + limit_s,
            tell_ready=tell_ready,
            tell_failed=tell_failed,
            may_fetch=not self.is_draining,
        )
        worker.loads[load_id] = demand
        self._bringer.open(demand)
        return None

    def ended(self, worker: Worker, end: EndLoad) -> None:
        demand = worker.loads.pop(end.load_id, None)
        if demand is None:
            return
        for block_hash in end.corrupt:
            self._bringer.found_corrupt(demand, block_hash)
        self._bringer.end(demand)

    def worker_lost(self, worker: Worker) -> None:
        for demand in worker.loads.values():
            self._bringer.end(demand)
        worker.loads.clear()

    # --- parts ----------------------------------------------------------------------------------

    def _ready(
        self,
        worker: Worker,
        load_id: int,
        demand: Demand,
        first: int,
        copies: list[HostCopy],
        tiers: list[Tier],
    ) -> None:
        counts = self._context.counts
        for tier in tiers:
            counts.loaded_blocks[tier] += 1
            counts.loaded_bytes[tier] += demand.space.block_bytes
        if first + len(copies) == len(demand.hashes):
            counts.loads_done += 1
        ready = BlocksReady(
            load_id=load_id,
            first=first,
            slots=tuple(copy.slot for copy in copies),
            checksums=tuple(copy.checksum for copy in copies),
            tiers=tuple(tiers),
        )
        self._context.emit(ToWorker(worker.worker_id, ready))
