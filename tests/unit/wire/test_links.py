"""Real gRPC on loopback: sessions carry messages both ways, and their end is heard."""

import asyncio

import pytest

from baton.core import messages as m
from baton.core.errors import IncompatiblePeer
from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.sharing import RouterMember
from baton.wire import client, serving
from baton.wire.client import (
    DirectoryClient,
    drain_worker,
    peer_session,
    set_worker_role,
    worker_session,
    worker_status,
)
from baton.wire.decoding import WireError
from baton.wire.link import Link, LinkBroken
from baton.wire.options import CHANNEL_OPTIONS
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.server import start_server
from baton.wire.services import WorkerStatusReply

HELLO = m.WorkerHello(WorkerId("w.1"), m.Role.AGGREGATED, "f", "model", 16, 8, 128)
R = RouterId("r-1")


class EchoWorker:
    """Answers every cancel with a failure of the same epoch."""

    def __init__(self):
        self.ended = asyncio.Event()
        self.role = m.Role.AGGREGATED
        self.draining = False

    async def serve_router(self, router_id, link):
        try:
            link.send(HELLO)
            async for message in link:
                link.send(
                    m.SequenceFailed(message.seq_id, message.epoch, m.FailureReason.INTERNAL, router_id)
                )
        finally:
            self.ended.set()

    async def drain(self):
        self.draining = True

    async def set_role(self, role, drain_s):
        self.role = role

    def status(self):
        return WorkerStatusReply(HELLO.worker_id, self.role, self.draining, "f", {"held": 2.0})


PART = m.KVPart(0, 2, 0, 4, {"tcp": b"offer"})


class EchoPeer:
    def __init__(self, fingerprint="f"):
        self._hello = m.PeerHello(WorkerId("p.1"), fingerprint, (PART,))

    def hello(self):
        return self._hello

    async def serve_reader(self, theirs, link):
        async for message in link:
            link.send(m.KVRefused(message.seq_id, message.epoch, theirs.worker_id))


@pytest.fixture
async def served():
    worker = EchoWorker()
    server, port = await start_server("127.0.0.1", 0, worker=worker, peer=EchoPeer())
    yield worker, f"127.0.0.1:{port}", server
    await server.stop(0)


async def read_to_end(link):
    return [message async for message in link]


async def test_messages_go_both_ways_in_order(served):
    worker, address, _ = served
    async with worker_session(address, R) as (hello, link):
        assert hello == HELLO
        for epoch in range(50):
            link.send(m.CancelSequence(SequenceId("s"), epoch))
        got = [await anext(link) for _ in range(50)]
    assert [g.epoch for g in got] == list(range(50))
    assert got[0].message == "r-1"
    await asyncio.wait_for(worker.ended.wait(), 5)


async def test_the_client_hears_that_the_server_is_gone(served):
    _, address, server = served
    async with worker_session(address, R) as (_, link):
        stopping = asyncio.create_task(server.stop(0))
        with pytest.raises(LinkBroken):
            await asyncio.wait_for(read_to_end(link), 5)
        with pytest.raises(LinkBroken):
            link.send(m.ResyncBlocks())
        await stopping


async def test_nobody_there_is_a_broken_link_not_a_hang():
    with pytest.raises(LinkBroken):
        async with worker_session("127.0.0.1:1", R, connect_timeout_s=3):
            pass


async def test_peers_must_agree_on_the_fingerprint(served):
    _, address, _ = served
    ours = m.PeerHello(WorkerId("d.1"), "f", ())
    async with peer_session(address, ours) as (theirs, link):
        assert theirs.parts == (PART,)
        link.send(m.KVRequest(SequenceId("s"), 3, 0))
        assert await anext(link) == m.KVRefused(SequenceId("s"), 3, "d.1")
    with pytest.raises(IncompatiblePeer, match="fingerprint"):
        async with peer_session(address, m.PeerHello(WorkerId("d.1"), "other", ())):
            pass


async def test_unary_calls(served):
    worker, address, _ = served
    await drain_worker(address)
    await set_worker_role(address, m.Role.PREFILL)
    status = await worker_status(address)
    assert worker.draining
    assert (status.role, status.is_draining, status.accounts) == (m.Role.PREFILL, True, {"held": 2.0})


