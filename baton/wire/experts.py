"""Expert ranks and their callers to the control plane, over gRPC: both sides."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc

from baton.core import experts as x
from baton.wire.client import hung_up
from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken, describe
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.serving import first_message, request_of, until_end
from baton.wire.transport import blocking_channel_to, channel_to

RankEnd = Link[x.ExpertRankOrder, x.ExpertRankReport]
"""The control plane's end of a rank's stream."""
CallerEnd = Link[x.ExpertMapUpdate, x.ExpertCallerReport]
"""The control plane's end of a caller's stream."""
RankStream = Link[x.ExpertRankReport, x.ExpertRankOrder]


class ExpertsHandler(Protocol):
    """The control plane."""

    async def serve_rank(self, hello: x.ExpertRankHello, link: RankEnd) -> None:
        """Runs until the rank's stream ends. LinkBroken may escape. A loss of the connection cancels it."""
        ...

    async def serve_caller(self, hello: x.ExpertCallerHello, link: CallerEnd) -> None:
        """Runs until the caller's stream ends. LinkBroken may escape. A loss of the connection cancels it."""
        ...


class ExpertsServicer(pb_grpc.ExpertsServicer):
    def __init__(self, handler: ExpertsHandler) -> None:
        self._handler = handler

    async def FollowRank(self, request_iterator: Any, context: Any) -> None:
        hello = await _hello(context, mapping.expert_rank_envelope_from_pb, x.ExpertRankHello)
        link: RankEnd = Link(
            peer=hello.ref.rank_id,
            read=context.read,
            write=context.write,
            encode=mapping.expert_rank_order_envelope_to_pb,
            decode=mapping.expert_rank_envelope_from_pb,
        )
        await until_end(self._handler.serve_rank(hello, link), link)

    async def FollowCaller(self, request_iterator: Any, context: Any) -> None:
        hello = await _hello(context, mapping.expert_caller_envelope_from_pb, x.ExpertCallerHello)
        link: CallerEnd = Link(
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
async def rank_stream(address: str, hello: x.ExpertRankHello) -> AsyncGenerator[RankStream]:
    """A rank's stream to the control plane. Iteration and `send` raise LinkBroken when it is gone."""
    async with channel_to(address, Party.CONTROL) as channel:
        call = pb_grpc.ExpertsStub(channel).FollowRank()
        async with hung_up(call):
            link: RankStream = Link(
                peer=f"control plane at {address}",
                read=call.read,
                write=call.write,
                encode=mapping.expert_rank_envelope_to_pb,
                decode=mapping.expert_rank_order_envelope_from_pb,
            )
            link.send(hello)
            try:
                yield link
            finally:
                await link.close()


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
