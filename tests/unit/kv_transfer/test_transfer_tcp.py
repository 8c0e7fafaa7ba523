"""The TCP source against readers that do not keep to the protocol, and pools behind staging."""

import asyncio
import contextlib
import socket
import struct
import threading

import msgspec
import numpy as np
import pytest

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from kv_transfer.backend import KVMemory
from kv_transfer.backends import tcp_frames, tcp_server
from kv_transfer.backends.tcp import TcpBackend, TcpOffer, parse_offer
from kv_transfer.backends.tcp_frames import HELLO, MAGIC, REPLY, REQUEST, VERSION, WELCOME

BLOCK_BYTES, BLOCK_COUNT = 64, 8
TIMEOUT_S = 10.0


class Source:
    def __init__(self, *, fill=5, **options):
        self.blocks = np.full((BLOCK_COUNT, BLOCK_BYTES), fill, np.uint8)
        table = np.zeros(BLOCK_COUNT, np.uint64)
        device = options.pop("device", "cpu")
        self.memory = KVMemory(self.blocks.ctypes.data, BLOCK_BYTES, BLOCK_COUNT, table, device)
        self.backend = TcpBackend("source.1", self.memory, host="127.0.0.1", **options)

    @property
    def offer(self):
        return msgspec.msgpack.decode(self.backend.offer(), type=TcpOffer)

    async def __aenter__(self):
        await self.backend.start()
        return self

    async def __aexit__(self, *_):
        await self.backend.close()


def say(offer, data):
    """What the source answers before it hangs up."""
    with socket.create_connection((offer.host, offer.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(data)
        heard = b""
        try:
            while part := sock.recv(4096):
                heard += part
        except ConnectionResetError:
            pass
        return heard


def greeting(offer, *, magic=MAGIC, version=VERSION, token=None):
    return HELLO.pack(magic, version, token or offer.token)


async def test_a_stranger_gets_no_byte_of_the_pool():
    async with Source() as source:
        request = REQUEST.pack(tcp_frames.READ, 1) + struct.pack("<I", 0)
        for hello in (
            greeting(source.offer, token=b"x" * 16),
            greeting(source.offer, magic=b"HTTP"),
            b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
        ):
            assert await asyncio.to_thread(say, source.offer, hello + request) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST.pack(9, 1) + struct.pack("<I", 0),
        REQUEST.pack(tcp_frames.READ, 0),
        REQUEST.pack(tcp_frames.READ, 2**32 - 1),
        REQUEST.pack(tcp_frames.READ, 1) + struct.pack("<I", BLOCK_COUNT),
        REQUEST.pack(tcp_frames.READ, 1) + struct.pack("<I", 2**32 - 1),
        REQUEST.pack(tcp_frames.READ_RANGES, 1) + struct.pack("<II", 0, 0),
        REQUEST.pack(tcp_frames.READ_RANGES, 1) + struct.pack("<II", 0, 2**32 - 1),
        REQUEST.pack(tcp_frames.READ_RANGES, 1) + struct.pack("<IIQQ", 0, 1, 2**64 - 1, 2),
        REQUEST.pack(tcp_frames.READ_RANGES, 1) + struct.pack("<IIQQ", 0, 1, 0, 2**64 - 1),
        # Each range is inside a block, and together they are many blocks.
        REQUEST.pack(tcp_frames.READ_RANGES, 1) + struct.pack("<II", 0, 99) + struct.pack("<QQ", 0, 64) * 99,
    ],
)
async def test_a_malformed_request_ends_its_connection_and_no_other(request_bytes):
    async with Source() as source, Source(fill=0) as reader:
        await reader.backend.add_peer("source.1", source.backend.offer())
        heard = await asyncio.to_thread(say, source.offer, greeting(source.offer) + request_bytes)
        assert heard == WELCOME.pack(MAGIC, VERSION)
        assert await reader.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S) == [0]


async def test_another_protocol_version_is_incompatible():
    async with Source() as source, Source() as reader:
        later = msgspec.structs.replace(source.offer, version=2)
        with pytest.raises(IncompatiblePeer):
            await reader.backend.add_peer("source.1", msgspec.msgpack.encode(later))
        heard = await asyncio.to_thread(say, source.offer, greeting(source.offer, version=VERSION + 1))
        assert heard == WELCOME.pack(MAGIC, VERSION)


