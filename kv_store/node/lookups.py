"""What the directory answered about blocks that are not here."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, NodeRef
from kv_store.node.context import HASHES_MAX, LOOKUPS_MAX, PEERS_MAX, Context
from kv_store.node.events import LookedUp, LookUp

FRESH_S = 2.0
"""An answer as young as this is not asked for again."""
USABLE_S = 30.0
"""Answers older than this are not acted upon."""
REMEMBERED_MAX = 65_536
GRACE_S = 0.1
"""The time beyond a look-up's timeout for an adapter that answers late."""


@dataclass(slots=True, eq=False)
class _PendingLookup:
    hashes: tuple[BlockHash, ...]
    then: Callable[[], None]


class Lookups:
    """Asks once for what several want to know soon after each other. It is bounded in all that it
    remembers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: dict[int, _PendingLookup] = {}
        self._locations: OrderedDict[BlockHash, tuple[float, tuple[BlockLocation, ...]]] = OrderedDict()
        self._seen: OrderedDict[BlockHash, int] = OrderedDict()
        self.peers: dict[NodeId, NodeRef] = {}

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def peers_are(self, peers: Sequence[NodeRef]) -> None:
        others = [peer for peer in peers if peer.node_id != self._context.node.node_id]
        self.peers = {peer.node_id: peer for peer in others[:PEERS_MAX]}

    def observe(self, hashes: Sequence[BlockHash]) -> None:
        """Note hashes that are wanted and not here."""
        if not self.peers:
            return
        for block_hash in hashes:
            self._seen[block_hash] = self._seen.pop(block_hash, 0) + 1
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)

    def wanted(self, block_hash: BlockHash) -> None:
        """Note a hash that is wanted for certain: it counts as seen twice."""
        self._seen.pop(block_hash, None)
        self.observe((block_hash, block_hash))

    def times_seen(self, block_hash: BlockHash) -> int:
        return self._seen.get(block_hash, 0)

    def look_up(self, hashes: Sequence[BlockHash], then: Callable[[], None]) -> bool:
        """Look hashes up. False means that there is nobody to ask about, or nothing new to learn, and `then`
        is not called. Otherwise it is called once, in bounded time."""
        if not self.peers or len(self._pending) >= LOOKUPS_MAX:
            return False
        now_s = self._context.now_s
        unknown = tuple(h for h in hashes if now_s - self._asked_s(h) > FRESH_S)[:HASHES_MAX]
        if not unknown:
            return False
        lookup_id = self._context.new_id()
        timeout_s = self._context.config.lookup_timeout_s
        self._pending[lookup_id] = _PendingLookup(unknown, then)
        self._context.emit(LookUp(lookup_id, unknown, timeout_s))
        nothing = LookedUp(lookup_id, ())
        self._context.at(now_s + timeout_s + GRACE_S, lambda: self.looked_up(nothing))
        return True

    def looked_up(self, event: LookedUp) -> None:
        """Take in an answer. An answer that is late, or that we did not ask for, is ignored."""
        pending = self._pending.pop(event.lookup_id, None)
        if pending is None:
            return
        for block_hash, locations in zip(pending.hashes, event.locations, strict=False):
            self.remember(block_hash, locations)
        pending.then()

    def remember(self, block_hash: BlockHash, locations: tuple[BlockLocation, ...]) -> None:
        own = self._context.node.node_id
        others = tuple(h for h in locations if h.node.node_id != own)
        self._locations[block_hash] = (self._context.now_s, others)
        self._locations.move_to_end(block_hash)
        if len(self._locations) > REMEMBERED_MAX:
            self._locations.popitem(last=False)

    def holders(self, block_hash: BlockHash) -> tuple[BlockLocation, ...]:
        asked_s, locations = self._locations.get(block_hash, (float("-inf"), ()))
        return locations if self._context.now_s - asked_s <= USABLE_S else ()

    def forget_holder(self, block_hash: BlockHash, node_id: NodeId) -> None:
        """Note that a node does not have the block, whatever the directory said."""
        known = self._locations.get(block_hash)
        if known is not None:
            left = tuple(h for h in known[1] if h.node.node_id != node_id)
            self._locations[block_hash] = (known[0], left)

    def _asked_s(self, block_hash: BlockHash) -> float:
        return self._locations.get(block_hash, (float("-inf"), ()))[0]
