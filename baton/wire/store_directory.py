"""The directory of store nodes over gRPC: both sides."""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, StoreChanges, StoreMember
from baton.wire import block_locations
from baton.wire.decoding import WireError
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.services import LookUpRequest, RenewStoreRequest, StoreKnown, StoreLeaves, StoreMembers
from baton.wire.serving import request_of
from baton.wire.transport import Standing

LEASE_S_MAX = 86_400.0
LOOK_UP_HASHES_MAX = 4096
"""The most hashes of one call; the client splits longer lists."""

T = TypeVar("T")


class StoreDirectoryHandler(Protocol):
    """The answering side, which is a `kv_store.directory.interface.Directory`."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool: ...

    async def leave(self, node_id: NodeId) -> None: ...

    async def members(self) -> tuple[StoreMember, ...]: ...

    async def publish(self, changes: StoreChanges) -> bool: ...

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]: ...


class StoreDirectoryServicer(pb_grpc.StoreDirectoryServicer):
    def __init__(self, handler: StoreDirectoryHandler) -> None:
        self._handler = handler

    async def Renew(self, request: Any, context: Any) -> pb.StoreKnown:
        renewal = await request_of(context, mapping.renew_store_request_from_pb, request)
        if not (math.isfinite(renewal.lease_s) and 0 < renewal.lease_s <= LEASE_S_MAX):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a lease of {renewal.lease_s} s")
        is_known = await self._handler.renew(renewal.member, lease_s=renewal.lease_s)
        return mapping.store_known_to_pb(StoreKnown(is_known))

    async def Leave(self, request: Any, context: Any) -> pb.Empty:
        await self._handler.leave(mapping.store_leaves_from_pb(request).node_id)
        return pb.Empty()

    async def GetMembers(self, request: Any, context: Any) -> pb.StoreMembers:
        return mapping.store_members_to_pb(StoreMembers(await self._handler.members()))

    async def Publish(self, request: Any, context: Any) -> pb.StoreKnown:
        changes = await request_of(context, mapping.store_changes_from_pb, request)
        return mapping.store_known_to_pb(StoreKnown(await self._handler.publish(changes)))

    async def LookUp(self, request: Any, context: Any) -> pb.LookUpReply:
        hashes = (await request_of(context, mapping.look_up_request_from_pb, request)).hashes
        if len(hashes) > LOOK_UP_HASHES_MAX:
            text = f"{len(hashes)} hashes, at most {LOOK_UP_HASHES_MAX}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return mapping.look_up_reply_to_pb(block_locations.pack(await self._handler.look_up(hashes)))


def _locations(reply: pb.LookUpReply) -> list[tuple[BlockLocation, ...]]:
    return block_locations.unpack(mapping.look_up_reply_from_pb(reply))


class StoreDirectoryClient:
    """Every call raises LinkBroken when the directory does not answer within `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._standing = Standing(address, Party.CONTROL, pb_grpc.StoreDirectoryStub)

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        request = mapping.renew_store_request_to_pb(RenewStoreRequest(member, lease_s))
        reply = await self._answer(self._standing.stub.Renew, request)
        return mapping.store_known_from_pb(reply).is_known

    async def leave(self, node_id: NodeId) -> None:
        await self._answer(self._standing.stub.Leave, mapping.store_leaves_to_pb(StoreLeaves(node_id)))

    async def members(self) -> tuple[StoreMember, ...]:
        reply = await self._answer(self._standing.stub.GetMembers, pb.Empty())
        return self._decoded(mapping.store_members_from_pb, reply).members

    async def publish(self, changes: StoreChanges) -> bool:
        reply = await self._answer(self._standing.stub.Publish, mapping.store_changes_to_pb(changes))
        return mapping.store_known_from_pb(reply).is_known

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        found: list[tuple[BlockLocation, ...]] = []
        for start in range(0, len(hashes), LOOK_UP_HASHES_MAX):
            part = tuple(hashes[start : start + LOOK_UP_HASHES_MAX])
            request = mapping.look_up_request_to_pb(LookUpRequest(part))
            reply = await self._answer(self._standing.stub.LookUp, request)
            if reply.count != len(part):
                raise LinkBroken(f"{self.address}: asked for {len(part)} blocks, got {reply.count}")
            found += self._decoded(_locations, reply)
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
