"""Least recently used leaf of the prefix tree goes first."""

from collections import OrderedDict
from collections.abc import Callable

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy


class ServingPolicy(ParkingPolicy):
    """`EvictionPolicy`. A block goes only when nothing that follows it is here, which would be worthless."""

    name = "serving"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._parent: dict[BlockHash, BlockHash] = {}
        self._children: dict[BlockHash, int] = {}  # of blocks that are here or not
        self._leaves: OrderedDict[BlockHash, None] = OrderedDict()
        self._used: set[BlockHash] = set()

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        block_hash, parent = block.block_hash, block.parent
        self._parent[block_hash] = parent
        self._children[parent] = self._children.get(parent, 0) + 1
        if not self._take_aside(parent):
            self._leaves.pop(parent, None)
        if block_hash not in self._children:
            self._leaves[block_hash] = None

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        self._used.add(block_hash)
        if self._take_aside(block_hash):
            self._leaves[block_hash] = None
        elif block_hash in self._leaves:
            self._leaves.move_to_end(block_hash)

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        if not self._take_aside(block_hash):
            self._leaves.pop(block_hash, None)
        self._used.discard(block_hash)
        parent = self._parent.pop(block_hash)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._parent:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)

    def victim(self, may_go: Callable[[BlockHash], bool]) -> BlockHash | None:
        found = super().victim(may_go)
        # Every leaf is in use: a block before them may be free all the same.
        return found if found is not None else next((h for h in self._parent if may_go(h)), None)

    def earns_next(self, block_hash: BlockHash) -> bool:
        return block_hash in self._used

    def _front(self) -> BlockHash | None:
        return next(iter(self._leaves), None)

    def _unlink(self, block_hash: BlockHash) -> None:
        del self._leaves[block_hash]
