"""A worker that can be read from, in a process of its own, and the reading side's helpers."""

import asyncio
import contextlib
import ctypes
import dataclasses
import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection

import numpy as np

from baton.core.ids import ReadId, WorkerId
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.backends.cuda_ipc import CudaIpcBackend
from kv_transfer.read import BlockRead
from kv_transfer.registry import BackendSite, build_backends
from tests.fake_device import FakeDevice, shareable_array
from tests.loopback_backend import LoopbackBackend, LoopbackFabric

BLOCK_BYTES = 4096
BLOCK_COUNT = 64
HOST = "127.0.0.1"


def cut(blocks, geometry, places):
    """A part of whole blocks, by plain indexing: uint8 [count, bytes]."""
    g, count = geometry, len(blocks)
    layers = slice(places.layers.start, places.layers.stop)
    heads = slice(places.heads.start, places.heads.stop)
    cells = (count, g.layer_count, g.planes, g.kv_head_count)
    content = blocks[:, : g.block_bytes]
    values = content[:, : g.values_bytes].reshape(*cells, -1)[:, layers, :, heads].reshape(count, -1)
    scales = content[:, g.values_bytes :].reshape(*cells, -1)[:, layers, :, heads].reshape(count, -1)
    return np.ascontiguousarray(np.concatenate([values, scales], axis=1))


def block_read(owner, source, local, generations, *, timeout_s=1.0, block_bytes=BLOCK_BYTES, **options):
    """A read of whole blocks, or of `ranges` of them."""
    checksums = tuple(options.pop("checksums", ()))
    blocks = (tuple(source), tuple(local), tuple(generations))
    return BlockRead(
        ReadId(0), WorkerId(owner), *blocks, timeout_s, block_bytes, checksums=checksums, **options
    )


class Pool:
    """Pool memory of one worker; block i of seed s has content that no other block has."""

    def __init__(self, seed, *, block_bytes=BLOCK_BYTES, block_count=BLOCK_COUNT, part=None):
        made = content(seed, block_bytes, block_count, part)
        block_bytes = made.shape[1]
        self.blocks = shareable_array(made.shape)
        self.blocks[:] = made
        self.generations = np.arange(100, 100 + block_count, dtype=np.uint64)
        self.memory = KVMemory(self.blocks.ctypes.data, block_bytes, block_count, self.generations)


def content(seed, block_bytes, block_count, part=None):
    """`part`: (geometry, places) in the whole model's blocks; then `block_bytes` follows from it."""
    if part is not None:
        geometry, places = part
        return cut(content(seed, geometry.block_bytes, block_count), geometry, places)
    return np.random.default_rng(seed).integers(0, 256, (block_count, block_bytes), np.uint8)


def make_backend(kind, worker_id, memory, fabric: LoopbackFabric) -> TransferBackend:
    """A backend of the table, `nixl_tcp` (NIXL under forced TCP), `nixl_awake_tcp` (the same without a thread
    of NIXL's own, as for pools on GPUs) or `loopback`, a double of the tests. The pool of `cuda_ipc` is on a
    device of the tests: pages that another process can map."""
    if kind == "loopback":
        return LoopbackBackend(worker_id, memory, fabric)
    if kind == "cuda_ipc":
        memory = dataclasses.replace(memory, device="cuda:0")
        return CudaIpcBackend(worker_id, memory, open_device=FakeDevice)
    site = BackendSite(worker_id, memory, HOST, make_pairs=lambda: _torch_pairs(memory))
    (backend,) = build_backends((kind.removesuffix("_tcp").removesuffix("_awake"),), site)
    if "awake" in kind:
        backend._progresses_itself = False
    return backend


def _torch_pairs(memory):
    from engine.kv.pairs import TorchPairs  # torch takes seconds to import

    pool = torch_bytes(memory.base_address, memory.pool_bytes)
    return TorchPairs(pool.view(memory.block_count, memory.block_bytes), host=HOST)


def torch_bytes(address, size):
    import torch

    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _serve(conn: Connection, kind, worker_id, options):
    async def main():
        pool = Pool(**options)
        backend = make_backend(kind, worker_id, pool.memory, LoopbackFabric())
        await backend.start()
        conn.send(backend.offer())
        while (block := await asyncio.to_thread(conn.recv)) is not None:
            pool.generations[block] += 1
            pool.blocks[block] = 0
            conn.send(None)
        await backend.close()

    asyncio.run(main())


class PeerProcess:
    """`reuse(block)` gives a block to new content; `freeze`, `thaw`, `kill` are signals."""

    def __init__(
        self, kind, worker_id, *, seed=1, block_bytes=BLOCK_BYTES, block_count=BLOCK_COUNT, part=None
    ):
        self.worker_id = WorkerId(worker_id)
        self.expected = content(seed, block_bytes, block_count, part)
        options = {"seed": seed, "block_bytes": block_bytes, "block_count": block_count, "part": part}
        context = mp.get_context("spawn")
        self._conn, theirs = context.Pipe()
        arguments = (theirs, kind, worker_id, options)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._was_killed = False
        theirs.close()
        if not self._conn.poll(60):
            self.kill()
            raise AssertionError("the peer did not start")
        self.offer = self._conn.recv()

    def reuse(self, block):
        self._conn.send(block)
        self._conn.recv()

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._was_killed = True
        self._process.kill()
        self._process.join()

    def close(self):
        with contextlib.suppress(OSError):
            self._conn.send(None)
            self.thaw()
        self._process.join(20)
        if not self._was_killed:
            assert self._process.exitcode == 0, f"the peer's exit status is {self._process.exitcode}"
        self.kill()
        self._conn.close()
        self._process.close()


class LocalPeer:
    """The same for a backend of this process; it cannot freeze or die."""

    def __init__(self, worker_id, fabric, *, seed=1, block_bytes=BLOCK_BYTES, block_count=BLOCK_COUNT):
        self.worker_id = WorkerId(worker_id)
        self.expected = content(seed, block_bytes, block_count)
        self._pool = Pool(seed, block_bytes=block_bytes, block_count=block_count)
        self._backend = LoopbackBackend(self.worker_id, self._pool.memory, fabric)
        asyncio.run(self._backend.start())
        self.offer = self._backend.offer()

    def reuse(self, block):
        self._pool.generations[block] += 1
        self._pool.blocks[block] = 0

    def close(self):
        asyncio.run(self._backend.close())
