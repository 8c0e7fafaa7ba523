"""Routers' reports on their requests to the control plane, over gRPC: both sides."""

from typing import Any, Protocol

import grpc

from baton.core.demand import DemandReply, DemandReport
from baton.wire.decoding import WireError
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.serving import request_of
from baton.wire.transport import Standing

CALL_S = 5.0


class DemandHandler(Protocol):
    def report(self, report: DemandReport) -> DemandReply: ...


class DemandServicer(pb_grpc.DemandServicer):
    def __init__(self, handler: DemandHandler) -> None:
        self._handler = handler

    async def Report(self, request: Any, context: Any) -> pb.DemandReply:
        report = await request_of(context, mapping.demand_report_from_pb, request)
        return mapping.demand_reply_to_pb(self._handler.report(report))


class DemandClient:
    """Raises LinkBroken when the control plane does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._standing = Standing(address, Party.CONTROL, pb_grpc.DemandStub)

    async def report(self, report: DemandReport) -> DemandReply:
        try:
            request = mapping.demand_report_to_pb(report)
            return mapping.demand_reply_from_pb(await self._standing.stub.Report(request, timeout=CALL_S))
        except (grpc.RpcError, WireError) as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None

    async def close(self) -> None:
        await self._standing.close()
