"""Full blocks come in from the workers of this host."""

from collections.abc import Callable

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, BlocksWritten, OfferBlocks, Place, StoreToWorker, TakeBlocks
from kv_store.node.context import HASHES_MAX, OFFERS_OPEN_MAX, Context
from kv_store.node.host_tier import HostTier, OverQuota, TierFull
from kv_store.node.index import Index
from kv_store.node.promotion import Promoter
from kv_store.node.quotas import Quotas
from kv_store.node.size_classes import HostCopy, is_checksum
from kv_store.node.workers import ProtocolError, StoreClientState, Write


class Writes:
    """Writes, from offer to `BlocksWritten` or to the worker's end. Until then the slots belong to the
    worker."""

    def __init__(
        self,
        context: Context,
        index: Index,
        host: HostTier,
        quotas: Quotas,
        promoter: Promoter,
        *,
        on_stored: Callable[[HostCopy], None],
    ) -> None:
        self._on_stored = on_stored
        self._context = context
        self._index = index
        self._host = host
        self._quotas = quotas
        self._promoter = promoter
        self._writing: dict[BlockHash, Write] = {}
        self.is_closed = False
        """The node is draining: nothing new is taken."""

    @property
    def open_count(self) -> int:
        return len(self._writing)

    def is_writing(self, block_hash: BlockHash) -> bool:
        return block_hash in self._writing

    def offered(self, worker: StoreClientState, offer: OfferBlocks) -> StoreToWorker:
        if len(offer.blocks) > HASHES_MAX:
            raise ProtocolError(f"an offer of {len(offer.blocks)} blocks; {HASHES_MAX} at most")
        if offer.offer_id in worker.offers:
            raise ProtocolError(f"offer {offer.offer_id} twice")
        writes: list[Write] = []
        places: list[Place] = []
        if self.is_closed or len(worker.offers) >= OFFERS_OPEN_MAX:
            reason = "draining" if self.is_closed else "too many offers"
            self._context.counts.refused[reason] += len(offer.blocks)
            return TakeBlocks(offer.offer_id, ())
        for i, facts in enumerate(offer.blocks):
            slot = self._take(worker, facts)
            if slot is not None:
                write = Write(facts, slot)
                self._writing[facts.block_hash] = write
                writes.append(write)
                places.append(Place(i, slot))
        if writes:
            worker.offers[offer.offer_id] = writes
        return TakeBlocks(offer.offer_id, tuple(places))

    def written(self, worker: StoreClientState, done: BlocksWritten) -> None:
        """Take in written blocks. An unknown offer is one of which nothing was taken."""
        writes = worker.offers.get(done.offer_id, [])
        if len(writes) != len(done.checksums):
            raise ProtocolError(f"{len(done.checksums)} checksums for {len(writes)} blocks written")
        if not all(checksum is None or is_checksum(checksum) for checksum in done.checksums):
            raise ProtocolError(f"checksums of offer {done.offer_id} that are none")
        worker.offers.pop(done.offer_id, None)
        for write, checksum in zip(writes, done.checksums, strict=True):
            self._end(worker, write)
            facts = write.facts
            is_here = self._index.host_copy(facts.block_hash) is not None
            if checksum is None or is_here or not self._index.may_be_of(facts.block_hash, worker.size_class):
                self._index.free_slot(worker.size_class, write.slot)
            else:
                self._on_stored(self._index.add_host(worker.size_class, facts, write.slot, checksum))

    def worker_lost(self, worker: StoreClientState) -> None:
        """End a worker's writes. Whatever is in its slots may be torn."""
        for writes in worker.offers.values():
            for write in writes:
                self._end(worker, write)
                self._index.free_slot(worker.size_class, write.slot)
        worker.offers.clear()

    # --- parts ----------------------------------------------------------------------------------

    def _take(self, worker: StoreClientState, facts: BlockFacts) -> int | None:
        """Take a slot for the block, or count the reason and return None."""
        reason = self._unwanted(worker, facts)
        if not reason:
            try:
                slot = self._host.take_slot(worker.size_class, facts.tenant)
            except OverQuota:
                reason = "quota"
            except TierFull:
                reason = "no room"
            else:
                self._quotas.begin_write(worker.holder, worker.size_class.slot_bytes)
                return slot
        self._context.counts.refused[reason] += 1
        return None

    def _unwanted(self, worker: StoreClientState, facts: BlockFacts) -> str:
        if self._index.host_copy(facts.block_hash) is not None:
            return "known"
        if facts.block_hash in self._writing:
            return "being written"
        if not self._index.may_be_of(facts.block_hash, worker.size_class):
            return "another size"
        slot_bytes, quotas = worker.size_class.slot_bytes, self._quotas
        if self._promoter.waiting_count and quotas.write_bytes + slot_bytes > quotas.limit_bytes // 8:
            return "loads wait"  # loads would never find room among a steady stream of writes
        return "" if self._quotas.fits(worker.holder, slot_bytes, slot_bytes) else "share"

    def _end(self, worker: StoreClientState, write: Write) -> None:
        del self._writing[write.facts.block_hash]
        self._quotas.end_write(worker.holder, worker.size_class.slot_bytes)
        self._index.was_freed = True
