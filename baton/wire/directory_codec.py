"""What store nodes and the directory say to each other, to protobuf and back. See `baton.wire.codec`."""

from collections.abc import Sequence

from baton.core.ids import BlockHash, NodeId
from baton.core.store import Holding, NodeRef, StoreChanges, StoreMember, Tier
from baton.wire import vocabulary as v
from baton.wire.proto import baton_pb2 as pb
from baton.wire.vocabulary import WireError

_TIER = v.numbers(Tier)
_TIER_OF = {number: tier for tier, number in _TIER.items()}


def _tier(number: int) -> Tier:
    try:
        return _TIER_OF[number]
    except KeyError:
        return v.member(_TIER, number)  # raises, and says how


def store_member_to_pb(x: StoreMember) -> pb.StoreMember:
    return pb.StoreMember(
        node_id=x.node.node_id,
        address=x.node.address,
        host=x.host,
        pid=x.pid,
        is_draining=x.is_draining,
        host_bytes=x.host_bytes,
        ssd_bytes=x.ssd_bytes,
        metrics_address=x.metrics_address,
        notes=x.notes,
    )


def store_member_from_pb(x: pb.StoreMember) -> StoreMember:
    return StoreMember(
        node=NodeRef(NodeId(x.node_id), x.address),
        host=x.host,
        pid=x.pid,
        is_draining=x.is_draining,
        host_bytes=x.host_bytes,
        ssd_bytes=x.ssd_bytes,
        metrics_address=x.metrics_address,
        notes=tuple(x.notes),
    )


def store_changes_to_pb(x: StoreChanges) -> pb.StoreChanges:
    tiers = [v.number(_TIER, tier) for _, tier in x.stored]
    return pb.StoreChanges(
        node_id=x.node_id,
        sequence_number=x.sequence_number,
        stored=[block_hash for block_hash, _ in x.stored],
        stored_tiers=tiers,
        removed=x.removed,
        is_snapshot=x.is_snapshot,
        is_first=x.is_first,
        is_last=x.is_last,
    )


def store_changes_from_pb(x: pb.StoreChanges) -> StoreChanges:
    if len(x.stored) != len(x.stored_tiers):
        raise WireError(f"{len(x.stored)} stored blocks and {len(x.stored_tiers)} tiers")
    tiers = map(_tier, x.stored_tiers)
    return StoreChanges(
        node_id=NodeId(x.node_id),
        sequence_number=x.sequence_number,
        stored=tuple(zip(map(v.block_hash, x.stored), tiers, strict=True)),
        removed=tuple(map(v.block_hash, x.removed)),
        is_snapshot=x.is_snapshot,
        is_first=x.is_first,
        is_last=x.is_last,
    )


def hashes_from_pb(x: pb.LookUpBlocksRequest) -> list[BlockHash]:
    return list(map(v.block_hash, x.hashes))


def holdings_to_pb(found: Sequence[Sequence[Holding]]) -> pb.LookUpBlocksReply:
    """Each node is named once."""
    index: dict[NodeRef, int] = {}
    holders: list[pb.BlockHolders] = []
    for holdings in found:
        nodes = [index.setdefault(holding.node, len(index)) for holding in holdings]
        tiers = [v.number(_TIER, holding.tier) for holding in holdings]
        holders.append(pb.BlockHolders(nodes=nodes, tiers=tiers))
    named = [pb.StoreNodeRef(node_id=node.node_id, address=node.address) for node in index]
    return pb.LookUpBlocksReply(nodes=named, holders=holders)


def holdings_from_pb(reply: pb.LookUpBlocksReply) -> list[tuple[Holding, ...]]:
    nodes = [NodeRef(NodeId(x.node_id), x.address) for x in reply.nodes]
    return [_holders_from_pb(x, nodes) for x in reply.holders]


def _holders_from_pb(x: pb.BlockHolders, nodes: Sequence[NodeRef]) -> tuple[Holding, ...]:
    if len(x.nodes) != len(x.tiers):
        raise WireError(f"{len(x.nodes)} holders and {len(x.tiers)} tiers")
    if any(index >= len(nodes) for index in x.nodes):
        raise WireError(f"a holder beyond the {len(nodes)} nodes named")
    return tuple(Holding(nodes[index], _tier(tier)) for index, tier in zip(x.nodes, x.tiers, strict=True))
