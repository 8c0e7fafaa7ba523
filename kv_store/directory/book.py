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
from baton.core.membership import MembershipBook, Renewal
from baton.core.store import BlockLocation, NodeRef, StoreChanges, StoreMember, Tier
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
class _Table:
    """The blocks of one node."""

    sequence_number: int | None = None
    """Number of the last message received; None: a snapshot is needed."""
    blocks: OrderedDict[BlockHash, Tier] = field(default_factory=OrderedDict[BlockHash, Tier])
    """Least recently published or looked up first."""


@dataclass(slots=True)
class DirectoryBook:
    entries_max: int
    entry_count: int = 0
    dropped_count: int = 0
    """Entries dropped for want of room, ever."""
    _nodes: MembershipBook[NodeId, StoreMember] = field(
        default_factory=lambda: MembershipBook[NodeId, StoreMember](lease_s=GONE_S, gone_s=GONE_S)
    )
    _tables: dict[NodeId, _Table] = field(default_factory=dict[NodeId, _Table])

    @property
    def next_tick_s(self) -> float | None:
        return self._nodes.next_tick_s

    @property
    def members(self) -> tuple[StoreMember, ...]:
        return tuple(self._nodes[node_id] for node_id in sorted(self._nodes))

    def renew(self, member: StoreMember, *, lease_s: float, now_s: float) -> tuple[bool, list[BookChange]]:
        """Returns whether the node's blocks are known, and what changed."""
        node_id = member.node.node_id
        match self._nodes.renew(node_id, member, now_s=now_s, lease_s=lease_s):
            case Renewal.LEFT_BEFORE:
                return False, []
            case Renewal.JOINED:
                self._tables[node_id] = _Table()
                return False, [NodeJoined(member)]
            case Renewal.CHANGED | Renewal.UNCHANGED:
                return self._tables[node_id].sequence_number is not None, []

    def leave(self, node_id: NodeId, *, now_s: float) -> list[BookChange]:
        member = self._nodes.get(node_id)
        self._nodes.leave(node_id, now_s=now_s)
        if member is None:
            return []
        self._forget(node_id)
        return [NodeLeft(member)]

    def publish(self, changes: StoreChanges) -> bool:
        node, number = self._tables.get(changes.node_id), changes.sequence_number
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

    def look_up(self, hashes: Iterable[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        nodes = [(self._nodes[node_id].node, self._tables[node_id]) for node_id in sorted(self._nodes)]
        return [tuple(_holders(nodes, block_hash)) for block_hash in hashes]

    def tick(self, *, now_s: float) -> list[BookChange]:
        """Ends the leases that are over; nothing else does."""
        lapsed = self._nodes.tick(now_s).lapsed
        for node_id in lapsed:
            self._forget(node_id)
        return [NodeLapsed(member) for member in lapsed.values()]

    def paused(self, for_s: float) -> None:
        """The directory itself could not listen for this long: no silence counts for that time."""
        self._nodes.paused(for_s)

    def check(self) -> None:
        """Accounts agree. After tests and when idle."""
        assert self.entry_count == sum(len(table.blocks) for table in self._tables.values())
        assert self.entry_count <= self.entries_max
        assert self._tables.keys() == set(self._nodes)
        self._nodes.check()

    def _forget(self, node_id: NodeId) -> None:
        self.entry_count -= len(self._tables.pop(node_id).blocks)

    def _apply(self, node: _Table, changes: StoreChanges) -> None:
        blocks, before = node.blocks, len(node.blocks)
        for block_hash in changes.removed:
            blocks.pop(block_hash, None)
        for block_hash, tier in changes.stored:
            blocks[block_hash] = tier
            blocks.move_to_end(block_hash)
        self.entry_count += len(blocks) - before
        while self.entry_count > self.entries_max:
            largest = max(self._tables.values(), key=lambda t: len(t.blocks)).blocks
            self._drop(largest, self.entry_count - self.entries_max)

    def _drop(self, blocks: OrderedDict[BlockHash, Tier], count: int) -> None:
        count = min(count, len(blocks))
        for _ in range(count):
            blocks.popitem(last=False)
        self.entry_count -= count
        self.dropped_count += count


def _holders(nodes: Sequence[tuple[NodeRef, _Table]], block_hash: BlockHash) -> Iterable[BlockLocation]:
    for node, table in nodes:
        tier = table.blocks.get(block_hash)
        if tier is not None:
            table.blocks.move_to_end(block_hash)
            yield BlockLocation(node, tier)
