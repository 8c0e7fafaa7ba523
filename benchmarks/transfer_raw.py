"""The bare mechanisms that the transfer bench compares with.

Blocks are rows of a uint8 array [count, block_bytes]. `read(order)` copies the source's row order[i] to our
row i and returns when all bytes are there.
"""

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferFailed
from kv_transfer.backend import KVMemory
from kv_transfer.backends.cma_memory import IOV_MAX, ProcessMemory
from kv_transfer.backends.nixl import NixlOffer
from kv_transfer.backends.nixl_agent import NixlAgent

READ_TIMEOUT_S = 30.0
SOCKET_BYTES = 4 * 2**20
IDS = struct.Struct("<I")

Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RawSourceOffer:
    pid: int
    address: int
    shared_path: str
    """The path of the shared memory file, through /proc."""
    port: int


class RawSource:
    """Offers `blocks` to the readers here: directly, as a copy in shared memory, and over a socket."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._fd = os.memfd_create("bench blocks")
        os.ftruncate(self._fd, blocks.nbytes)
        shared = mmap.mmap(self._fd, blocks.nbytes)
        np.frombuffer(shared, np.uint8)[:] = blocks.ravel()
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.offer = RawSourceOffer(os.getpid(), blocks.ctypes.data, path, port)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        while head := sock.recv(IDS.size, socket.MSG_WAITALL):
            (count,) = IDS.unpack(head)
            ids = np.frombuffer(sock.recv(4 * count, socket.MSG_WAITALL), np.uint32)
            for block in ids.tolist():
                sock.sendall(self._blocks[block].data)


class TcpReader:
    def __init__(self, into: Blocks, offer: RawSourceOffer) -> None:
        self._into = into
        self._sock = socket.create_connection(("127.0.0.1", offer.port), timeout=READ_TIMEOUT_S)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)

    def read(self, order: Sequence[int]) -> None:
        self._sock.sendall(IDS.pack(len(order)) + np.array(order, np.uint32).tobytes())
        left = self._into.data.cast("B")[: len(order) * self._into.shape[1]]
        while left:
            count = self._sock.recv_into(left)
            if not count:
                raise TransferFailed("the bench's source closed its connection")
            left = left[count:]

    def close(self) -> None:
        self._sock.close()


class SharedReader:
    """Copies from memory that both processes have mapped."""

    def __init__(self, into: Blocks, offer: RawSourceOffer) -> None:
        self._into = into
        fd = os.open(offer.shared_path, os.O_RDWR)
        self._map = mmap.mmap(fd, into.nbytes)
        os.close(fd)
        self._shared = np.frombuffer(self._map, np.uint8).reshape(into.shape)

    def read(self, order: Sequence[int]) -> None:
        for to, block in enumerate(order):
            self._into[to] = self._shared[block]

    def close(self) -> None:
        del self._shared
        self._map.close()


class ProcessReader:
    """process_vm_readv on one thread, with as many ranges per call as possible."""

    def __init__(self, into: Blocks, offer: RawSourceOffer) -> None:
        self._into, self._offer = into, offer
        self._process = ProcessMemory()

    def read(self, order: Sequence[int]) -> None:
        size = self._into.shape[1]
        for start in range(0, len(order), IOV_MAX):
            part = np.array(order[start : start + IOV_MAX], np.uint64)
            remote = np.stack(
                [self._offer.address + part * size, np.full(len(part), size, np.uint64)], axis=1
            )
            local = np.array([[self._into.ctypes.data + start * size, len(part) * size]], np.uint64)
            self._process.read(self._offer.pid, local, np.ascontiguousarray(remote, np.uint64))

    def close(self) -> None:
        pass


class NixlReader:
    """Prepared descriptor lists and one request, posted and polled without pause."""

    def __init__(self, memory: KVMemory, offer: NixlOffer) -> None:
        self._agent = NixlAgent("bench-raw")
        self._agent.register(memory.base_address, memory.pool_bytes)
        size, count = memory.block_bytes, memory.block_count
        self._local = self._agent.pieces(None, memory.base_address, size, count)
        self._agent.add_remote(offer.metadata)
        self._remote = self._agent.pieces(offer.agent_name, offer.base_address, size, count)
        self._places = np.arange(count, dtype=np.int32)

    def read(self, order: Sequence[int]) -> None:
        request = self._agent.make_read(self._local, self._places, self._remote, np.array(order, np.int32))
        is_done = self._agent.post(request)
        deadline_s = time.monotonic() + READ_TIMEOUT_S
        while not is_done:
            if time.monotonic() > deadline_s:
                raise TransferFailed("the raw read ran out of time")
            is_done = self._agent.is_done(request)
        self._agent.release(request)

    def close(self) -> None:
        self._agent.release_pieces(self._local)
        self._agent.release_pieces(self._remote)
        self._agent.close()
