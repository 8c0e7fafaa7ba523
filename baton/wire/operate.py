"""Orders to the control plane, and what it says of its cluster, over gRPC: both sides."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec

from baton.core.operate import ClusterState, Decision, Order
from baton.wire.link import LinkBroken, LinkRefused, describe
from baton.wire.parties import PACKAGE, Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.transport import Standing, chosen, require_operator

CALL_S = 10.0
"""One order, or the first state."""

_ACT = f"{PACKAGE}Operate/Act"
_encode = msgspec.msgpack.Encoder().encode
_order = msgspec.msgpack.Decoder(Order)
_decision = msgspec.msgpack.Decoder(Decision)
_state = msgspec.msgpack.Decoder(ClusterState)


class OperateHandler(Protocol):
    """What `control_plane.desired.Operations` says."""

    def order(self, order: Order) -> Decision: ...

    def state(self) -> ClusterState: ...

    def changes(self) -> AsyncIterator[ClusterState]: ...


class OperateServicer(pb_grpc.OperateServicer):
    def __init__(self, handler: OperateHandler) -> None:
        self._handler = handler

    async def Act(self, request: Any, context: Any) -> pb.PackedFrame:
        await require_operator(context)
        try:
            order = _order.decode(request.payload)
        except msgspec.MsgspecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        return pb.PackedFrame(payload=_encode(self._handler.order(order)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.PackedFrame]:
        async for state in self._handler.changes():
            yield pb.PackedFrame(payload=_encode(state))


class OperateClient:
    """Every call raises LinkBroken when the control plane does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._standing = Standing(address, Party.CONTROL, pb_grpc.OperateStub)

    async def order(self, order: Order) -> Decision:
        try:
            request, metadata = pb.PackedFrame(payload=_encode(order)), chosen().metadata(_ACT)
            reply = await self._standing.stub.Act(request, timeout=CALL_S, metadata=metadata)
            return _decision.decode(reply.payload)
        except (grpc.RpcError, msgspec.MsgspecError) as error:
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
        call = self._standing.stub.Watch(pb.PackedFrame())
        try:
            async for frame in call:
                yield _state.decode(frame.payload)
        except (grpc.RpcError, msgspec.MsgspecError) as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._standing.close()


def _broken(address: str, error: Exception) -> LinkBroken:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return LinkRefused(f"{address}: {error.details()}")
    return LinkBroken(f"{address}: {describe(error)}")
