"""How fast reads are, against the transport's own speed and against memcpy, all in one run.

Two processes on this machine. The same scattered blocks are read three ways in turn, round after round,
so that whatever else the machine does hits all three alike.
"""

import asyncio
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory
from kv_transfer.backends.nixl import NixlBackend, NixlOffer, parse_offer
from kv_transfer.backends.nixl_agent import NixlAgent
from kv_transfer.manager import TransferManager

START_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 30.0
SOURCE, READER = WorkerId("bench-source.0"), WorkerId("bench-reader.0")


@dataclass(frozen=True, slots=True)
class TransferBenchResult:
    """Medians over `rounds` rounds, in bytes per second of wall time."""

    block_bytes: int
    block_count: int
    rounds: int
    memcpy_bytes_per_s: float
    """numpy copies of the same blocks within this process, one thread."""
    raw_bytes_per_s: float
    """NIXL alone: make a request of the same descriptors, post it, watch it without pause."""
    checked_bytes_per_s: float
    """`TransferManager.read_checked`, as the worker uses it."""

    @property
    def checked_to_raw(self) -> float:
        return self.checked_bytes_per_s / self.raw_bytes_per_s

    @property
    def checked_to_memcpy(self) -> float:
        return self.checked_bytes_per_s / self.memcpy_bytes_per_s

    def __str__(self) -> str:
        rates = (self.checked_bytes_per_s, self.raw_bytes_per_s, self.memcpy_bytes_per_s)
        checked, raw, memcpy = (f"{rate / 1e9:.2f} GB/s" for rate in rates)
        return (
            f"{self.block_count} x {self.block_bytes} B scattered, {self.rounds} rounds: "
            f"checked read {checked}, raw NIXL {raw} (ratio {self.checked_to_raw:.2f}), "
            f"memcpy {memcpy} (ratio {self.checked_to_memcpy:.2f})"
        )


def run(*, block_bytes: int, block_count: int, seconds: float) -> TransferBenchResult:
    """Reads `block_count` scattered blocks again and again for `seconds`, and at least once.

    Raises SetupError without NIXL, TransferFailed if a read fails.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=_serve, args=(theirs, block_bytes, block_count), daemon=True)
    source.start()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise SetupError("the bench's source process did not start")
        offer: bytes = ours.recv()
        return asyncio.run(_measure(offer, block_bytes, block_count, seconds))
    except EOFError:
        raise SetupError("the bench's source process ended at once") from None
    finally:
        source.kill()
        source.join()


def _pool(block_bytes: int, block_count: int) -> tuple[npt.NDArray[np.uint8], KVMemory]:
    blocks = np.ones((block_count, block_bytes), np.uint8)  # written: its pages exist
    generations = np.ones(block_count, np.uint64)
    return blocks, KVMemory(blocks.ctypes.data, block_bytes, block_count, generations)


def _serve(conn: Connection, block_bytes: int, block_count: int) -> None:
    async def serve() -> None:
        _blocks, memory = _pool(block_bytes, block_count)
        backend = NixlBackend(SOURCE, memory)
        await backend.start()
        conn.send(backend.offer())
        await asyncio.to_thread(conn.poll, None)  # until killed

    asyncio.run(serve())


async def _measure(offer: bytes, block_bytes: int, block_count: int, seconds: float) -> TransferBenchResult:
    blocks, memory = _pool(block_bytes, block_count)
    other = np.zeros_like(blocks)
    order = np.random.default_rng(0).permutation(block_count)
    source, local = order.tolist(), list(range(block_count))
    manager = TransferManager([NixlBackend(READER, memory)], block_bytes=block_bytes)
    await manager.start()
    raw = _RawReader(memory, parse_offer(offer, block_bytes=block_bytes))
    try:
        await manager.add_peer(SOURCE, {"nixl": offer})
        spent: dict[str, list[float]] = {"memcpy": [], "raw": [], "checked": []}
        ends_s = time.monotonic() + seconds
        # The first round connects and faults pages in: it is not counted.
        while len(spent["checked"]) < 2 or time.monotonic() < ends_s:
            spent["memcpy"].append(_timed(lambda: _copy(blocks, other, source)))
            spent["raw"].append(await asyncio.to_thread(_timed, lambda: raw.read(order.astype(np.int32))))
            began_s = time.perf_counter()
            outcome = await manager.read_checked(SOURCE, source, local, [1] * block_count, READ_TIMEOUT_S)
            spent["checked"].append(time.perf_counter() - began_s)
            if outcome.error:
                raise TransferFailed(outcome.error)
    finally:
        await manager.close()
        raw.close()
    rates = {what: block_bytes * block_count / statistics.median(s[1:]) for what, s in spent.items()}
    rounds = len(spent["checked"]) - 1
    return TransferBenchResult(
        block_bytes, block_count, rounds, rates["memcpy"], rates["raw"], rates["checked"]
    )


def _timed(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], order: list[int]) -> None:
    for to, block in enumerate(order):
        target[to] = source[block]


class _RawReader:
    """NIXL with nothing around it."""

    def __init__(self, memory: KVMemory, offer: NixlOffer) -> None:
        self._agent = NixlAgent("bench-raw")
        self._agent.register(memory.base_address, memory.pool_bytes)
        size, count = memory.block_bytes, memory.block_count
        self._local = self._agent.pieces(None, memory.base_address, size, count)
        self._agent.add_remote(offer.metadata)
        self._remote = self._agent.pieces(offer.agent_name, offer.base_address, size, count)
        self._places = np.arange(count, dtype=np.int32)

    def read(self, order: npt.NDArray[np.int32]) -> None:
        request = self._agent.make_read(self._local, self._places, self._remote, order)
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
