"""One fetch: blocks of one peer, kept there for us under a lease, and read."""

import math
from collections import deque
from dataclasses import dataclass, field

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, BlocksGrant, NodeRef
from kv_store.node.promotion import Promotion
from kv_store.node.size_classes import SizeClass
from kv_transfer.session import BadGrant, OpenRead, ReadSession

LEASE_SLACK_SHARE = 0.1
"""Part of a lease that is left unused, since clocks run differently. A node does not know how long its peers'
leases are configured to be, so this is a share where workers have `transfer.lease_slack_s`."""


@dataclass(slots=True, frozen=True)
class GrantedBlock:
    """A block that the peer keeps for us."""

    promotion: Promotion
    slot: int
    generation: int
    facts: BlockFacts
    checksum: int


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch(ReadSession):
    """Positions are those of `promotions`."""

    fetch_id: int
    size_class: SizeClass
    peer: NodeRef
    promotions: list[Promotion]
    first_deadline_s: float
    """The deadline of those who waited when it began. Whoever comes later may have more patience."""
    wanted_end: int = field(init=False)
    """Blocks from this position on will not come."""
    queue: deque[GrantedBlock] = field(default_factory=deque[GrantedBlock])
    """Granted, and not read yet."""
    corrupt: list[BlockHash] = field(default_factory=list[BlockHash])

    def __post_init__(self) -> None:
        self.wanted_end = len(self.promotions)

    @property
    def deadline_s(self) -> float:
        """The latest deadline of those who wait for a block of it."""
        return max(self.first_deadline_s, *(promotion.deadline_s for promotion in self.promotions))

    @property
    def is_waited_for(self) -> bool:
        """Something that is not being read yet is still wanted."""
        missing = self.promotions[self.granted_end : self.wanted_end]
        promotions = [*(block.promotion for block in self.queue), *missing]
        return any(promotion.waiters for promotion in promotions)

    def take_in(self, grant: BlocksGrant) -> None:
        """Queue what is new for reading. Raises BadGrant."""
        count = len(grant.source_blocks)
        if len(grant.facts) != count or len(grant.checksums) != count:
            raise BadGrant("lists of different lengths")
        for position, facts in enumerate(grant.facts, start=grant.first_block):
            if self.granted_end <= position < len(self.promotions):
                is_sound = facts.depth >= 0 and math.isfinite(facts.recompute_s)
                if facts.block_hash != self.promotions[position].block_hash or not is_sound:
                    raise BadGrant("another block than requested")
        first, *lists = self.accept(grant, slack_s=LEASE_SLACK_SHARE * grant.lease_s)
        new_facts = grant.facts[first - grant.first_block :]
        for position, (slot, generation, checksum, facts) in enumerate(
            zip(*lists, new_facts, strict=True), start=first
        ):
            if position < self.wanted_end:
                self.queue.append(GrantedBlock(self.promotions[position], slot, generation, facts, checksum))


PeerRead = OpenRead[Fetch, list[GrantedBlock]]
"""A read's slots are the network's, and in quarantine, until they hold good blocks or the read has
settled."""