async def test_a_wrong_token_or_a_closed_port_cannot_be_added():
    async with Source() as source, Source() as reader:
        stolen = msgspec.structs.replace(source.offer, token=b"0" * 16)
        with pytest.raises(TransferFailed):
            await reader.backend.add_peer("source.1", msgspec.msgpack.encode(stolen))
        offer = source.backend.offer()
        await source.backend.close()
        with pytest.raises(TransferFailed):
            await reader.backend.add_peer("source.1", offer)


class FakeDevice:
    """Device memory is an array that only `staging` may touch."""

    def __init__(self, fill):
        self.blocks = np.full((BLOCK_COUNT, BLOCK_BYTES), fill, np.uint8)

    def to_host(self, blocks, into):
        np.frombuffer(into, np.uint8).reshape(-1, BLOCK_BYTES)[:] = self.blocks[list(blocks)]

    def to_device(self, data, blocks):
        self.blocks[list(blocks)] = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES)


async def test_device_blocks_travel_through_staging_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr(tcp_frames, "STAGING_BYTES", 3 * BLOCK_BYTES)
    there, here = FakeDevice(0), FakeDevice(0)
    there.blocks[:] = np.arange(BLOCK_COUNT)[:, None]
    async with (
        Source(device="cuda:0", staging=there) as source,
        Source(device="cuda:0", staging=here) as reader,
    ):
        await reader.backend.add_peer("source.1", source.backend.offer())
        order = [7, 0, 3, 2, 1, 6, 5]
        await reader.backend.read("source.1", order, list(range(7)), timeout_s=TIMEOUT_S)
        assert here.blocks[:7, 0].tolist() == order
        assert not here.blocks[7].any()


async def test_device_blocks_without_staging_are_a_setup_error():
    source = Source(device="cuda:0")
    with pytest.raises(SetupError, match="staging"):
        await source.backend.start()
    await source.backend.close()


async def test_an_address_that_is_not_ours_is_a_setup_error():
    source = Source()
    backend = TcpBackend("w.1", source.memory, host="192.0.2.1")
    with pytest.raises(SetupError, match=r"192\.0\.2\.1"):
        await backend.start()
    await backend.close()


async def test_more_blocks_than_one_request_holds_are_asked_for_in_turn(monkeypatch):
    monkeypatch.setattr("kv_transfer.backends.tcp.REQUEST_BLOCKS_MAX", 3)
    async with Source() as source, Source(fill=0) as reader:
        source.memory.generations[:] = np.arange(BLOCK_COUNT)
        await reader.backend.add_peer("source.1", source.backend.offer())
        order = [4, 2, 0, 1, 3, 7, 6]
        assert await reader.backend.read("source.1", order, order, timeout_s=TIMEOUT_S) == order
        assert (reader.blocks[order] == 5).all()
        assert not reader.blocks[5].any()


class LyingSource:
    """Greets well, hears one request, answers what it is told to, and waits for the reader to leave."""

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.offer = msgspec.msgpack.encode(
            TcpOffer(1, "127.0.0.1", self._listener.getsockname()[1], b"0" * 16, BLOCK_BYTES, BLOCK_COUNT)
        )
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        sock, _ = self._listener.accept()
        with sock:
            sock.recv(HELLO.size, socket.MSG_WAITALL)
            sock.sendall(WELCOME.pack(MAGIC, VERSION))
            sock.recv(4096)
            sock.sendall(self._answer)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join(TIMEOUT_S)
        self._listener.close()
        assert not self._thread.is_alive()


