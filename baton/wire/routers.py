"""Both ends of the stream by which one router follows another."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc

from baton.core.ids import RouterId
from baton.core.messages import WIRE_VERSION
from baton.core.sharing import RouterUpdate
from baton.wire.client import hung_up
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.sharing_codec import router_update_from_pb, router_update_to_pb
from baton.wire.transport import channel_to


class RouterHandler(Protocol):
    def follow(self, router_id: RouterId) -> AsyncIterator[RouterUpdate]:
        """A snapshot, then changes. It ends when the follower is too slow. Closed when it is lost."""
        ...


class _RouterServicer(pb_grpc.RouterServicer):
    def __init__(self, handler: RouterHandler) -> None:
        self._handler = handler

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[pb.RouterUpdate]:
        if request.wire_version != WIRE_VERSION:
            theirs = f"wire version {request.wire_version}, ours is {WIRE_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, theirs)
        async for update in self._handler.follow(RouterId(request.router_id)):
            yield router_update_to_pb(update)


def add_router(handler: RouterHandler, server: Any) -> None:
    pb_grpc.add_RouterServicer_to_server(_RouterServicer(handler), server)


async def followed(address: str, router_id: RouterId) -> AsyncGenerator[RouterUpdate]:
    """What the router at `address` tells, until it ends. Raises LinkBroken."""
    channel = channel_to(address, Party.ROUTER)
    try:
        stub = pb_grpc.RouterStub(channel)
        call = stub.Follow(pb.FollowRequest(router_id=router_id, wire_version=WIRE_VERSION))
        async with hung_up(call):
            async for update in call:
                yield router_update_from_pb(update)
    except grpc.RpcError as error:
        raise LinkBroken(f"{address}: {describe(error)}") from None
    finally:
        await channel.close(None)
