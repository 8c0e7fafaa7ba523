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
from kv_store.node.events import ToStoreClient
from kv_store.node.promotion import LATE, REASONS, Promoter, PromotionRequest
from kv_store.node.size_classes import HostCopy
from kv_store.node.workers import ProtocolError, StoreClientState


class Loads:
    """Loads, from LoadBlocks to EndLoad or to the worker's end."""

    def __init__(self, context: Context, promoter: Promoter) -> None:
        self._context = context
        self._promoter = promoter
        self.is_draining = False
        """Blocks that are here can still be loaded; nothing is fetched."""

    def load(self, worker: StoreClientState, load: LoadBlocks) -> StoreToWorker | None:
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

        def report_ready(
            request: PromotionRequest, first: int, copies: list[HostCopy], tiers: list[Tier]
        ) -> None:
            self._ready(worker, load_id, request, first, copies, tiers)

        def report_failed(first: int, message: str) -> None:
            self._context.counts.loads_failed[message if message in REASONS else "source failed"] += 1
            self._context.emit(ToStoreClient(worker.worker_id, LoadFailed(load_id, first, message)))

        request = PromotionRequest(
            size_class=worker.size_class,
            hashes=load.hashes,
            holder=worker.holder,
            deadline_s=self._context.now_s + limit_s,
            report_ready=report_ready,
            report_failed=report_failed,
            may_fetch=not self.is_draining,
        )
        worker.loads[load_id] = request
        self._promoter.open(request)
        return None

    def ended(self, worker: StoreClientState, end: EndLoad) -> None:
        request = worker.loads.pop(end.load_id, None)
        if request is None:
            return
        for block_hash in end.corrupt:
            self._promoter.found_corrupt(request, block_hash)
        self._promoter.end(request)

    def worker_lost(self, worker: StoreClientState) -> None:
        for request in worker.loads.values():
            self._promoter.end(request)
        worker.loads.clear()

    # --- parts ----------------------------------------------------------------------------------

    def _ready(
        self,
        worker: StoreClientState,
        load_id: int,
        request: PromotionRequest,
        first: int,
        copies: list[HostCopy],
        tiers: list[Tier],
    ) -> None:
        counts = self._context.counts
        for tier in tiers:
            counts.loaded_blocks[tier] += 1
            counts.loaded_bytes[tier] += request.size_class.block_bytes
        if first + len(copies) == len(request.hashes):
            counts.loads_done += 1
        ready = BlocksReady(
            load_id=load_id,
            first=first,
            slots=tuple(copy.slot for copy in copies),
            checksums=tuple(copy.checksum for copy in copies),
            tiers=tuple(tiers),
        )
        self._context.emit(ToStoreClient(worker.worker_id, ready))
