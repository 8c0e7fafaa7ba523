"""The bytes of the TCP backend, and how they get from a pool to a socket and back.

    client: HELLO   magic, version, token                     once per connection
    server: WELCOME magic, version
    client: REQUEST operation, count; then count block ids (uint32, little-endian); READ_RANGES: then
            RANGE_COUNT, and so many pairs of offset and length (uint64) within each block
    server: REPLY   payload bytes; then the blocks, or their ranges, in the asked order; then their
                    generations (uint64, little-endian), read after the last block was sent

A side that gets anything else closes the connection.
"""

import contextlib
import ctypes
import socket
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from baton.core.errors import OtherMemory
from kv_transfer.backend import BlockStaging, KVMemory
from kv_transfer.layout import ascending_runs

MAGIC = b"BKVT"
VERSION = 2
TOKEN_BYTES = 16
HELLO = struct.Struct(f"<4sH{TOKEN_BYTES}s")
WELCOME = struct.Struct("<4sH")
REQUEST = struct.Struct("<BI")
RANGE_COUNT = struct.Struct("<I")
REPLY = struct.Struct("<Q")
READ, READ_RANGES = 1, 3
REQUEST_BLOCKS_MAX = 65_536
RANGES_MAX = 65_536
"""Largest number of byte ranges within one block."""
STAGING_BYTES = 8 * 2**20
BLOCK_ID = np.dtype("<u4")
GENERATION = np.dtype("<u8")
RANGE = np.dtype("<u8")

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A side whose host is gone is noticed after two minutes."""

Spans = Sequence[tuple[int, int]]
"""(offset, length) within a block."""


class Malformed(ConnectionError):
    """The other side does not speak this protocol."""


class Companion(Protocol):
    """What a line has beside its socket, and takes along when it ends."""

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Line:
    """A connected socket whose every operation ends by `deadline_s` (monotonic) with TimeoutError."""

    def __init__(self, sock: socket.socket, *, deadline_s: float) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.companion: Companion | None = None
        self.is_aborted = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def left_s(self, at_most_s: float) -> float:
        """Raises TimeoutError when it is none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("out of time")
        return min(left_s, at_most_s)

    def _arm(self) -> None:
        self.sock.settimeout(self.left_s(float("inf")))

    def send(self, data: bytes | memoryview) -> None:
        self._arm()
        self.sock.sendall(data)

    def fill(self, view: memoryview) -> None:
        """Receive exactly len(view) bytes into it. Raises ConnectionError if the other side ends."""
        while view:
            self._arm()
            count = self.sock.recv_into(view)
            if count == 0:
                raise ConnectionError("the other side closed the connection")
            view = view[count:]

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def abort(self) -> None:
        """May be called from any thread: whoever is in `send` or `fill` gets an OSError."""
        self.is_aborted = True
        with contextlib.suppress(OSError):  # not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.companion is not None:
            self.companion.abort()

    def close(self) -> None:
        self.sock.close()
        if self.companion is not None:
            self.companion.close()


class PoolIO(Protocol):
    """Blocks of the pool over a line, in the given order. Raises OSError."""

    def greeted(self, line: Line, *, is_source: bool) -> None:
        """Both sides of a new line have greeted."""
        ...

    def send(self, line: Line, blocks: Sequence[int]) -> None: ...

    def receive(self, line: Line, blocks: Sequence[int]) -> None: ...

    def send_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None: ...

    def receive_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None: ...


class HostPoolIO:
    """Straight between the pool and the kernel."""

    def greeted(self, line: Line, *, is_source: bool) -> None:
        pass

    def __init__(self, memory: KVMemory) -> None:
        raw = (ctypes.c_char * memory.pool_bytes).from_address(memory.base_address)
        self._view = memoryview(raw).cast("B")
        self._block_bytes = memory.block_bytes

    def _run(self, run: range) -> memoryview:
        return self._view[run.start * self._block_bytes : run.stop * self._block_bytes]

    def send(self, line: Line, blocks: Sequence[int]) -> None:
        for run in ascending_runs(blocks):
            line.send(self._run(run))

    def receive(self, line: Line, blocks: Sequence[int]) -> None:
        for run in ascending_runs(blocks):
            line.fill(self._run(run))

    def send_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        """A block's spans travel as one piece: they may be far smaller than a system call is worth."""
        for block in blocks:
            view = self._run(range(block, block + 1))
            line.send(b"".join(view[start : start + length] for start, length in spans))

    def receive_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        buffer = memoryview(bytearray(sum(length for _, length in spans)))
        for block in blocks:
            line.fill(buffer)
            view, at = self._run(range(block, block + 1)), 0
            for start, length in spans:
                view[start : start + length] = buffer[at : at + length]
                at += length


class StagedPoolIO:
    """IO of a pool through a bounded piece of host memory."""

    def greeted(self, line: Line, *, is_source: bool) -> None:
        pass

    def __init__(self, memory: KVMemory, staging: BlockStaging) -> None:
        self._staging = staging
        self._block_bytes = memory.block_bytes
        self._step = max(1, STAGING_BYTES // memory.block_bytes)

    def _parts(self, blocks: Sequence[int]) -> "list[Sequence[int]]":
        return [blocks[start : start + self._step] for start in range(0, len(blocks), self._step)]

    def send(self, line: Line, blocks: Sequence[int]) -> None:
        for part in self._parts(blocks):
            buffer = memoryview(bytearray(len(part) * self._block_bytes))
            self._staging.to_host(part, buffer)
            line.send(buffer)

    def receive(self, line: Line, blocks: Sequence[int]) -> None:
        for part in self._parts(blocks):
            buffer = memoryview(bytearray(len(part) * self._block_bytes))
            line.fill(buffer)
            self._staging.to_device(buffer, part)

    def send_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        view = memoryview(bytearray(self._block_bytes))
        for block in blocks:
            self._staging.to_host([block], view)
            line.send(b"".join(view[start : start + length] for start, length in spans))

    def receive_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        # Two sources may fill one block at the same time: whole blocks must not be put back.
        raise Malformed("TCP cannot read parts of blocks into device memory: use nixl or nccl")


def pool_io(memory: KVMemory, staging: BlockStaging | None) -> PoolIO:
    """Raises OtherMemory: device memory and no way to stage it."""
    if staging is not None:
        return StagedPoolIO(memory, staging)
    if memory.is_host:
        return HostPoolIO(memory)
    raise OtherMemory(f"TCP needs host staging to reach blocks on {memory.device}")
