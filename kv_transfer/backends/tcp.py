"""KV reads over plain TCP, for hosts without NIXL.

Reads run on a few threads with blocking sockets, straight into the pool (or through host staging for
device memory). A read out of time closes its connection, so it settles at once: nothing can land later.
"""

import asyncio
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import BlockStaging, KVMemory, check_blocks
from kv_transfer.backends.tcp_frames import (
    BLOCK_ID,
    GENERATION,
    HELLO,
    MAGIC,
    RANGE,
    RANGE_COUNT,
    READ,
    READ_RANGES,
    REPLY,
    REQUEST,
    REQUEST_BLOCKS_MAX,
    TOKEN_BYTES,
    VERSION,
    WELCOME,
    Line,
    Malformed,
    PoolIO,
    pool_io,
)
from kv_transfer.backends.tcp_server import TcpServer
from kv_transfer.layout import Ranges, check_ranges

_T = TypeVar("_T")

OFFER_VERSION = 1
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9_.:%-]{0,252}")
CONNECT_TIMEOUT_S = 3.0
READ_THREADS = 8
CALLS_MAX = 1024
"""Reads under way or waiting for a thread; one more fails."""


class TcpOffer(msgspec.Struct, frozen=True):
    version: int
    host: str
    port: int
    token: bytes
    block_bytes: int
    block_count: int


@dataclass(slots=True, eq=False)
class _TcpPeer:
    worker_id: WorkerId
    offer: TcpOffer
    idle: list[Line] = field(default_factory=list[Line])
    is_removed: bool = False


@dataclass(slots=True, eq=False)
class _TcpRead:
    """One read. The lock orders `abandon` with the thread's taking up of a connection."""

    peer: _TcpPeer
    blocks: frozenset[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    line: Line | None = None
    is_abandoned: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def abandon(self) -> None:
        with self.lock:
            self.is_abandoned = True
            if self.line is not None:
                self.line.abort()

    def use(self, line: Line) -> None:
        with self.lock:
            self.line = line
            if self.is_abandoned:
                raise ConnectionError("given up")

    def let_go(self) -> None:
        with self.lock:
            self.line = None


class TcpBackend:
    """See `kv_transfer.backend.TransferBackend`. `host`: the address of this machine that peers reach."""

    name = "tcp"
    read_threads = READ_THREADS

    def __init__(
        self, worker_id: WorkerId, memory: KVMemory, *, host: str, staging: BlockStaging | None = None
    ) -> None:
        self._worker_id, self._memory, self._host = worker_id, memory, host
        self._staging = staging
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: TcpServer | None = None
        self._peers: dict[WorkerId, _TcpPeer] = {}
        self._calls: set[_TcpRead] = set()
        self._idle_lock = threading.Lock()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._io = await asyncio.to_thread(self._make_io)
        self._threads = ThreadPoolExecutor(self.read_threads, thread_name_prefix=f"kv {self.name} read")
        self._server = TcpServer(self._memory, self._io, host=self._host, token=self._token)

    def _make_io(self) -> PoolIO:
        """Raises SetupError."""
        return pool_io(self._memory, self._staging)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for peer in list(self._peers):
            await self.remove_peer(peer)
        await asyncio.to_thread(server.close)
        await asyncio.to_thread(self._threads.shutdown)

    def offer(self) -> bytes:
        assert self._server is not None
        memory = self._memory
        return msgspec.msgpack.encode(
            TcpOffer(
                version=OFFER_VERSION,
                host=self._host,
                port=self._server.port,
                token=self._token,
                block_bytes=memory.block_bytes,
                block_count=memory.block_count,
            )
        )

    # --- peers ------------------------------------------------------------------------------------

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        parsed = parse_offer(offer, block_bytes=block_bytes or self._memory.block_bytes)
        current = self._peers.get(peer)
        if current is not None and current.offer == parsed:
            return
        await self.remove_peer(peer)
        fresh = _TcpPeer(peer, parsed)
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        line = await self._run(_TcpRead(fresh, frozenset()), lambda call: connect(call, self._io, deadline_s))
        fresh.idle.append(line)
        self._peers[peer] = fresh

    async def remove_peer(self, peer: WorkerId) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        with self._idle_lock:
            known.is_removed = True
            idle, known.idle = known.idle, []
        for line in idle:
            line.close()
        for call in self._calls:
            if call.peer is known:
                call.abandon()

    # --- reads ------------------------------------------------------------------------------------

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
        ranges: Ranges = (),
    ) -> list[int]:
        known = self._known(peer)
        check_blocks(self._memory, peer, known.offer.block_count, source_blocks, local_blocks)
        check_ranges(ranges, source_bytes=known.offer.block_bytes, local_bytes=self._memory.block_bytes)
        return await self._ask(known, source_blocks, local_blocks, timeout_s, ranges)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        wanted = frozenset(local_blocks)
        for call in list(self._calls):
            if call.is_abandoned and call.blocks & wanted:
                await call.ended.wait()

    def _known(self, peer: WorkerId) -> _TcpPeer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferFailed(f"{peer} is not a TCP peer")
        return known

    async def _ask(
        self,
        peer: _TcpPeer,
        source: Sequence[int],
        local: Sequence[int],
        timeout_s: float,
        ranges: Ranges = (),
    ) -> list[int]:
        deadline_s = time.monotonic() + timeout_s
        call = _TcpRead(peer, frozenset(local))
        return await self._run(call, lambda call: self._exchange(call, source, local, ranges, deadline_s))

    async def _run(self, call: _TcpRead, work: "Callable[[_TcpRead], _T]") -> _T:
        """`work` on a thread. It keeps its own deadline; cancelling cuts its connection."""
        if self._server is None or len(self._calls) >= CALLS_MAX:
            raise TransferFailed("TCP transfers are closed or overfull")
        self._calls.add(call)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, call)
        running.add_done_callback(lambda ended: self._end(call, ended))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            call.abandon()
            raise
        except Malformed as error:
            raise IncompatiblePeer(f"{call.peer.worker_id}: {error}") from error
        except (OSError, UnicodeError) as error:  # the latter: a host's name that cannot be one
            raise TransferFailed(f"{call.peer.worker_id}: {error}") from error

    def _end(self, call: _TcpRead, running: "asyncio.Future[_T]") -> None:
        self._calls.discard(call)
        call.ended.set()
        if running.cancelled() or running.exception() is not None:  # looked at: a cancelled reader does not
            return
        if call.is_abandoned and isinstance(made := running.result(), Line):
            made.close()  # nobody takes the connection up

    # --- on the read threads ----------------------------------------------------------------------

    def _exchange(
        self,
        call: _TcpRead,
        source: Sequence[int],
        local: Sequence[int],
        ranges: Ranges,
        deadline_s: float,
    ) -> list[int]:
        """Raises OSError (TimeoutError and ConnectionError are)."""
        kept = self._take_kept(call, deadline_s)
        if kept is not None:
            try:
                return self._over(kept, call, source, local, ranges)
            except Malformed:
                raise
            except ConnectionError:
                if call.is_abandoned:
                    raise
                # The source may have ended a connection that was idle. A new one shows whether it is there.
        return self._over(connect(call, self._io, deadline_s), call, source, local, ranges)

    def _over(
        self, line: Line, call: _TcpRead, source: Sequence[int], local: Sequence[int], ranges: Ranges
    ) -> list[int]:
        generations: list[int] = []
        try:
            for start in range(0, len(source), REQUEST_BLOCKS_MAX):
                part = slice(start, start + REQUEST_BLOCKS_MAX)
                generations += self._one_request(line, source[part], local[part], ranges)
        except BaseException:
            line.close()
            raise
        finally:
            call.let_go()
        self._keep(call.peer, line)
        return generations

    def _one_request(
        self, line: Line, source: Sequence[int], local: Sequence[int], ranges: Ranges
    ) -> list[int]:
        operation = READ_RANGES if ranges else READ
        tail = b""
        if operation == READ_RANGES:
            spans = np.array([(r.source, r.length) for r in ranges], RANGE)
            tail = RANGE_COUNT.pack(len(ranges)) + spans.tobytes()
        line.send(REQUEST.pack(operation, len(source)) + np.array(source, BLOCK_ID).tobytes() + tail)
        (payload_bytes,) = REPLY.unpack(line.take(REPLY.size))
        block_bytes = sum(r.length for r in ranges) or self._memory.block_bytes
        if payload_bytes != len(local) * block_bytes:
            raise Malformed(f"an answer of {payload_bytes} B to {len(source)} blocks")
        if ranges:
            self._io.receive_spans(line, local, [(r.local, r.length) for r in ranges])
        else:
            self._io.receive(line, local)
        return np.frombuffer(line.take(len(source) * GENERATION.itemsize), GENERATION).tolist()

    def _take_kept(self, call: _TcpRead, deadline_s: float) -> Line | None:
        with self._idle_lock:
            line = call.peer.idle.pop() if call.peer.idle else None
        if line is None:
            return None
        line.deadline_s = deadline_s
        try:
            call.use(line)
        except ConnectionError:
            line.close()
            raise
        return line

    def _keep(self, peer: _TcpPeer, line: Line) -> None:
        with self._idle_lock:
            if not peer.is_removed and len(peer.idle) < self.read_threads:
                peer.idle.append(line)
                return
        line.close()


