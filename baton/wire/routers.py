"""Both ends of the calls to routers, which come from one another and from operators."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc

from baton.core.ids import RouterId
from baton.core.messages import WIRE_VERSION
from baton.core.recent_requests import RecentRequestsQuery, RecentRequestsReply
from baton.core.sharing import RouterUpdate
from baton.wire.client import hung_up
from baton.wire.decoding import WireError
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import PACKAGE, Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.services import FollowRequest
from baton.wire.serving import request_of
from baton.wire.transport import channel_to, chosen, require_operator

RECENT_REQUESTS_S = 5.0
"""The longest time for one call."""

_RECENT_REQUESTS = f"{PACKAGE}Router/RecentRequests"


class TooManyFollowers(Exception):
    """The router serves as many others as it may."""


class RouterHandler(Protocol):
    def follow(self, router_id: RouterId) -> AsyncIterator[RouterUpdate]:
        """A snapshot, then changes. It ends if the follower is too slow or begins again, and is closed if the
        follower is lost. Raises TooManyFollowers."""
        ...

    def recent_requests(self, wanted: RecentRequestsQuery) -> RecentRequestsReply: ...


class _RouterServicer(pb_grpc.RouterServicer):
    def __init__(self, handler: RouterHandler) -> None:
        self._handler = handler

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[pb.RouterUpdate]:
        asked = mapping.follow_request_from_pb(request)
        if asked.wire_version != WIRE_VERSION:
            theirs = f"wire version {asked.wire_version}, ours is {WIRE_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, theirs)
        try:
            async for update in self._handler.follow(asked.router_id):
                yield mapping.router_update_to_pb(update)
        except TooManyFollowers as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def RecentRequests(self, request: Any, context: Any) -> pb.RecentRequestsReply:
        await require_operator(context)
        wanted = await request_of(context, mapping.recent_requests_query_from_pb, request)
        return mapping.recent_requests_reply_to_pb(self._handler.recent_requests(wanted))


def add_router(handler: RouterHandler, server: Any) -> None:
    pb_grpc.add_RouterServicer_to_server(_RouterServicer(handler), server)


async def followed(address: str, router_id: RouterId) -> AsyncGenerator[RouterUpdate]:
    """Updates from the router at `address`, until it ends. Raises LinkBroken."""
    channel = channel_to(address, Party.ROUTER)
    try:
        stub = pb_grpc.RouterStub(channel)
        call = stub.Follow(mapping.follow_request_to_pb(FollowRequest(router_id, WIRE_VERSION)))
        async with hung_up(call):
            async for update in call:
                yield mapping.router_update_from_pb(update)
    except (grpc.RpcError, WireError) as error:
        raise LinkBroken(f"{address}: {describe(error)}") from None
    finally:
        await channel.close(None)


async def recent_requests_of(address: str, wanted: RecentRequestsQuery) -> RecentRequestsReply:
    """Recent requests that the router at `address` keeps. Raises LinkBroken."""
    channel = channel_to(address, Party.ROUTER)
    try:
        request, metadata = mapping.recent_requests_query_to_pb(wanted), chosen().metadata(_RECENT_REQUESTS)
        stub = pb_grpc.RouterStub(channel)
        reply = await stub.RecentRequests(request, timeout=RECENT_REQUESTS_S, metadata=metadata)
        return mapping.recent_requests_reply_from_pb(reply)
    except (grpc.RpcError, WireError) as error:
        raise LinkBroken(f"{address}: {describe(error)}") from None
    finally:
        await channel.close(None)
