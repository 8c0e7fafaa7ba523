"""The calling side of every service."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from baton.core import messages as m
from baton.core.errors import IncompatiblePeer, SetupError
from baton.core.ids import RouterId, WorkerId
from baton.core.sharing import RouterMember
from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken, describe
from baton.wire.parties import PACKAGE, Party, server_of
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.services import RoleRequest, WorkerLeaves, WorkerStatusReply
from baton.wire.transport import Standing, channel_to, chosen

CONNECT_S = 5.0
"""The longest time from dialling to the peer's first message."""

CALL_S = 5.0
"""The longest time for one unary call."""

RouterEnd = Link[m.RouterMessage, m.WorkerMessage]
ReaderEnd = Link[m.ReaderMessage, m.OwnerMessage]


@asynccontextmanager
async def hung_up(call: Any) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        call.cancel()


@asynccontextmanager
async def worker_session(
    address: str, router_id: RouterId, *, connect_timeout_s: float = CONNECT_S
) -> AsyncGenerator[tuple[m.WorkerHello, RouterEnd]]:
    """A router's session with a worker.

    Raises LinkBroken if the worker can't be reached, says no hello in time, speaks another wire version, or
    says of itself what cannot be.
    """
    async with channel_to(address, Party.WORKER) as channel:
        call = pb_grpc.WorkerStub(channel).Session()
        async with hung_up(call):
            opening = mapping.router_envelope_to_pb(m.RouterHello(router_id))
            first = await first_answer(call, opening, address, connect_timeout_s)
            try:
                message = mapping.worker_envelope_from_pb(first)
            except WireError as error:
                raise LinkBroken(f"{address}: {error}") from None
            if not isinstance(message, m.WorkerHello) or message.wire_version != m.WIRE_VERSION:
                raise LinkBroken(f"{address}: no hello of wire version {m.WIRE_VERSION}")
            if trouble := impossible(message):
                raise LinkBroken(f"{address}: {message.worker_id} says {trouble}, which cannot be")
            link: RouterEnd = Link(
                peer=message.worker_id,
                read=call.read,
                write=call.write,
                encode=mapping.router_envelope_to_pb,
                decode=_message_or_end,
            )
            try:
                yield message, link
            finally:
                await link.close()


def _message_or_end(envelope: pb.WorkerEnvelope) -> Any:
    """Decode the envelope. The end that the worker announces is the end of the stream."""
    message = mapping.worker_envelope_from_pb(envelope)
    return END if isinstance(message, m.SessionEnds) else message


@asynccontextmanager
async def peer_session(
    address: str, hello: m.PeerHello, *, connect_timeout_s: float = CONNECT_S
) -> AsyncGenerator[tuple[m.PeerHello, ReaderEnd]]:
    """A decode worker's session with a prefill worker.

    Raises LinkBroken, or IncompatiblePeer if the two do not agree on fingerprint or wire version.
    """
    async with channel_to(address, Party.WORKER) as channel:
        call = pb_grpc.PeerStub(channel).Session()
        async with hung_up(call):
            opening = mapping.reader_envelope_to_pb(hello)
            first = await first_answer(call, opening, address, connect_timeout_s)
            theirs = mapping.peer_hello_from_pb(first.peer_hello)
            if mismatch := disagreement(hello, theirs):
                raise IncompatiblePeer(f"{address}: {mismatch}")
            link: ReaderEnd = Link(
                peer=theirs.worker_id,
                read=call.read,
                write=call.write,
                encode=mapping.reader_envelope_to_pb,
                decode=mapping.owner_envelope_from_pb,
            )
            try:
                yield theirs, link
            finally:
                await link.close()


def impossible(hello: m.WorkerHello) -> str:
    """What no worker can be, of what this one says that it is. Empty: nothing."""
    for name in ("block_tokens", "block_count", "max_model_tokens", "step_tokens_max", "batch_sequences_max"):
        if (value := getattr(hello, name)) < 1:
            return f"{name} {value}"
    return "" if 0.0 <= hello.tpot_slo_s < math.inf else f"tpot_slo_s {hello.tpot_slo_s}"


def disagreement(ours: m.PeerHello, theirs: m.PeerHello) -> str | None:
    """The reason why KV must not move between the two; None if it may."""
    if ours.wire_version != theirs.wire_version:
        return f"wire version {theirs.wire_version}, ours is {ours.wire_version}"
    if ours.fingerprint != theirs.fingerprint:
        return f"KV fingerprint {theirs.fingerprint}, ours is {ours.fingerprint}"
    return None


async def first_answer(call: Any, opening: Any, address: str, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(opening)
            first = await call.read()
    except TimeoutError:
        raise LinkBroken(f"{address}: no answer within {timeout_s:g} s") from None
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        if _is_refusal(error):
            raise IncompatiblePeer(f"{address}: {describe(error)}") from None
        raise LinkBroken(f"{address}: {describe(error)}") from None
    if first is END:
        raise LinkBroken(f"{address}: closed before saying hello")
    return first


def _is_refusal(error: Exception) -> bool:
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def unary(address: str, service: Any, method: str, request: Any) -> Any:
    """Make one call of `service`, which is a stub's class. Raises LinkBroken."""
    name = service.__name__.removesuffix("Stub")
    async with channel_to(address, server_of(name)) as channel:
        try:
            metadata = chosen().metadata(f"{PACKAGE}{name}/{method}")
            return await getattr(service(channel), method)(request, timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as error:
            raise LinkBroken(f"{address}: {describe(error)}") from None
        except SetupError as error:
            raise LinkBroken(str(error)) from None


async def drain_worker(address: str) -> None:
    await unary(address, pb_grpc.WorkerStub, "Drain", pb.Empty())


async def set_worker_role(address: str, role: m.Role, *, drain_s: float = 0.0) -> None:
    """The worker answers at once, and has `drain_s` to finish what it holds before it takes the role."""
    request = mapping.role_request_to_pb(RoleRequest(role, drain_s))
    await unary(address, pb_grpc.WorkerStub, "SetRole", request)


async def worker_status(address: str) -> WorkerStatusReply:
    reply = await unary(address, pb_grpc.WorkerStub, "GetStatus", pb.Empty())
    return mapping.worker_status_reply_from_pb(reply)


class DirectoryClient:
    """A member's or router's connection to the directory.

    Every call raises LinkBroken when the directory can't be reached; the caller goes on with what it knows
    and tries again.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._standing = Standing(address, Party.CONTROL, pb_grpc.DirectoryStub)

    async def renew(self, member: m.Member) -> None:
        try:
            await self._standing.stub.Renew(mapping.member_to_pb(member), timeout=CALL_S)
        except grpc.RpcError as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None

    async def leave(self, worker_id: WorkerId) -> None:
        try:
            await self._standing.stub.Leave(
                mapping.worker_leaves_to_pb(WorkerLeaves(worker_id)), timeout=CALL_S
            )
        except grpc.RpcError as error:
            raise LinkBroken(f"{self.address}: {describe(error)}") from None

    async def watch(self, member: RouterMember) -> AsyncIterator[m.MembershipView]:
        """The view now, after every change, and at least once a second. The router is listed meanwhile."""
        async with channel_to(self.address, Party.CONTROL) as channel:
            call = pb_grpc.DirectoryStub(channel).Watch(mapping.router_member_to_pb(member))
            try:
                async for view in call:
                    yield mapping.membership_view_from_pb(view)
            except (grpc.RpcError, WireError) as error:
                raise LinkBroken(f"{self.address}: {describe(error)}") from None
            finally:
                call.cancel()

    async def close(self) -> None:
        await self._standing.close()