class ListDirectory:
    def __init__(self):
        self.members = {}
        self.changed = asyncio.Event()

    def renew(self, member):
        self.members[member.worker_id] = member
        self.changed.set()

    def leave(self, worker_id):
        self.members.pop(worker_id, None)

    async def watch(self, _):
        yield m.MembershipView("life", 0, ())
        await self.changed.wait()
        yield m.MembershipView("life", 1, tuple(self.members.values()))


async def test_directory_calls():
    directory = ListDirectory()
    server, port = await start_server("127.0.0.1", 0, directory=directory)
    client = DirectoryClient(f"127.0.0.1:{port}")
    member = m.Member(WorkerId("w.1"), m.Role.PREFILL, "127.0.0.1:9", "model", "f", pid=7)
    views = client.watch(RouterMember(R))
    assert (await anext(views)).members == ()
    await client.renew(member)
    assert (await anext(views)).members == (member,)
    await views.aclose()
    await client.leave(member.worker_id)
    assert directory.members == {}
    await server.stop(0)
    with pytest.raises(LinkBroken):
        await client.renew(member)
    await client.close()


# --- what goes wrong ------------------------------------------------------------------------------


async def never():
    await asyncio.Event().wait()


async def test_a_message_that_cannot_be_encoded_breaks_the_link_for_whoever_sends():
    tried = asyncio.Event()

    def encode(_):
        tried.set()
        raise ValueError("epoch out of range")

    link = Link(peer="p", read=never, write=never, encode=encode, decode=lambda x: x)
    link.send("one")
    await asyncio.wait_for(tried.wait(), 5)
    await asyncio.wait({link._writer}, timeout=5)
    with pytest.raises(LinkBroken, match="out of range"):
        link.send("two")
    await link.close()


async def test_closing_a_link_does_not_swallow_the_cancellation_of_who_closes():
    async def stubborn(_):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)

    link = Link(peer="p", read=never, write=stubborn, encode=lambda x: x, decode=lambda x: x)
    link.send("one")
    link._broken = "too slow"  # so that nothing is flushed
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def test_a_worker_whose_hello_makes_no_sense_is_an_unreachable_worker(monkeypatch):
    class Odd(EchoWorker):
        async def serve_router(self, router_id, link):
            link._encode = lambda _: pb.WorkerEnvelope()  # no known message: a later version's, say
            link.send(HELLO)
            async for _ in link:
                pass

    served, port = await start_server("127.0.0.1", 0, worker=Odd())
    with pytest.raises(LinkBroken):
        async with worker_session(f"127.0.0.1:{port}", R):
            pass
    await served.stop(0)


async def test_a_view_that_makes_no_sense_is_a_directory_that_is_away(monkeypatch):
    """A later version's directory may know roles that this router does not: it goes on with what it knows."""

    class Directory:
        async def watch(self, _):
            yield m.MembershipView("a", 1, ())
            await asyncio.Event().wait()

    def odd(_):
        raise WireError("role 9")

    served, port = await start_server("127.0.0.1", 0, directory=Directory())
    monkeypatch.setattr(client.mapping, "membership_view_from_pb", odd)
    directory = DirectoryClient(f"127.0.0.1:{port}")
    with pytest.raises(LinkBroken, match="role 9"):
        async for _ in directory.watch(RouterMember(R)):
            pass
    await directory.close()
    await served.stop(0)


async def test_a_caller_that_never_says_hello_is_hung_up_on(served, monkeypatch):
    monkeypatch.setattr(serving, "HELLO_S", 0.05)
    _, address, _ = served
    async with client.channel_to(address, Party.WORKER) as channel:
        for stub in (client.pb_grpc.WorkerStub, client.pb_grpc.PeerStub):
            call = stub(channel).Session()
            code = await asyncio.wait_for(call.code(), 5)
            assert code is client.grpc.StatusCode.INVALID_ARGUMENT


def test_a_peer_that_comes_back_is_dialled_within_seconds():
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.max_reconnect_backoff_ms"] <= 2000
    assert options["grpc.min_reconnect_backoff_ms"] <= 5000


async def test_an_unreachable_peer_is_named_once():
    address = "127.0.0.1:9"
    with pytest.raises(LinkBroken) as caught:
        await worker_status(address)
    assert str(caught.value).count(address) == 1
    assert "refused" in str(caught.value)
