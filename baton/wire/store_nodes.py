"""Sessions between store nodes, and an operator's requests, over gRPC, as MessagePack in frames.

A session is about blocks of one size. The node that opens it reads from the other's arena.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.core.errors import IncompatiblePeer
from baton.core.store import NodeHello, NodeToNode
from baton.core.store_admin import AskStatus, StoreReply, StoreRequest
from baton.wire.client import CONNECT_S, first_answer, hung_up, unary
from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.serving import first_message, until_end
from baton.wire.store_codec import BETWEEN_NODES, REPLY, REQUEST
from baton.wire.transport import channel_to, require_operator

NodeEnd = Link[NodeToNode, NodeToNode]


class StoreHandler(Protocol):
    async def hello(self, theirs: NodeHello) -> NodeHello:
        """Our side of a session about the same block size. Raises IncompatiblePeer if we have none."""
        ...

    async def serve_peer(self, theirs: NodeHello, link: NodeEnd) -> None:
        """Runs until the peer's stream ends. LinkBroken may escape. A loss of the connection cancels it."""
        ...

    async def answer(self, request: StoreRequest) -> StoreReply: ...


def _encode(message: NodeToNode) -> pb.StoreFrame:
    return pb.StoreFrame(payload=BETWEEN_NODES.encode(message))


def _decode(frame: pb.StoreFrame) -> NodeToNode:
    return BETWEEN_NODES.decode(frame.payload)


def disagreement(ours: NodeHello, theirs: NodeHello) -> str | None:
    """The reason why blocks must not move between the two; None if they may."""
    if ours.wire_version != theirs.wire_version:
        return f"store version {theirs.wire_version}, ours is {ours.wire_version}"
    if (ours.block_bytes, ours.slot_bytes) != (theirs.block_bytes, theirs.slot_bytes):
        return (
            f"blocks of {theirs.block_bytes} bytes in slots of {theirs.slot_bytes}, "
            f"ours have {ours.block_bytes} in {ours.slot_bytes}"
        )
    return None


class _StoreNodeServicer(pb_grpc.StoreNodeServicer):
    def __init__(self, handler: StoreHandler) -> None:
        self._handler = handler

    async def Session(self, request_iterator: Any, context: Any) -> None:
        theirs = _hello_in(await first_message(context))
        if theirs is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "say hello first")
            return
        try:
            ours = await self._handler.hello(theirs)
            mismatch = disagreement(ours, theirs)
        except IncompatiblePeer as error:
            ours, mismatch = theirs, str(error)
        if mismatch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        await context.write(_encode(ours))
        link: NodeEnd = Link(
            peer=theirs.node.node_id, read=context.read, write=context.write, encode=_encode, decode=_decode
        )
        await until_end(self._handler.serve_peer(theirs, link), link)

    async def Ask(self, request: Any, context: Any) -> pb.StoreFrame:
        try:
            asked = REQUEST.decode(request.payload)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if not isinstance(asked, AskStatus):
            await require_operator(context)
        return pb.StoreFrame(payload=REPLY.encode(await self._handler.answer(asked)))


def add_store_node(handler: StoreHandler, server: grpc.aio.Server) -> None:
    pb_grpc.add_StoreNodeServicer_to_server(_StoreNodeServicer(handler), server)


def _hello_in(frame: Any) -> NodeHello | None:
    if frame is END:
        return None
    try:
        message = _decode(frame)
    except WireError:
        return None
    return message if isinstance(message, NodeHello) else None


@asynccontextmanager
async def node_session(
    address: str, hello: NodeHello, *, connect_timeout_s: float = CONNECT_S
) -> AsyncGenerator[tuple[NodeHello, NodeEnd]]:
    """A session with the node whose arena is to be read.

    Raises LinkBroken, or IncompatiblePeer if the two do not agree.
    """
    async with channel_to(address, Party.STORE) as channel:
        call = pb_grpc.StoreNodeStub(channel).Session()
        async with hung_up(call):
            first = await first_answer(call, _encode(hello), address, connect_timeout_s)
            theirs = _hello_in(first)
            if theirs is None:
                raise LinkBroken(f"{address}: no hello of a store node")
            if mismatch := disagreement(hello, theirs):
                raise IncompatiblePeer(f"{address}: {mismatch}")
            link: NodeEnd = Link(
                peer=theirs.node.node_id, read=call.read, write=call.write, encode=_encode, decode=_decode
            )
            try:
                yield theirs, link
            finally:
                await link.close()


async def ask_node(address: str, request: StoreRequest) -> StoreReply:
    """The node's reply to an operator's request. Raises LinkBroken."""
    frame = pb.StoreFrame(payload=REQUEST.encode(request))
    reply = await unary(address, pb_grpc.StoreNodeStub, "Ask", frame)
    try:
        return REPLY.decode(reply.payload)
    except WireError as error:
        raise LinkBroken(f"{address}: {error}") from None
