"""How the directory's answer to a look-up travels: by node, since a few nodes hold most of the blocks."""

from collections.abc import Sequence

import msgspec

from baton.core.store import Holding, NodeRef, Tier
from baton.wire.decoding import WireError


class NodeHoldings(msgspec.Struct, frozen=True):
    """What one node holds of the blocks that were asked for."""

    node: NodeRef
    tiers: tuple[Tier | None, ...]
    """One for each block that was asked for; unspecified: the node does not have it."""


class LookUpReply(msgspec.Struct, frozen=True):
    count: int
    """The number of blocks that were asked for."""
    nodes: tuple[NodeHoldings, ...]


def pack(found: Sequence[Sequence[Holding]]) -> LookUpReply:
    """`found` has the holders of each block. Each node is named once."""
    tiers: dict[NodeRef, list[Tier | None]] = {}
    for index, holdings in enumerate(found):
        for holding in holdings:
            if holding.node not in tiers:
                tiers[holding.node] = [None] * len(found)
            tiers[holding.node][index] = holding.tier
    return LookUpReply(len(found), tuple(NodeHoldings(node, tuple(held)) for node, held in tiers.items()))


def unpack(reply: LookUpReply) -> list[tuple[Holding, ...]]:
    """The holders of each block, by node id. Raises WireError."""
    found: list[list[Holding]] = [[] for _ in range(reply.count)]
    for held in sorted(reply.nodes, key=lambda each: each.node.node_id):
        if len(held.tiers) != reply.count:
            raise WireError(f"{len(held.tiers)} tiers for {reply.count} blocks")
        holdings = {tier: Holding(held.node, tier) for tier in set(held.tiers) if tier is not None}
        for index, tier in enumerate(held.tiers):
            if tier is not None:
                found[index].append(holdings[tier])
    return list(map(tuple, found))
