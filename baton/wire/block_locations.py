"""How the directory's answer to a look-up travels: by node, since a few nodes hold most of the blocks."""

from collections.abc import Sequence

import msgspec

from baton.core.store import BlockLocation, NodeRef, Tier
from baton.wire.decoding import WireError


class NodeLocations(msgspec.Struct, frozen=True):
    """What one node holds of the blocks that were asked for."""

    node: NodeRef
    tiers: tuple[Tier | None, ...]
    """One for each block that was asked for; unspecified: the node does not have it."""


class LookUpReply(msgspec.Struct, frozen=True):
    count: int
    """The number of blocks that were asked for."""
    nodes: tuple[NodeLocations, ...]


def pack(found: Sequence[Sequence[BlockLocation]]) -> LookUpReply:
    """`found` has the holders of each block. Each node is named once."""
    tiers: dict[NodeRef, list[Tier | None]] = {}
    for index, locations in enumerate(found):
        for location in locations:
            if location.node not in tiers:
                tiers[location.node] = [None] * len(found)
            tiers[location.node][index] = location.tier
    return LookUpReply(len(found), tuple(NodeLocations(node, tuple(held)) for node, held in tiers.items()))


def unpack(reply: LookUpReply) -> list[tuple[BlockLocation, ...]]:
    """The holders of each block, by node id. Raises WireError."""
    found: list[list[BlockLocation]] = [[] for _ in range(reply.count)]
    for held in sorted(reply.nodes, key=lambda each: each.node.node_id):
        if len(held.tiers) != reply.count:
            raise WireError(f"{len(held.tiers)} tiers for {reply.count} blocks")
        locations = {tier: BlockLocation(held.node, tier) for tier in set(held.tiers) if tier is not None}
        for index, tier in enumerate(held.tiers):
            if tier is not None:
                found[index].append(locations[tier])
    return list(map(tuple, found))
