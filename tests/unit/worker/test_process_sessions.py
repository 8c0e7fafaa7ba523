"""Sessions over real gRPC, in one process: routers, readers and sources, with cores that only listen."""

import asyncio
import contextlib

import pytest

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.ids import ReadId, RouterId, SequenceId, WorkerId
from baton.core.messages import (
    KVGrant,
    KVPart,
    KVReleased,
    KVRequest,
    LoadReport,
    PeerHello,
    PeerRef,
    ResyncBlocks,
    Role,
    WorkerHello,
)
from baton.wire.client import drain_worker, set_worker_role, worker_session, worker_status
from baton.wire.link import LinkBroken
from baton.wire.server import start_server
from baton.wire.services import WorkerStatusReply
from decode_worker.reader import KVReader
from kv_transfer.read import BlockRead, ReadDone, ReadSettled
from prefill_worker.service import ReaderSessions
from worker.service import RouterSessions

ROUTER = RouterId("r")
SOURCE = WorkerId("prefill-0.a")
HELLO = WorkerHello(SOURCE, Role.PREFILL, "f", "m", 16, 8, 128)
REPORT = LoadReport(Role.PREFILL, False, 8, 0, 0, 0, 0.0)
DRAINING = LoadReport(Role.PREFILL, True, 8, 0, 0, 0, 0.0)
ASK = KVRequest(SequenceId("s/0"), 1, 0)
GRANT = KVGrant(SequenceId("s/0"), 1, 0, (1, 2), (5, 6), 1.0)
WAIT_S = 10.0


PARTS = (KVPart(0, 2, 0, 4, {"nixl": b"offer"}), KVPart(2, 2, 0, 4, {"nixl": b"other"}))


class Ear:
    """Every sink in one; `until` waits for what is wanted among what was heard."""

    def __init__(self):
        self.heard, self._more = [], asyncio.Event()
        self.on_join = lambda router_id: None

    def _note(self, *what):
        self.heard.append(what)
        self._more.set()

    async def until(self, *what):
        async with asyncio.timeout(WAIT_S):
            while what not in self.heard:
                self._more.clear()
                await self._more.wait()

    def router_joined(self, router_id):
        self._note("joined", router_id)
        self.on_join(router_id)

    def from_router(self, router_id, message):
        self._note("router", router_id, message)

    def router_lost(self, router_id):
        self._note("router lost", router_id)

    def drain(self):
        self._note("drain")

    def set_role(self, role, drain_s):
        self._note("role", role, drain_s)

    def from_reader(self, reader, message):
        self._note("reader", reader, message)

    def reader_lost(self, reader):
        self._note("reader lost", reader)

    def from_owner(self, source, message):
        self._note("source", source, message)

    def owner_lost(self, source, message):
        self._note("source lost", source)
        self.reason = message

    def read_event(self, event):
        self._note("read", event)


def status():
    return WorkerStatusReply(SOURCE, Role.PREFILL, False, "f", {"held_blocks": 0.0})


def peer_hello(worker_id=SOURCE, fingerprint="f"):
    return PeerHello(worker_id, fingerprint, PARTS)


@contextlib.asynccontextmanager
async def serving(**handlers):
    server, port = await start_server("127.0.0.1", 0, **handlers)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def worker():
    ear = Ear()
    sessions = RouterSessions(sink=ear, status=status, set_role=ear.set_role)
    ear.on_join = lambda router_id: sessions.send(router_id, HELLO)
    async with serving(worker=sessions) as (_, address):
        yield ear, sessions, address


async def test_a_router_is_greeted_heard_and_missed():
    async with worker() as (ear, sessions, address):
        async with worker_session(address, ROUTER) as (hello, link):
            assert hello == HELLO
            link.send(ResyncBlocks())
            await ear.until("router", ROUTER, ResyncBlocks())
            sessions.send(ROUTER, REPORT)
            assert await anext(link) == REPORT
        await ear.until("router lost", ROUTER)
        sessions.send(ROUTER, REPORT)  # nobody is there: dropped
        assert sessions.router_count == 0


async def test_a_second_session_of_a_router_replaces_the_first_whose_end_is_told_before():
    async with (
        worker() as (ear, sessions, address),
        worker_session(address, ROUTER) as (_, first),
        worker_session(address, ROUTER) as (_, second),
    ):
        assert ear.heard == [("joined", ROUTER), ("router lost", ROUTER), ("joined", ROUTER)]
        sessions.send(ROUTER, REPORT)
        assert await anext(second) == REPORT
        with pytest.raises((LinkBroken, StopAsyncIteration)):
            await asyncio.wait_for(anext(first), WAIT_S)
        assert sessions.router_count == 1


async def test_a_router_that_lags_still_hears_that_the_worker_drains_before_the_session_ends():
    """A router writes to a session that its worker has ended, before it has read what came last."""
    async with worker() as (_, sessions, address), worker_session(address, ROUTER) as (_, link):
        sessions.send(ROUTER, DRAINING)
        ending = asyncio.create_task(sessions.end(WAIT_S))
        for _ in range(3):
            with contextlib.suppress(LinkBroken):
                link.send(ResyncBlocks())
            await worker_status(address)  # what was under way has arrived by now
        assert [message async for message in link] == [DRAINING]
    await asyncio.wait_for(ending, WAIT_S / 2)


async def test_a_router_that_reads_nothing_does_not_hold_up_the_end_of_a_worker():
    async with worker() as (ear, sessions, address), worker_session(address, ROUTER):
        await sessions.end(0.01)
        assert ("router lost", ROUTER) in ear.heard
        assert sessions.router_count == 0


