"""Both ends of the streams that expert ranks, and the workers that use them, keep to the control plane."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.core import experts as x
from baton.wire.client import CONNECT_S, hung_up
from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.serving import first_message, request_of, until_end
from baton.wire.transport import blocking_channel_to, channel_to

ToRank = Link[x.ExpertRankOrder, x.ExpertRankReport]
ToCaller = Link[x.ExpertMapUpdate, x.ExpertCallerReport]
"""The control plane's ends."""
OfRank = Link[x.ExpertRankReport, x.ExpertRankOrder]
"""The rank's end."""


class ExpertsHandler(Protocol):
    """The control plane's side. Each method runs until the stream ends; a loss of the connection cancels it,
    and LinkBroken may escape."""

    async def serve_rank(self, hello: x.ExpertRankHello, link: ToRank) -> None: ...

    async def serve_caller(self, hello: x.ExpertCallerHello, link: ToCaller) -> None: ...


class ExpertsServicer(pb_grpc.ExpertsServicer):
    def __init__(self, handler: ExpertsHandler) -> None:
        self._handler = handler

    async def FollowRank(self, request_iterator: Any, context: Any) -> None:
        hello = await _hello(context, mapping.expert_rank_envelope_from_pb, x.ExpertRankHello)
        link: ToRank = Link(
            peer=hello.ref.rank_id,
            read=context.read,
            write=context.write,
            encode=mapping.expert_rank_order_envelope_to_pb,
            decode=mapping.expert_rank_envelope_from_pb,
        )
        await until_end(self._handler.serve_rank(hello, link), link)

    async def FollowCaller(self, request_iterator: Any, context: Any) -> None:
        hello = await _hello(context, mapping.expert_caller_envelope_from_pb, x.ExpertCallerHello)
        link: ToCaller = Link(
            peer=hello.caller,
            read=context.read,
            write=context.write,
            encode=mapping.expert_map_update_to_pb,
            decode=mapping.expert_caller_envelope_from_pb,
        )
        await until_end(self._handler.serve_caller(hello, link), link)


async def _hello(context: Any, decode: Callable[[Any], Any], kind: type[Any]) -> Any:
    first = await first_message(context)
    hello = await request_of(context, decode, first) if first is not END else None
    if not isinstance(hello, kind):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "say hello first")
    return hello


@asynccontextmanager
async def expert_rank_stream(
    address: str, hello: x.ExpertRankHello, *, connect_timeout_s: float = CONNECT_S
) -> AsyncGenerator[OfRank]:
    """A rank's stream to the control plane at `address`. Raises LinkBroken if it cannot be reached."""
    async with channel_to(address, Party.CONTROL) as channel:
        call = pb_grpc.ExpertsStub(channel).FollowRank()
        async with hung_up(call):
            opening = mapping.expert_rank_envelope_to_pb(hello)
            await _open(call, opening, address, connect_timeout_s)
            link: OfRank = Link(
                peer=address,
                read=call.read,
                write=call.write,
                encode=mapping.expert_rank_envelope_to_pb,
                decode=mapping.expert_rank_order_envelope_from_pb,
            )
            try:
                yield link
            finally:
                await link.close()


async def _open(call: Any, opening: Any, address: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(opening)
    except TimeoutError:
        raise LinkBroken(f"{address}: no answer within {timeout_s:g} s") from None
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.BaseError) as error:
        raise LinkBroken(f"{address}: {describe(error)}") from None


class CallerStream:
    """A caller's stream to the control plane, for a thread without an event loop.

    A process of a worker may have an event loop with gRPC on another thread, and gRPC's asynchronous calls
    want one loop in a process.
    """

    def __init__(self, address: str, messages: Iterable[x.ExpertCallerReport]) -> None:
        """messages: what is sent, ExpertCallerHello first; it is iterated on a thread of gRPC's."""
        self._address = address
        self._channel = blocking_channel_to(address, Party.CONTROL)
        encoded = map(mapping.expert_caller_envelope_to_pb, messages)
        self._call: Any = pb_grpc.ExpertsStub(self._channel).FollowCaller(encoded)

    def __iter__(self) -> Iterator[x.ExpertMapUpdate]:
        """The maps, as they come. Raises LinkBroken at the stream's end, however it ended."""
        try:
            for update in self._call:
                yield mapping.expert_map_update_from_pb(update)
        except (grpc.RpcError, WireError) as error:
            raise LinkBroken(f"{self._address}: {describe(error)}") from None
        raise LinkBroken(f"{self._address}: the control plane has ended the stream")

    def close(self) -> None:
        """End the stream; iteration raises. Any thread may call it."""
        self._call.cancel()
        self._channel.close()
