"""What routers tell the control plane of their requests, over gRPC: both sides."""

from typing import Any, Protocol

import grpc
import msgspec

from baton.core.demand import DemandHeard, DemandReport
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.transport import Standing

CALL_S = 5.0

_encode = msgspec.msgpack.Encoder().encode
_report = msgspec.msgpack.Decoder(DemandReport)
_heard = msgspec.msgpack.Decoder(DemandHeard)


class DemandHandler(Protocol):
    def report(self, report: DemandReport) -> DemandHeard: ...


class DemandServicer(pb_grpc.DemandServicer):
    def __init__(self, handler: DemandHandler) -> None:
        self._handler = handler

    async def Report(self, request: Any, context: Any) -> pb.PackedFrame:
        try:
            report = _report.decode(request.payload)
        except msgspec.MsgspecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        return pb.PackedFrame(payload=_encode(self._handler.report(report)))


class DemandClient:
    """Raises LinkBroken when the control plane does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._standing = Standing(address, Party.CONTROL, pb_grpc.DemandStub)

    async def report(self, report: DemandReport) -> DemandHeard:
        try:
            request = pb.PackedFrame(payload=_encode(report))
            reply = await self._standing.stub.Report(request, timeout=CALL_S)
            return _heard.decode(reply.payload)
        except (grpc.RpcError, msgspec.MsgspecError) as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None

    async def close(self) -> None:
        await self._standing.close()