async def test_a_worker_that_ends_takes_no_new_session():
    async with worker() as (ear, sessions, address):
        await sessions.end(WAIT_S)
        with pytest.raises(LinkBroken, match="before saying hello"):
            async with worker_session(address, ROUTER):
                pass
        assert ear.heard == []


async def test_a_router_that_does_not_read_is_dropped_and_the_worker_does_not_wait():
    async with worker() as (ear, sessions, address), worker_session(address, ROUTER):
        for _ in range(100_000):  # more than any buffer on the way holds
            sessions.send(ROUTER, REPORT)
            if sessions.router_count == 0:
                break
        assert ("router lost", ROUTER) in ear.heard


async def test_operators_calls_reach_the_worker():
    async with worker() as (ear, _, address):
        await drain_worker(address)
        await set_worker_role(address, Role.AGGREGATED, drain_s=2.5)
        assert ear.heard == [("drain",), ("role", Role.AGGREGATED, 2.5)]
        assert (await worker_status(address)) == status()


class Transfer:
    """Remembers peers; reads as it is told."""

    def __init__(self, outcome=None, add_error=None):
        self.peers, self.outcome, self.add_error = {}, outcome or ReadDone(ReadId(3)), add_error
        self.landed = asyncio.Event()

    async def add_peer(self, peer, offer):
        if self.add_error:
            raise self.add_error
        self.peers[peer] = offer

    async def remove_peer(self, peer):
        self.peers.pop(peer, None)

    async def read_checked(self, read):
        return self.outcome

    async def settled(self, local_blocks):
        await self.landed.wait()


@contextlib.asynccontextmanager
async def peers(*, transfer=None, fingerprint="f", source_id=SOURCE):
    """An owner that serves, and a reader that reads from it."""
    source_ear, reader_ear = Ear(), Ear()
    readers = ReaderSessions(hello=lambda: peer_hello(source_id, fingerprint), sink=source_ear)
    kv_reader = KVReader(
        hello=lambda: peer_hello(WorkerId("decode-0.a")),
        transfer=transfer or Transfer(),
        sink=reader_ear,
        spawn=asyncio.create_task,
        connect_timeout_s=2.0,
    )
    async with serving(peer=readers) as (server, address):
        try:
            yield source_ear, readers, reader_ear, kv_reader, PeerRef(SOURCE, address), server
        finally:
            kv_reader.close()


async def test_asks_arrive_in_order_and_grants_come_back_over_one_session():
    transfer = Transfer()
    async with peers(transfer=transfer) as (source_ear, readers, reader_ear, kv_reader, ref, _):
        asks = [KVRequest(SequenceId("s/0"), 1, 0, n) for n in range(5)]
        for ask in asks:
            kv_reader.send(ref, ask)
        await source_ear.until("reader", "decode-0.a", asks[-1])
        assert [heard[2] for heard in source_ear.heard] == asks
        assert transfer.peers == {SOURCE: PARTS}
        readers.send(WorkerId("decode-0.a"), GRANT)
        await reader_ear.until("source", SOURCE, GRANT)
        assert (readers.reader_count, kv_reader.owner_count) == (1, 1)


async def test_a_source_that_ends_is_lost_once_and_the_next_message_tries_again():
    transfer = Transfer()
    async with peers(transfer=transfer) as (source_ear, _, reader_ear, kv_reader, ref, server):
        kv_reader.send(ref, ASK)
        await source_ear.until("reader", "decode-0.a", ASK)
        await server.stop(0)
        await reader_ear.until("source lost", SOURCE)
        kv_reader.send(ref, KVReleased(SequenceId("s/0"), 1, False))
        reader_ear.heard.clear()
        await reader_ear.until("source lost", SOURCE)  # nobody listens there any more
        assert transfer.peers == {}


@pytest.mark.parametrize(
    "trouble",
    [
        {"fingerprint": "another"},
        {"source_id": WorkerId("prefill-0.b")},
        {"transfer": Transfer(add_error=IncompatiblePeer("block size"))},
        {"transfer": Transfer(add_error=TransferFailed("no route"))},
    ],
    ids=["fingerprint", "another life", "no common transfer", "transfer cannot connect"],
)
async def test_a_source_that_cannot_be_read_from_is_lost_with_a_reason(trouble):
    async with peers(**trouble) as (_, _, reader_ear, kv_reader, ref, _):
        kv_reader.send(ref, ASK)
        await reader_ear.until("source lost", SOURCE)
        assert reader_ear.reason
        assert kv_reader.owner_count == 0


async def test_a_lost_reader_is_reported_to_the_source():
    async with peers() as (source_ear, readers, _, kv_reader, ref, _):
        kv_reader.send(ref, ASK)
        await source_ear.until("reader", "decode-0.a", ASK)
        kv_reader.close()
        await source_ear.until("reader lost", "decode-0.a")
        readers.send(WorkerId("decode-0.a"), GRANT)  # dropped
        assert readers.reader_count == 0


async def test_a_read_is_answered_once_and_settles_later_if_bytes_may_yet_land():
    transfer = Transfer(ReadDone(ReadId(3), "out of time", is_settled=False))
    async with peers(transfer=transfer) as (_, _, reader_ear, kv_reader, _, _):
        kv_reader.start_read(BlockRead(ReadId(3), SOURCE, (1,), (2,), (5,), 1.0, 64))
        await reader_ear.until("read", transfer.outcome)
        assert ("read", ReadSettled(ReadId(3))) not in reader_ear.heard
        transfer.landed.set()
        await reader_ear.until("read", ReadSettled(ReadId(3)))
