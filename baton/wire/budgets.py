"""Budgets of tenants over gRPC, both sides. The control plane holds the ledger for all routers."""

import asyncio
from typing import Any

import grpc

from baton.core.budgets import Ask, Grant, Ledger, Settle
from baton.wire.decoding import WireError
from baton.wire.link import LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.serving import request_of
from baton.wire.transport import Standing


class BudgetsServicer(pb_grpc.BudgetsServicer):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def Take(self, request: Any, context: Any) -> pb.Grant:
        ask = await request_of(context, mapping.ask_from_pb, request)
        grant = self._ledger.take(ask, now_s=asyncio.get_running_loop().time())
        return mapping.grant_to_pb(grant)

    async def Settle(self, request: Any, context: Any) -> pb.Empty:
        settle = await request_of(context, mapping.settle_from_pb, request)
        self._ledger.settle(settle, now_s=asyncio.get_running_loop().time())
        return pb.Empty()


class BudgetsClient:
    """Every call raises LinkBroken when the control plane does not answer within `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._standing = Standing(address, Party.CONTROL, pb_grpc.BudgetsStub)

    async def take(self, ask: Ask) -> Grant:
        reply = await self._answer(self._standing.stub.Take, mapping.ask_to_pb(ask))
        try:
            return mapping.grant_from_pb(reply)
        except WireError as error:
            raise LinkBroken(f"{self.address}: {error}") from None

    async def settle(self, settle: Settle) -> None:
        await self._answer(self._standing.stub.Settle, mapping.settle_to_pb(settle))

    async def close(self) -> None:
        await self._standing.close()

    async def _answer(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None
