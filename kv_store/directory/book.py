"""The blocks of each node, by leases. Pure: messages of nodes and the time go in, answers and changes
come out.

Every node has a table of its own, so that its end, or a snapshot, is the end of one table and not a search
through all. A look-up asks every node's table for every hash, which is right for the tens of nodes that share
one control plane.

There are at most `entries_max` entries over all nodes. Beyond, the node with the most loses those that were
neither published nor looked up for the longest time; the block is then computed again rather than fetched.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.core.ids import BlockHash, NodeId
from baton.core.store import Holding, StoreChanges, StoreMember, Tier
from kv_store.directory.interface import GONE_S


class NodeJoined(msgspec.Struct, frozen=True):
    """A node that was no member became one."""

    member: StoreMember


class NodeLapsed(msgspec.Struct, frozen=True):
    """A member was silent for a whole lease."""

    member: StoreMember


class NodeLeft(msgspec.Struct, frozen=True):
    member: StoreMember


BookChange = NodeJoined | NodeLapsed | NodeLeft


@dataclass(slots=True)
class _Node:
    member: StoreMember
    ends_s: float
    sequence_number: int | None = None
    """The number of the last message; None if a snapshot is needed."""
    blocks: OrderedDict[BlockHash, Tier] = field(default_factory=OrderedDict[BlockHash, Tier])
    """The tier of each block. Blocks that were published or looked up longest ago come first."""


@dataclass(slots=True)
class DirectoryBook:
    entries_max: int
    entry_count: int = 0
    dropped_count: int = 0
    """Entries that were ever dropped for want of room."""
    _nodes: dict[NodeId, _Node] = field(default_factory=dict[NodeId, _Node])
    _gone: dict[NodeId, float] = field(default_factory=dict[NodeId, float])

    @property
    def next_tick_s(self) -> float | None:
        ends_s = [node.ends_s for node in self._nodes.values()]
        return min([*ends_s, *self._gone.values()], default=None)

    @property
    def members(self) -> tuple[StoreMember, ...]:
        return tuple(self._nodes[node_id].member for node_id in sorted(self._nodes))

    def renew(self, member: StoreMember, *, lease_s: float, now_s: float) -> tuple[bool, list[BookChange]]:
        node_id = member.node.node_id
        if node_id in self._gone:
            return False, []
        node = self._nodes.get(node_id)
        if node is None:
            self._nodes[node_id] = _Node(member, now_s + lease_s)
            return False, [NodeJoined(member)]
        node.member, node.ends_s = member, now_s + lease_s
        return node.sequence_number is not None, []

    def leave(self, node_id: NodeId, *, now_s: float) -> list[BookChange]:
        self._gone[node_id] = now_s + GONE_S
        node = self._forget(node_id)
        return [NodeLeft(node.member)] if node is not None else []

    def publish(self, changes: StoreChanges) -> bool:
        node, number = self._nodes.get(changes.node_id), changes.sequence_number
        if node is None:
            return False
        last = node.sequence_number
        if last is not None and number <= last:
            return True  # it came twice
        if changes.is_snapshot and changes.is_first:
            self.entry_count -= len(node.blocks)
            node.blocks = OrderedDict()
        elif last is None or number != last + 1:
            node.sequence_number = None
            return False
        node.sequence_number = number
        self._apply(node, changes)
        return True

    def look_up(self, hashes: Iterable[BlockHash]) -> list[tuple[Holding, ...]]:
        nodes = [self._nodes[node_id] for node_id in sorted(self._nodes)]
        return [tuple(_holders(nodes, block_hash)) for block_hash in hashes]

    def tick(self, *, now_s: float) -> list[BookChange]:
        """End the leases that are over; nothing else ends them."""
        self._gone = {node_id: end_s for node_id, end_s in self._gone.items() if end_s > now_s}
        lapsed = [node_id for node_id, node in self._nodes.items() if node.ends_s <= now_s]
        gone = [node for node_id in lapsed if (node := self._forget(node_id)) is not None]
        return [NodeLapsed(node.member) for node in gone]

    def paused(self, for_s: float) -> None:
        """Move all leases by the time for which the directory itself could not listen: silence does not count
        then."""
        for node in self._nodes.values():
            node.ends_s += for_s

    def check(self) -> None:
        """Check that the accounts agree."""
        assert self.entry_count == sum(len(node.blocks) for node in self._nodes.values())
        assert self.entry_count <= self.entries_max
        assert self._nodes.keys().isdisjoint(self._gone)

    def _forget(self, node_id: NodeId) -> _Node | None:
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self.entry_count -= len(node.blocks)
        return node

    def _apply(self, node: _Node, changes: StoreChanges) -> None:
        blocks, before = node.blocks, len(node.blocks)
        for block_hash in changes.removed:
            blocks.pop(block_hash, None)
        for block_hash, tier in changes.stored:
            blocks[block_hash] = tier
            blocks.move_to_end(block_hash)
        self.entry_count += len(blocks) - before
        while self.entry_count > self.entries_max:
            largest = max(self._nodes.values(), key=lambda n: len(n.blocks)).blocks
            self._drop(largest, self.entry_count - self.entries_max)

    def _drop(self, blocks: OrderedDict[BlockHash, Tier], count: int) -> None:
        count = min(count, len(blocks))
        for _ in range(count):
            blocks.popitem(last=False)
        self.entry_count -= count
        self.dropped_count += count


def _holders(nodes: Sequence[_Node], block_hash: BlockHash) -> Iterable[Holding]:
    for node in nodes:
        tier = node.blocks.get(block_hash)
        if tier is not None:
            node.blocks.move_to_end(block_hash)
            yield Holding(node.member.node, tier)
