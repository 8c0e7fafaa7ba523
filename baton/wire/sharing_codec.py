"""What routers tell each other, as protobuf and back."""

from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.sharing import ExpectedBlocks, RouterMember, RouterUpdate, WorkerShare
from baton.wire.proto import baton_pb2 as pb


def router_member_to_pb(x: RouterMember) -> pb.WatchRequest:
    return pb.WatchRequest(
        router_id=x.router_id, address=x.address, metrics_address=x.metrics_address, host=x.host, pid=x.pid
    )


def router_member_from_pb(x: pb.WatchRequest) -> RouterMember:
    return RouterMember(RouterId(x.router_id), x.address, x.metrics_address, x.host, x.pid)


def router_update_to_pb(x: RouterUpdate) -> pb.RouterUpdate:
    return pb.RouterUpdate(
        router_id=x.router_id,
        is_snapshot=x.is_snapshot,
        shares=[
            pb.WorkerShare(worker_id=s.worker_id, sequences=s.sequences, tokens=s.tokens, blocks=s.blocks)
            for s in x.shares
        ],
        expected=[pb.ExpectedBlocks(worker_id=e.worker_id, hashes=b"".join(e.hashes)) for e in x.expected],
    )


def router_update_from_pb(x: pb.RouterUpdate) -> RouterUpdate:
    return RouterUpdate(
        router_id=RouterId(x.router_id),
        is_snapshot=x.is_snapshot,
        shares=tuple(WorkerShare(WorkerId(s.worker_id), s.sequences, s.tokens, s.blocks) for s in x.shares),
        expected=tuple(ExpectedBlocks(WorkerId(e.worker_id), _hashes(e.hashes)) for e in x.expected),
    )


def _hashes(raw: bytes) -> tuple[BlockHash, ...]:
    ends = range(HASH_BYTES, len(raw) + 1, HASH_BYTES)
    return tuple(BlockHash(raw[end - HASH_BYTES : end]) for end in ends)
