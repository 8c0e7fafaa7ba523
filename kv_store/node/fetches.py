"""One fetch: blocks of one peer, pinned there for us under a lease, and read."""

import math
from collections import deque
from dataclasses import dataclass, field

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, NodeRef, PinnedBlocks
from kv_store.node.promotion import Fill
from kv_store.node.size_classes import Space, is_checksum

LEASE_SLACK_SHARE = 0.1
"""Of a lease, left unused: clocks run differently."""


@dataclass(slots=True, frozen=True)
class Pinned:
    """A block that the peer keeps for us."""

    fill: Fill
    slot: int
    generation: int
    facts: BlockFacts
    checksum: int


@dataclass(slots=True, eq=False)
class Fetch:
    """The lease is counted from when we sent the PinBlocks that was answered, so we always stop first."""

    fetch_id: int
    space: Space
    peer: NodeRef
    fills: list[Fill]
    deadline_s: float
    asked_s: dict[int, float] = field(default_factory=dict[int, float])
    """Number of each PinBlocks not yet answered by it or a later one -> when it was sent."""
    pin_number: int = -1
    lease_end_s: float = float("inf")
    """Once granted."""
    is_granted: bool = False
    pinned_count: int = 0
    """Positions before this are pinned there, or were."""
    end: int = field(init=False)
    """Positions from here on will not come."""
    queue: deque[Pinned] = field(default_factory=deque[Pinned])
    """Pinned there, not read yet."""
    reads_open: int = 0
    """Not settled."""
    is_over: bool = False
    is_lost: bool = False
    """Nobody is there to be told of the end."""
    corrupt: list[BlockHash] = field(default_factory=list[BlockHash])

    def __post_init__(self) -> None:
        self.end = len(self.fills)

    @property
    def is_waited_for(self) -> bool:
        """Something that is not being read yet is still wanted."""
        unpinned = self.fills[self.pinned_count : self.end]
        return any(p.fill.waiters for p in self.queue) or any(fill.waiters for fill in unpinned)

    def accept(self, answer: PinnedBlocks) -> str:
        """Takes in what is new. Not empty: why the answer makes no sense."""
        count = len(answer.slots)
        lists = (answer.generations, answer.facts, answer.checksums)
        if any(len(one) != count for one in lists):
            return "lists of different lengths"
        if not 0 <= answer.first <= self.pinned_count or answer.first + count > len(self.fills):
            return f"blocks {answer.first} to {answer.first + count}, {self.pinned_count} were pinned"
        if not answer.lease_s > 0:
            return f"a lease of {answer.lease_s} s"
        if not self.is_granted and answer.answers_pin not in self.asked_s:
            return f"an answer to pin {answer.answers_pin}, which was not sent"
        if any(slot < 0 for slot in answer.slots):
            return "a slot below 0"
        if not all(is_checksum(number) for number in answer.checksums):
            return "a checksum that is none"
        for i in range(self.pinned_count - answer.first, count):
            fill, facts = self.fills[self.pinned_count], answer.facts[i]
            is_sound = facts.depth >= 0 and math.isfinite(facts.recompute_s)
            if facts.block_hash != fill.block_hash or not is_sound:
                return "another block than asked for"
            pinned = Pinned(fill, answer.slots[i], answer.generations[i], facts, answer.checksums[i])
            self.pinned_count += 1
            if self.pinned_count <= self.end:
                self.queue.append(pinned)
        self._extend_lease(answer)
        return ""

    def _extend_lease(self, answer: PinnedBlocks) -> None:
        asked_s = self.asked_s.get(answer.answers_pin)
        if asked_s is None:
            return  # overtaken by a later one, whose lease ends later
        for number in [n for n in self.asked_s if n < answer.answers_pin]:
            del self.asked_s[number]
        end_s = asked_s + answer.lease_s * (1 - LEASE_SLACK_SHARE)
        self.lease_end_s = max(self.lease_end_s, end_s) if self.is_granted else end_s
        self.is_granted = True


@dataclass(slots=True, eq=False)
class PeerRead:
    """Slots are the network's until the read has settled."""

    fetch: Fetch
    blocks: list[Pinned]
    slots: list[int]
    started_s: float
    is_done: bool = False
    """Ended, but bytes may still land: the slots are set aside."""
