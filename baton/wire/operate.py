"""Orders to the control plane, and its reports on the cluster, over gRPC: both sides."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.core.operate import ClusterState, Decision, Order
from baton.wire.decoding import WireError
from baton.wire.link import LinkBroken, LinkRefused, describe
from baton.wire.parties import PACKAGE, Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.serving import request_of
from baton.wire.transport import Standing, chosen, require_operator

CALL_S = 10.0
"""The longest time for one order, or for the first state."""

_ACT = f"{PACKAGE}Operate/Act"


class OperateHandler(Protocol):
    """The control plane's side, which is `control_plane.desired.Operations`."""

    def order(self, order: Order) -> Decision: ...

    def state(self) -> ClusterState: ...

    def changes(self) -> AsyncIterator[ClusterState]: ...


class OperateServicer(pb_grpc.OperateServicer):
    def __init__(self, handler: OperateHandler) -> None:
        self._handler = handler

    async def Act(self, request: Any, context: Any) -> pb.Decision:
        await require_operator(context)
        order = await request_of(context, mapping.order_from_pb, request)
        return mapping.decision_to_pb(self._handler.order(order))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.ClusterState]:
        async for state in self._handler.changes():
            yield mapping.cluster_state_to_pb(state)


class OperateClient:
    """Every call raises LinkBroken when the control plane does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._standing = Standing(address, Party.CONTROL, pb_grpc.OperateStub)

    async def order(self, order: Order) -> Decision:
        try:
            request, metadata = mapping.order_to_pb(order), chosen().metadata(_ACT)
            reply = await self._standing.stub.Act(request, timeout=CALL_S, metadata=metadata)
            return mapping.decision_from_pb(reply)
        except (grpc.RpcError, WireError) as error:
            raise _broken(self.address, error) from None

    async def state(self) -> ClusterState:
        changes = self.changes()
        try:
            async with asyncio.timeout(CALL_S):
                return await anext(changes)
        except (TimeoutError, StopAsyncIteration):
            raise LinkBroken(f"{self.address}: no answer within {CALL_S:g} s") from None
        finally:
            await changes.aclose()

    async def changes(self) -> AsyncGenerator[ClusterState]:
        """The state now, after every change, and at least once a second."""
        call = self._standing.stub.Watch(pb.Empty())
        try:
            async for state in call:
                yield mapping.cluster_state_from_pb(state)
        except (grpc.RpcError, WireError) as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._standing.close()


def _broken(address: str, error: Exception) -> LinkBroken:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return LinkRefused(f"{address}: {error.details()}")
    return LinkBroken(f"{address}: {describe(error)}")
