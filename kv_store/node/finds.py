"""Look-ups of workers, answered with where blocks are and what each path would take."""

from dataclasses import dataclass

from baton.core.ids import BlockHash
from baton.core.store import FindBlocks, FoundBlocks, FoundSpan, Tier
from kv_store.node.context import Context
from kv_store.node.events import ToStoreClient
from kv_store.node.index import Index
from kv_store.node.lookups import Lookups
from kv_store.node.peers import PeerFetches
from kv_store.node.promotion import Promoter
from kv_store.node.size_classes import BlockEntry, SizeClass
from kv_store.node.ssd import SsdTier
from kv_store.node.workers import StoreClientState


@dataclass(slots=True, eq=False)
class _Find:
    worker: StoreClientState
    find: FindBlocks
    is_answered: bool = False


class Finds:
    """Answers look-ups. Each is a use of its whole chain, and is answered at once or after one look-up in the
    directory."""

    def __init__(
        self,
        context: Context,
        index: Index,
        promoter: Promoter,
        lookups: Lookups,
        ssd: SsdTier,
        peers: PeerFetches,
    ) -> None:
        self._context = context
        self._index = index
        self._promoter = promoter
        self._lookups = lookups
        self._ssd = ssd
        self._peers = peers

    def find(self, worker: StoreClientState, find: FindBlocks) -> None:
        size_class = worker.size_class
        known = [self._index.get(block_hash, size_class) for block_hash in find.hashes]
        entries = [entry for entry in known if entry is not None]
        size_class.host_policy.expect(find.hashes, now_s=self._context.now_s)
        size_class.ssd_policy.expect(find.hashes, now_s=self._context.now_s)
        self._index.touch(entries)
        self._ssd.hit(entries)
        held = min(max(find.held_count, 0), len(find.hashes))
        missing = [h for h, entry in zip(find.hashes[held:], known[held:], strict=True) if entry is None]
        self._lookups.observe(missing)
        pending = _Find(worker, find)
        if not missing or not self._lookups.look_up(missing, lambda: self._answer(pending)):
            self._answer(pending)

    def _answer(self, pending: _Find) -> None:
        """Answer with the state of now: what was there at the question may have left."""
        worker, find = pending.worker, pending.find
        size_class = worker.size_class
        if pending.is_answered or worker.is_gone:
            return
        pending.is_answered = True
        spans: list[FoundSpan] = []
        held = min(max(find.held_count, 0), len(find.hashes))
        end = held
        for block_hash in find.hashes[held:]:
            found = self._where(block_hash, size_class)
            if found is None:
                break
            end += 1
            if spans and spans[-1].tier is found:
                spans[-1] = _longer(spans[-1])
            else:
                spans.append(self._span(found, size_class))
        self._count(spans, missed=len(find.hashes) - end, block_bytes=size_class.block_bytes)
        self._context.emit(ToStoreClient(worker.worker_id, FoundBlocks(find.find_id, tuple(spans))))

    def _where(self, block_hash: BlockHash, size_class: SizeClass) -> Tier | None:
        entry: BlockEntry | None = self._index.get(block_hash, size_class)
        if entry is not None and entry.host is not None:
            return Tier.HOST
        promotion = self._promoter.promotion(block_hash)
        if promotion is not None and promotion.size_class is size_class:
            return promotion.tier
        if entry is not None and entry.ssd is not None:
            return Tier.SSD
        return Tier.PEER if self._peers.has_holder(block_hash) else None

    def _span(self, tier: Tier, size_class: SizeClass) -> FoundSpan:
        if tier is Tier.HOST:
            return FoundSpan(tier, 1, 0.0, 0.0)
        path = self._ssd if tier is Tier.SSD else self._peers
        wait_s, block_s = path.predict(size_class)
        return FoundSpan(tier, 1, wait_s, block_s)

    def _count(self, spans: list[FoundSpan], *, missed: int, block_bytes: int) -> None:
        counts = self._context.counts
        for span in spans:
            counts.hit_blocks[span.tier] += span.block_count
            counts.hit_bytes[span.tier] += span.block_count * block_bytes
        counts.miss_blocks += missed
        counts.miss_bytes += missed * block_bytes


def _longer(span: FoundSpan) -> FoundSpan:
    return FoundSpan(span.tier, span.block_count + 1, span.wait_s, span.block_s)
