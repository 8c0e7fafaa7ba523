"""What store nodes and the directory say to each other, to protobuf and back. See `baton.wire.codec`."""

from collections.abc import Sequence

from baton.core.hashing import HASH_BYTES
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


def _hashes(raw: bytes) -> list[BlockHash]:
    if len(raw) % HASH_BYTES:
        raise WireError(f"block hashes have {HASH_BYTES} bytes each, these together {len(raw)}")
    return [BlockHash(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)]


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
    return pb.StoreChanges(
        node_id=x.node_id,
        sequence_number=x.sequence_number,
        stored=b"".join([block_hash for block_hash, _ in x.stored]),
        stored_tiers=bytes([_TIER[tier] for _, tier in x.stored]),
        removed=b"".join(x.removed),
        is_snapshot=x.is_snapshot,
        is_first=x.is_first,
        is_last=x.is_last,
    )


def store_changes_from_pb(x: pb.StoreChanges) -> StoreChanges:
    stored, tiers = _hashes(x.stored), map(_tier, x.stored_tiers)
    if len(stored) != len(x.stored_tiers):
        raise WireError(f"{len(stored)} stored blocks and {len(x.stored_tiers)} tiers")
    return StoreChanges(
        node_id=NodeId(x.node_id),
        sequence_number=x.sequence_number,
        stored=tuple(zip(stored, tiers, strict=True)),
        removed=tuple(_hashes(x.removed)),
        is_snapshot=x.is_snapshot,
        is_first=x.is_first,
        is_last=x.is_last,
    )


def hashes_to_pb(hashes: Sequence[BlockHash]) -> pb.LookUpBlocksRequest:
    return pb.LookUpBlocksRequest(hashes=b"".join(hashes))


def hashes_from_pb(x: pb.LookUpBlocksRequest) -> list[BlockHash]:
    return _hashes(x.hashes)


def holdings_to_pb(found: Sequence[Sequence[Holding]]) -> pb.LookUpBlocksReply:
    """Each node is named once."""
    tiers: dict[NodeRef, bytearray] = {}
    for index, holdings in enumerate(found):
        for holding in holdings:
            if holding.node not in tiers:
                tiers[holding.node] = bytearray(len(found))
            tiers[holding.node][index] = _TIER[holding.tier]
    nodes = [
        pb.NodeHoldings(node_id=node.node_id, address=node.address, tiers=bytes(held))
        for node, held in tiers.items()
    ]
    return pb.LookUpBlocksReply(count=len(found), nodes=nodes)


def holdings_from_pb(reply: pb.LookUpBlocksReply) -> list[tuple[Holding, ...]]:
    """Holders by node id."""
    found: list[list[Holding]] = [[] for _ in range(reply.count)]
    for x in sorted(reply.nodes, key=lambda x: x.node_id):
        if len(x.tiers) != reply.count:
            raise WireError(f"{len(x.tiers)} tiers for {reply.count} blocks")
        node = NodeRef(NodeId(x.node_id), x.address)
        holdings = {number: Holding(node, _tier(number)) for number in set(x.tiers) if number}
        for index, number in enumerate(x.tiers):
            if number:
                found[index].append(holdings[number])
    return list(map(tuple, found))
