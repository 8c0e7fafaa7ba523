"""Workers as far as their KV pools go, each in a process of its own on `cuda:0`: a crash is one side's."""

import asyncio
import contextlib
import ctypes
import multiprocessing
import time
import traceback

import torch

from baton.core.errors import SetupError, TransferFailed
from baton.core.geometry import KVGeometry
from engine.kv.pool import KVPool
from kv_transfer.backend import KVMemory
from kv_transfer.layout import RangeCopy
from kv_transfer.registry import BackendSite, build_backends

GEOMETRY = KVGeometry(layer_count=32, kv_head_count=8, head_dim=128, block_tokens=32, dtype="bfloat16")
"""Blocks of 4 MiB."""
BLOCK_COUNT = 256
START_S, CALL_S, READ_S = 60.0, 30.0, 10.0
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def content(seed):
    """Bytes [BLOCK_COUNT, block_bytes] on the device, equal in every process."""
    generator = torch.Generator(device="cuda:0").manual_seed(seed)
    shape = (BLOCK_COUNT, GEOMETRY.block_bytes)
    return torch.randint(0, 256, shape, generator=generator, device="cuda:0", dtype=torch.uint8)


class Side:
    """What the functions below get: `SideProcess.call` has them run in the side's process."""

    def __init__(self, kind, name, seed):
        # Yama may keep siblings from reading each other's memory: these tests are not about that.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
        size = BLOCK_COUNT * GEOMETRY.block_bytes
        self.pool = KVPool(GEOMETRY, kv_bytes=size, device=torch.device("cuda", 0))
        self.pool.generations[:] = range(100, 100 + BLOCK_COUNT)
        if seed is not None:
            self.pool.memory.copy_(content(seed))
        torch.cuda.synchronize()
        self.memory = KVMemory(
            self.pool.base_address,
            self.pool.block_bytes,
            self.pool.block_count,
            self.pool.generations,
            str(self.pool.device),
        )
        (self.backend,) = build_backends((kind,), BackendSite(name, self.memory, "127.0.0.1"))


async def offer(side):
    return side.backend.offer()


async def reuse(side, block):
    """Give a block to new content."""
    side.pool.generations[block] += 1
    side.pool.memory[block] = 0
    torch.cuda.synchronize()


async def add_peer(side, peer, offered):
    await side.backend.add_peer(peer, offered)


async def read(side, peer, source, local, ranges=()):
    """The generations, or what went wrong as text."""
    pieces = tuple(RangeCopy(*piece) for piece in ranges)
    try:
        return await side.backend.read(peer, source, local, timeout_s=READ_S, ranges=pieces)
    except TransferFailed as error:
        await side.backend.settled(local)
        return str(error)


async def clear(side):
    side.pool.memory.zero_()
    torch.cuda.synchronize()


async def holds(side, seed, source, local, ranges=()):
    """Whether `local` blocks have these parts of the source's, and all other bytes are zeros."""
    expected, found = torch.zeros_like(side.pool.memory), content(seed)
    for there, here in zip(source, local, strict=True):
        for start, to, length in ranges or ((0, 0, GEOMETRY.block_bytes),):
            expected[here, to : to + length] = found[there, start : start + length]
    return torch.equal(expected, side.pool.memory)


async def rates(side, peer, source, local, rounds):
    """Bytes per second of each read."""
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        await side.backend.read(peer, source, local, timeout_s=READ_S)
        found.append(len(source) * GEOMETRY.block_bytes / (time.perf_counter() - began_s))
    return found


def _serve(conn, kind, name, seed):
    async def serve():
        try:
            side = Side(kind, name, seed)
            await side.backend.start()
        except SetupError as error:
            conn.send(str(error))
            return
        conn.send(None)
        while (asked := await asyncio.to_thread(conn.recv)) is not None:
            function, arguments = asked
            try:
                conn.send((await function(side, *arguments), ""))
            except Exception:
                conn.send((None, traceback.format_exc()))
        await side.backend.close()

    asyncio.run(serve())


class SideProcess:
    """Starts at once; `ready` waits for it."""

    def __init__(self, kind, name, *, seed=None):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, name, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._was_asked, self._refusal = False, None

    def ready(self):
        """Why the backend cannot be used on this machine, None if it can."""
        if not self._was_asked:
            self._refusal = self._answer(START_S)
            self._was_asked = True
        return self._refusal

    def call(self, function, *arguments):
        assert self.ready() is None
        self._conn.send((function, arguments))
        result, error = self._answer(CALL_S)
        assert not error, error
        return result

    def _answer(self, timeout_s):
        try:
            if self._conn.poll(timeout_s):
                return self._conn.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise AssertionError(f"{self.name} died: exit status {self._process.exitcode}") from None
        self.kill()
        raise AssertionError(f"{self.name} did not answer within {timeout_s} s")

    def kill(self):
        self._process.kill()
        self._process.join(10)

    def close(self):
        """Ends the process; its exit status if it ended by itself."""
        with contextlib.suppress(OSError):
            self._conn.send(None)
        self._process.join(10)
        status = self._process.exitcode
        self.kill()
        self._conn.close()
        return status
