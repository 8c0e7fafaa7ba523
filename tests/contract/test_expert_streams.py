"""The streams of expert ranks and of their callers to the control plane, over real gRPC."""

import asyncio
import queue

import grpc
import pytest

from baton.core import experts as x
from baton.core.ids import ExpertRankId, WorkerId
from baton.wire.experts import CallerStream, rank_stream
from baton.wire.link import LinkBroken
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.server import start_server
from baton.wire.transport import channel_to

REF = x.ExpertRankRef(ExpertRankId("experts-decode-0.a1"), "host", "@baton-1", "h:1", "secret")
RANK = x.ExpertRankHello(REF, "decode of m", "n1", 7, 2, 8, 2**40, 4, (0, 15))
CALLER = x.ExpertCallerHello("decode-0.a1/0", WorkerId("decode-0.a1"), "decode of m", 2**40)
MAP = x.ExpertMapUpdate(3, 2, 8, (x.ExpertMapRank(REF, (0, 3, 15)),))
RANK_SAYS = [
    x.ExpertRankBeat(2**40, 1.5),
    x.ExpertLoaded(2**33, 3),
    x.ExpertLoadFailed(1, 0, "no such file"),
]
RANK_HEARS = [x.ExpertLoadOrder(2**33, 3, REF), x.ExpertLoadOrder(1, 0), x.ExpertDropOrder(0)]
CALLER_SAYS = [
    x.ExpertEpochUsed(3),
    x.ExpertCountsReport(2, 8, tuple(range(16))),
    x.ExpertRankSuspected(REF.rank_id, True, "connection closed"),
]


class Control:
    """Answers every report with one order, and remembers what it heard."""

    def __init__(self):
        self.heard, self.begun, self.ended = [], asyncio.Event(), asyncio.Event()

    async def serve_rank(self, hello, link):
        await self._serve(hello, link, iter(RANK_HEARS))

    async def serve_caller(self, hello, link):
        await self._serve(hello, link, iter([MAP] * 3))

    async def _serve(self, hello, link, orders):
        self.heard.append(hello)
        self.begun.set()
        try:
            async for report in link:
                self.heard.append(report)
                link.send(next(orders))
        finally:
            self.ended.set()


@pytest.fixture
async def served():
    control = Control()
    server, port = await start_server("127.0.0.1", 0, experts=control)
    yield control, f"127.0.0.1:{port}", server
    await server.stop(0)


async def test_messages_of_a_rank_go_both_ways_and_its_end_is_heard(served):
    control, address, _ = served
    async with asyncio.timeout(30):
        async with rank_stream(address, RANK) as link:
            for report in RANK_SAYS:
                link.send(report)
            assert [await anext(link) for _ in RANK_HEARS] == RANK_HEARS
        await control.ended.wait()
    assert control.heard == [RANK, *RANK_SAYS]


async def test_messages_of_a_caller_go_both_ways_and_its_end_is_heard(served):
    control, address, _ = served
    more: queue.SimpleQueue = queue.SimpleQueue()
    for message in (CALLER, *CALLER_SAYS):
        more.put(message)
    stream = CallerStream(address, iter(more.get, None))
    maps = iter(stream)
    async with asyncio.timeout(30):
        assert [await asyncio.to_thread(next, maps) for _ in CALLER_SAYS] == [MAP] * 3
        stream.close()
        more.put(None)
        await control.ended.wait()
    assert control.heard == [CALLER, *CALLER_SAYS]
    with pytest.raises(LinkBroken):
        next(maps)


async def test_the_loss_of_the_control_plane_breaks_the_stream(served):
    control, address, server = served
    async with asyncio.timeout(30), rank_stream(address, RANK) as link:
        await control.begun.wait()
        stopping = asyncio.create_task(server.stop(0))
        with pytest.raises(LinkBroken):
            async for _ in link:
                pass
        await stopping
    async with asyncio.timeout(30), rank_stream(address, RANK) as link:
        with pytest.raises(LinkBroken):
            await anext(link)


@pytest.mark.parametrize("method", ["FollowRank", "FollowCaller"])
async def test_who_does_not_say_hello_first_is_refused(served, method):
    control, address, _ = served
    async with asyncio.timeout(30), channel_to(address, Party.CONTROL) as channel:
        call = getattr(pb_grpc.ExpertsStub(channel), method)()
        beat = mapping.expert_rank_envelope_to_pb(RANK_SAYS[0])
        used = mapping.expert_caller_envelope_to_pb(CALLER_SAYS[0])
        await call.write(beat if method == "FollowRank" else used)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert control.heard == []


async def test_a_message_without_content_is_refused(served):
    _, address, _ = served
    async with asyncio.timeout(30), channel_to(address, Party.CONTROL) as channel:
        call = pb_grpc.ExpertsStub(channel).FollowRank()
        await call.write(pb.ExpertRankEnvelope())
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
