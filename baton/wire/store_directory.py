"""The directory of store nodes over gRPC: both sides."""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from baton.core.ids import BlockHash, NodeId
from baton.core.store import Holding, StoreChanges, StoreMember
from baton.wire import directory_codec as codec
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.transport import Standing
from baton.wire.vocabulary import WireError

LEASE_S_MAX = 86_400.0
LOOK_UP_HASHES_MAX = 4096
"""Of one call; the client splits what is more."""

T = TypeVar("T")


class StoreDirectoryHandler(Protocol):
    """As `kv_store.directory.interface.Directory`."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool: ...

    async def leave(self, node_id: NodeId) -> None: ...

    async def members(self) -> tuple[StoreMember, ...]: ...

    async def publish(self, changes: StoreChanges) -> bool: ...

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[Holding, ...]]: ...


class StoreDirectoryServicer(pb_grpc.StoreDirectoryServicer):
    def __init__(self, handler: StoreDirectoryHandler) -> None:
        self._handler = handler

    async def Renew(self, request: Any, context: Any) -> pb.RenewStoreReply:
        member = await _read(context, codec.store_member_from_pb, request.member)
        if not (math.isfinite(request.lease_s) and 0 < request.lease_s <= LEASE_S_MAX):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a lease of {request.lease_s} s")
        return pb.RenewStoreReply(is_known=await self._handler.renew(member, lease_s=request.lease_s))

    async def Leave(self, request: Any, context: Any) -> pb.LeaveStoreReply:
        await self._handler.leave(NodeId(request.node_id))
        return pb.LeaveStoreReply()

    async def GetMembers(self, request: Any, context: Any) -> pb.StoreMembersReply:
        members = await self._handler.members()
        return pb.StoreMembersReply(members=map(codec.store_member_to_pb, members))

    async def Publish(self, request: Any, context: Any) -> pb.PublishBlocksReply:
        changes = await _read(context, codec.store_changes_from_pb, request)
        return pb.PublishBlocksReply(is_known=await self._handler.publish(changes))

    async def LookUp(self, request: Any, context: Any) -> pb.LookUpBlocksReply:
        hashes = await _read(context, codec.hashes_from_pb, request)
        if len(hashes) > LOOK_UP_HASHES_MAX:
            text = f"{len(hashes)} hashes, at most {LOOK_UP_HASHES_MAX}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return codec.holdings_to_pb(await self._handler.look_up(hashes))


async def _read(context: Any, decode: Callable[[Any], T], message: Any) -> T:
    try:
        return decode(message)
    except WireError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


class StoreDirectoryClient:
    """Every call raises LinkBroken when the directory does not answer within `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._standing = Standing(address, Party.CONTROL, pb_grpc.StoreDirectoryStub)

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        request = pb.RenewStoreRequest(member=codec.store_member_to_pb(member), lease_s=lease_s)
        return (await self._answer(self._standing.stub.Renew, request)).is_known

    async def leave(self, node_id: NodeId) -> None:
        await self._answer(self._standing.stub.Leave, pb.LeaveStoreRequest(node_id=node_id))

    async def members(self) -> tuple[StoreMember, ...]:
        reply = await self._answer(self._standing.stub.GetMembers, pb.StoreMembersRequest())
        return tuple(self._decoded(codec.store_member_from_pb, x) for x in reply.members)

    async def publish(self, changes: StoreChanges) -> bool:
        return (await self._answer(self._standing.stub.Publish, codec.store_changes_to_pb(changes))).is_known

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[Holding, ...]]:
        found: list[tuple[Holding, ...]] = []
        for start in range(0, len(hashes), LOOK_UP_HASHES_MAX):
            part = hashes[start : start + LOOK_UP_HASHES_MAX]
            reply = await self._answer(self._standing.stub.LookUp, codec.hashes_to_pb(part))
            if reply.count != len(part):
                raise LinkBroken(f"{self.address}: asked for {len(part)} blocks, told of {reply.count}")
            found += self._decoded(codec.holdings_from_pb, reply)
        return found

    async def close(self) -> None:
        await self._standing.close()

    async def _answer(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None

    def _decoded(self, decode: Callable[[Any], T], message: Any) -> T:
        try:
            return decode(message)
        except WireError as error:
            raise LinkBroken(f"{self.address}: {error}") from None