def connect(call: _TcpRead, io: PoolIO, deadline_s: float) -> Line:
    """A line on which both sides have greeted. Raises OSError, and Malformed for another protocol."""
    offer = call.peer.offer
    left_s = max(1e-3, deadline_s - time.monotonic())
    sock = socket.create_connection((offer.host, offer.port), timeout=min(left_s, CONNECT_TIMEOUT_S))
    line = Line(sock, deadline_s=deadline_s)
    try:
        call.use(line)
        line.send(HELLO.pack(MAGIC, VERSION, offer.token))
        if (welcome := WELCOME.unpack(line.take(WELCOME.size))) != (MAGIC, VERSION):
            raise Malformed(f"{offer.host}:{offer.port} greets with {welcome}")
        io.greeted(line, is_source=False)
    except BaseException:
        call.let_go()
        line.close()
        raise
    return line


def parse_offer(offer: bytes, *, block_bytes: int) -> TcpOffer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than ours."""
    try:
        parsed = msgspec.msgpack.decode(offer, type=TcpOffer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompatiblePeer(f"malformed TCP offer: {error}") from error
    if parsed.version != OFFER_VERSION:
        raise IncompatiblePeer(f"TCP offer version {parsed.version}, not {OFFER_VERSION}")
    if parsed.block_bytes != block_bytes:
        raise IncompatiblePeer(f"blocks of {parsed.block_bytes} B, ours have {block_bytes} B")
    is_sane = 0 < parsed.port < 65_536 and 0 < parsed.block_count < 2**32 and len(parsed.token) == TOKEN_BYTES
    if not is_sane or not _HOST.fullmatch(parsed.host):
        raise IncompatiblePeer("malformed TCP offer: a field is out of range")
    return parsed
