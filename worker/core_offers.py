"""Write-through: full blocks are offered to the store, and copied into the slots it names."""

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.core.ids import BlockHash, BlockId
from baton.core.store import BlockFacts, BlocksWritten, OfferBlocks, TakeBlocks
from engine.scheduling.prefix_cache import PrefixCache
from worker.core_copies import PoolCopies
from worker.events import CopyDone, ToStore, WorkerAction

BATCH_BLOCKS = 16
"""Blocks of one offer: this many are copied, and held for it, at a time."""
GATHER_S = 0.1
"""An offer smaller than a batch waits this long for company. Decodes fill a block now and then, and each
offer is five messages."""
IN_FLIGHT_SHARE = 32
"""At most 1/32 of the pool is offered, and perhaps held for copying, at once."""
IN_FLIGHT_MAX = 1024
"""At most this many blocks are offered at once, however large the pool."""


@dataclass(slots=True, eq=False)
class Offer:
    offer_id: int
    blocks: list[BlockFacts]
    written: list[bool] = field(default_factory=list[bool])
    """Whether each place that the store named is being copied."""


class Offers:
    """Blocks that are offered or will be. They are known by hash until the store names slots, and one that is
    gone by then is passed over."""

    def __init__(self, cache: PrefixCache, copies: PoolCopies) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._copies = copies
        self._queue_max = self._pool.block_count
        self._in_flight_max = min(IN_FLIGHT_MAX, max(1, self._pool.block_count // IN_FLIGHT_SHARE))
        self._known: OrderedDict[BlockHash, BlockFacts] = OrderedDict()
        """Blocks that were committed here lately, and may still be in the pool: a store that begins anew is
        offered them."""
        self._queue: OrderedDict[BlockHash, tuple[BlockFacts, float]] = OrderedDict()
        """Blocks to offer, with the time at which each was committed."""
        self._is_joined = False
        self._offers: dict[int, Offer] = {}
        self._in_flight_count = self._next_id = 0
        self.offered_count = self.written_count = self.skipped_count = 0
        """Blocks since the start. Skipped ones were dropped from the queue, or gone when the store wanted
        them."""

    @property
    def in_flight_count(self) -> int:
        """Blocks that are offered and not settled."""
        return self._in_flight_count

    @property
    def queued_count(self) -> int:
        return len(self._queue)

    @property
    def next_tick_s(self) -> float | None:
        if not self._queue or self._in_flight_count >= self._in_flight_max:
            return None
        return next(iter(self._queue.values()))[1] + GATHER_S

    def joined(self, *, now_s: float) -> None:
        """Begin a session: everything that is still here may be new to the store."""
        self._is_joined = True
        for facts in self._known.values():
            if self._cache.match([facts.block_hash]):
                self._enqueue(facts, now_s=now_s)

    def lost(self) -> None:
        """End the session. Copies under way end by themselves."""
        self._is_joined = False
        self._offers.clear()
        self._queue.clear()
        self._in_flight_count = 0

    def committed(self, facts: BlockFacts, *, now_s: float) -> None:
        self._known[facts.block_hash] = facts
        self._known.move_to_end(facts.block_hash)
        if len(self._known) > self._queue_max:
            self._known.popitem(last=False)
        if self._is_joined:
            self._enqueue(facts, now_s=now_s)

    def flush(self, *, now_s: float) -> list[WorkerAction]:
        """Offer whole batches, and whatever has waited for long enough."""
        actions: list[WorkerAction] = []
        while self._queue and (room := self._in_flight_max - self._in_flight_count) > 0:
            committed_s = next(iter(self._queue.values()))[1]
            size = min(BATCH_BLOCKS, self._in_flight_max)
            if now_s < committed_s + GATHER_S and min(len(self._queue), room) < size:
                break
            count = min(len(self._queue), size, room)
            actions.append(self._offer([self._queue.popitem(last=False)[1][0] for _ in range(count)]))
        return actions

    def taken(self, message: TakeBlocks) -> list[WorkerAction]:
        """Copy the blocks that the store wants. An unknown offer is one of an earlier session."""
        offer = self._offers.get(message.offer_id)
        if offer is None or offer.written:
            return []
        if not message.places:
            self._end(offer)
            return []
        blocks: list[BlockId] = []
        slots: list[int] = []
        for place in message.places:
            is_ours = 0 <= place.index < len(offer.blocks)  # else the node is another program's
            block = self._block_of(offer.blocks[place.index]) if is_ours else None
            offer.written.append(block is not None)
            if block is not None:
                blocks.append(block)
                slots.append(place.slot)
        self.skipped_count += offer.written.count(False)
        if not blocks:
            return [self._settle(offer, ())]
        return [self._copies.to_store(offer, blocks, slots)]

    def copied(self, offer: Offer, done: CopyDone) -> list[WorkerAction]:
        """Report a copy to the store. An offer whose session is gone gets no report."""
        if self._offers.get(offer.offer_id) is not offer:
            return []
        if done.error:
            offer.written = [False] * len(offer.written)
            return [self._settle(offer, ())]
        return [self._settle(offer, done.checksums)]

    def check(self) -> None:
        assert self._in_flight_count == sum(len(offer.blocks) for offer in self._offers.values())
        assert self._in_flight_count <= self._in_flight_max
        assert len(self._queue) <= self._queue_max

    # --- parts ----------------------------------------------------------------------------------

    def _enqueue(self, facts: BlockFacts, *, now_s: float) -> None:
        self._queue.setdefault(facts.block_hash, (facts, now_s))
        if len(self._queue) > self._queue_max:
            self._queue.popitem(last=False)
            self.skipped_count += 1

    def _offer(self, blocks: list[BlockFacts]) -> WorkerAction:
        self._next_id += 1
        self._offers[self._next_id] = Offer(self._next_id, blocks)
        self._in_flight_count += len(blocks)
        self.offered_count += len(blocks)
        return ToStore(OfferBlocks(self._next_id, tuple(blocks)))

    def _block_of(self, facts: BlockFacts) -> BlockId | None:
        """The pool's block with these contents; None if it is gone, or free and wanted for something else
        soon."""
        found = self._cache.match([facts.block_hash])
        if not found:
            return None
        is_scarce = self._pool.free_count <= self._in_flight_max
        return None if is_scarce and not self._pool.ref_count(found[0]) else found[0]

    def _settle(self, offer: Offer, checksums: tuple[int, ...]) -> WorkerAction:
        made = iter(checksums)
        written = tuple(next(made, 0) if is_written else None for is_written in offer.written)
        self.written_count += offer.written.count(True)
        self._end(offer)
        return ToStore(BlocksWritten(offer.offer_id, written))

    def _end(self, offer: Offer) -> None:
        del self._offers[offer.offer_id]
        self._in_flight_count -= len(offer.blocks)