@pytest.mark.parametrize("sent", [0, 1, BLOCK_BYTES // 2, 2 * BLOCK_BYTES])
async def test_a_source_that_stops_half_way_costs_the_timeout_and_is_settled(sent):
    answer = REPLY.pack(2 * BLOCK_BYTES) + b"x" * sent
    with LyingSource(answer) as source:
        async with Source() as reader:
            await reader.backend.add_peer("source.1", source.offer)
            with pytest.raises(TransferFailed) as failed:
                await reader.backend.read("source.1", [0, 1], [0, 1], timeout_s=0.05)
            assert not failed.value.may_still_land
            await reader.backend.settled([0, 1])


async def test_an_answer_of_another_size_is_refused_before_a_byte_of_it_is_taken():
    with LyingSource(REPLY.pack(2**40) + b"x" * 1000) as source:
        async with Source() as reader:
            await reader.backend.add_peer("source.1", source.offer)
            with pytest.raises(IncompatiblePeer):
                await reader.backend.read("source.1", [0], [0], timeout_s=TIMEOUT_S)
            assert (reader.blocks == 5).all()


async def test_strangers_that_wait_keep_no_reader_out(monkeypatch):
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 4)
    async with Source() as source, Source(fill=0) as reader:
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                address = (source.offer.host, source.offer.port)
                stack.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
            await reader.backend.add_peer("source.1", source.backend.offer())
            assert await reader.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S) == [0]


async def test_readers_that_are_idle_keep_no_other_out_and_go_on_when_they_read_again(monkeypatch):
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 2)
    async with Source() as source, Source(fill=0) as first, Source(fill=0) as second, Source(fill=0) as third:
        readers = (first, second, third)
        for reader in readers:
            await reader.backend.add_peer("source.1", source.backend.offer())
        for _ in range(2):
            for reader in readers:
                assert await reader.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S) == [0]
                assert (reader.blocks[1] == 5).all()


async def test_a_reader_that_comes_while_every_connection_is_busy_waits_for_one(monkeypatch):
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 2)
    busy, has_come = threading.Barrier(3), threading.Event()
    answer, make_room = tcp_server.TcpServer._answer, tcp_server.TcpServer._make_room

    def answer_late(server, line, head):
        if not has_come.is_set():
            busy.wait(TIMEOUT_S)
            has_come.wait(TIMEOUT_S)
        answer(server, line, head)

    def make_room_and_say_so(server):
        if len(server._lines) == 2:
            has_come.set()
        return make_room(server)

    async with Source() as source, Source(fill=0) as first, Source(fill=0) as second, Source(fill=0) as third:
        monkeypatch.setattr(tcp_server.TcpServer, "_answer", answer_late)
        for reader in (first, second):
            await reader.backend.add_peer("source.1", source.backend.offer())
        reads = [
            asyncio.create_task(reader.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S))
            for reader in (first, second)
        ]
        await asyncio.to_thread(busy.wait, TIMEOUT_S)
        monkeypatch.setattr(tcp_server.TcpServer, "_make_room", make_room_and_say_so)
        await third.backend.add_peer("source.1", source.backend.offer())
        assert await third.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S) == [0]
        assert await asyncio.gather(*reads) == [[0], [0]]


@pytest.mark.parametrize("error", [OSError("it left"), RuntimeError("can't start new thread")])
async def test_a_connection_that_cannot_be_taken_up_does_not_end_the_server(monkeypatch, error):
    async with Source() as source, Source(fill=0) as reader:
        failures = [error, error]

        class Line(tcp_frames.Line):
            def __init__(self, sock, *, deadline_s):
                super().__init__(sock, deadline_s=deadline_s)
                if failures:
                    raise failures.pop()

        monkeypatch.setattr(tcp_server, "Line", Line)
        for _ in range(2):
            assert await asyncio.to_thread(say, source.offer, b"") == b""
        await reader.backend.add_peer("source.1", source.backend.offer())
        assert await reader.backend.read("source.1", [1], [1], timeout_s=TIMEOUT_S) == [0]
        assert not failures


@pytest.mark.parametrize("host", ["", "a\0b", "x" * 300, "-h", "a b", "\n", "é", "a..b"])
async def test_an_offer_of_an_address_that_cannot_be_one_is_refused(host):
    async with Source() as source, Source() as reader:
        offer = msgspec.structs.replace(source.offer, host=host)
        with pytest.raises((IncompatiblePeer, TransferFailed)):
            await reader.backend.add_peer("source.1", msgspec.msgpack.encode(offer))


def test_an_offer_with_text_that_is_no_text_is_refused():
    whole = msgspec.msgpack.encode(TcpOffer(1, "host", 1, b"0" * 16, BLOCK_BYTES, BLOCK_COUNT))
    with pytest.raises(IncompatiblePeer):
        parse_offer(whole.replace(b"host\xa4host", b"host\xa4\xff\xff\xff\xff"), block_bytes=BLOCK_BYTES)
