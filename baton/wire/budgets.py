"""Budgets of tenants over gRPC: both sides. The control plane holds the ledger for all routers."""

import asyncio
from typing import Any

import grpc
import msgspec

from baton.core.budgets import Ask, Grant, Ledger, Settle
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.transport import Standing

_encoder = msgspec.msgpack.Encoder()
_ask = msgspec.msgpack.Decoder(Ask)
_grant = msgspec.msgpack.Decoder(Grant)
_settle = msgspec.msgpack.Decoder(Settle)


class BudgetsServicer(pb_grpc.BudgetsServicer):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def Take(self, request: Any, context: Any) -> pb.PackedFrame:
        ask = await _read(context, _ask, request)
        grant = self._ledger.take(ask, now_s=asyncio.get_running_loop().time())
        return pb.PackedFrame(payload=_encoder.encode(grant))

    async def Settle(self, request: Any, context: Any) -> pb.PackedFrame:
        settle = await _read(context, _settle, request)
        self._ledger.settle(settle, now_s=asyncio.get_running_loop().time())
        return pb.PackedFrame()


async def _read(context: Any, decoder: Any, request: Any) -> Any:
    try:
        return decoder.decode(request.payload)
    except msgspec.MsgspecError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


class BudgetsClient:
    """Every call raises LinkBroken when the control plane does not answer within `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._standing = Standing(address, Party.CONTROL, pb_grpc.BudgetsStub)

    async def take(self, ask: Ask) -> Grant:
        reply = await self._answer(self._standing.stub.Take, ask)
        try:
            return _grant.decode(reply.payload)
        except msgspec.MsgspecError as error:
            raise LinkBroken(f"{self.address}: {error}") from None

    async def settle(self, settle: Settle) -> None:
        await self._answer(self._standing.stub.Settle, settle)

    async def close(self) -> None:
        await self._standing.close()

    async def _answer(self, method: Any, value: Ask | Settle) -> Any:
        try:
            return await method(pb.PackedFrame(payload=_encoder.encode(value)), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None
