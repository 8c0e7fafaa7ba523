"""Compares the speed of reads with everything else that moves bytes between two processes, all in one run.

There are two processes on this machine. The same scattered blocks are read in every way in turn, round after
round, so that other load on the machine affects all alike. `checked` is `TransferManager.read_checked`, as
workers use it, with generations; the others are bare mechanisms (`benchmarks.transfer_raw`).
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
from baton.core.ids import ReadId, WorkerId
from baton.core.transfer_backends import BACKENDS, DEFAULT_BACKENDS, BackendName
from benchmarks.transfer_raw import (
    NixlReader,
    ProcessReader,
    RawSource,
    RawSourceOffer,
    SharedReader,
    TcpReader,
)
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.backends.nixl import parse_offer
from kv_transfer.manager import TransferManager
from kv_transfer.read import BlockRead
from kv_transfer.registry import BackendSite, build_backends

START_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 30.0
SOURCE, READER = WorkerId("bench-source.0"), WorkerId("bench-reader.0")
HOST = "127.0.0.1"
RAW_TRANSPORTS = ("nixl", "tcp", "shared memory")
"""Mechanisms that the checked read is compared with. process_vm_readv is what `cma` itself uses."""


@dataclass(frozen=True, slots=True)
class TransferBenchResult:
    """Medians over `rounds` rounds, in bytes per second of wall time."""

    block_bytes: int
    block_count: int
    rounds: int
    backend: str
    """The backend that workers would use here."""
    checked: dict[str, float]
    """Speed of `TransferManager.read_checked` by backend."""
    raw: dict[str, float]
    """Speed of the bare mechanism on the same blocks, by mechanism."""
    memcpy_bytes_per_s: float
    """numpy copies of the same blocks within this process, in one thread."""

    @property
    def checked_bytes_per_s(self) -> float:
        return self.checked[self.backend]

    @property
    def raw_bytes_per_s(self) -> float:
        """NIXL alone: make a request of the same descriptors, post it, and poll it without pause."""
        return self.raw["nixl"]

    @property
    def best_raw(self) -> str:
        return max(RAW_TRANSPORTS, key=lambda name: self.raw[name])

    @property
    def checked_to_raw(self) -> float:
        return self.checked_bytes_per_s / self.raw_bytes_per_s

    @property
    def checked_to_best(self) -> float:
        return self.checked_bytes_per_s / self.raw[self.best_raw]

    @property
    def checked_to_memcpy(self) -> float:
        return self.checked_bytes_per_s / self.memcpy_bytes_per_s

    def __str__(self) -> str:
        head = f"{self.block_count} x {self.block_bytes} B scattered, {self.rounds} rounds, medians:"
        rates = {
            **{f"checked read, {name}": rate for name, rate in self.checked.items()},
            **{f"raw {name}": rate for name, rate in self.raw.items()},
            "memcpy within one process": self.memcpy_bytes_per_s,
        }
        lines = [f"  {what:28s}{rate / 1e9:7.2f} GB/s" for what, rate in rates.items()]
        ratios = (
            f"workers here read with {self.backend}: {self.checked_to_raw:.2f} of raw nixl, "
            f"{self.checked_to_best:.2f} of the best of {', '.join(RAW_TRANSPORTS)} ({self.best_raw}), "
            f"{self.checked_to_memcpy:.2f} of memcpy"
        )
        return "\n".join((head, *lines, ratios))


def run(*, block_bytes: int, block_count: int, seconds: float) -> TransferBenchResult:
    """Read `block_count` scattered blocks repeatedly for `seconds`, and at least once.

    Raises SetupError without NIXL or cross-memory attach, TransferFailed if a read fails.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=_serve, args=(theirs, block_bytes, block_count), daemon=True)
    source.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise SetupError("the bench's source process did not start")
        offers: dict[str, bytes] = ours.recv()
        raw_offer: RawSourceOffer = ours.recv()
        return asyncio.run(_TransferBench(offers, raw_offer, block_bytes, block_count).run(seconds))
    except EOFError:
        raise SetupError("the bench's source process ended at once") from None
    finally:
        source.kill()
        source.join()


def _pool(block_bytes: int, block_count: int) -> tuple[npt.NDArray[np.uint8], KVMemory]:
    blocks = np.ones((block_count, block_bytes), np.uint8)  # written, so that its pages exist
    generations = np.ones(block_count, np.uint64)
    return blocks, KVMemory(blocks.ctypes.data, block_bytes, block_count, generations)


def _backends(worker_id: WorkerId, memory: KVMemory) -> list[TransferBackend]:
    names: list[BackendName] = [name for name in DEFAULT_BACKENDS if BACKENDS[name].reads_host_memory]
    return build_backends(names, BackendSite(worker_id, memory, HOST))


def _serve(conn: Connection, block_bytes: int, block_count: int) -> None:
    async def serve() -> None:
        blocks, memory = _pool(block_bytes, block_count)
        offers: dict[str, bytes] = {}
        backends = _backends(SOURCE, memory)
        for backend in backends:
            await backend.start()
            offers[backend.name] = backend.offer()
        raw = RawSource(blocks)
        conn.send(offers)
        conn.send(raw.offer)
        await asyncio.to_thread(conn.poll, None)  # until it is killed

    asyncio.run(serve())


class _TransferBench:
    def __init__(
        self, offers: dict[str, bytes], raw_offer: RawSourceOffer, block_bytes: int, block_count: int
    ) -> None:
        self._offers, self._raw_offer = offers, raw_offer
        self._size, self._count = block_bytes, block_count
        self._blocks, self._memory = _pool(block_bytes, block_count)
        self._other = np.zeros_like(self._blocks)
        self._order = np.random.default_rng(0).permutation(block_count)
        self._spent: dict[tuple[str, str], list[float]] = {}

    async def run(self, seconds: float) -> TransferBenchResult:
        managers = {
            b.name: TransferManager([b], memory=self._memory) for b in _backends(READER, self._memory)
        }
        raw = {
            "nixl": NixlReader(self._memory, parse_offer(self._offers["nixl"], block_bytes=self._size)),
            "tcp": TcpReader(self._blocks, self._raw_offer),
            "shared memory": SharedReader(self._blocks, self._raw_offer),
            "process_vm_readv": ProcessReader(self._blocks, self._raw_offer),
        }
        order = self._order.tolist()
        try:
            for manager in managers.values():
                await manager.start()
                await manager.add_peer(SOURCE, self._offers)
            ends_s, rounds = time.monotonic() + seconds, 0
            # The first round connects and faults pages in, so it is not counted.
            while rounds < 2 or time.monotonic() < ends_s:
                self._timed(("memcpy", ""), lambda: _copy(self._blocks, self._other, order))
                for name, reader in raw.items():
                    await asyncio.to_thread(self._timed, ("raw", name), lambda r=reader: r.read(order))
                for name, manager in managers.items():
                    await self._checked(name, manager)
                rounds += 1
        finally:
            for manager in managers.values():
                await manager.close()
            for reader in raw.values():
                reader.close()
        return self._result(rounds - 1, next(iter(managers)))

    async def _checked(self, name: str, manager: TransferManager) -> None:
        read = BlockRead(
            read_id=ReadId(0),
            owner=SOURCE,
            source_blocks=tuple(self._order.tolist()),
            local_blocks=tuple(range(self._count)),
            generations=(1,) * self._count,
            timeout_s=READ_TIMEOUT_S,
            block_bytes=self._size,
        )
        began_s = time.perf_counter()
        done = await manager.read_checked(read)
        self._spent.setdefault(("checked", name), []).append(time.perf_counter() - began_s)
        if done.error:
            raise TransferFailed(done.error)

    def _timed(self, what: tuple[str, str], call: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        call()
        self._spent.setdefault(what, []).append(time.perf_counter() - began_s)

    def _result(self, rounds: int, backend: str) -> TransferBenchResult:
        all_bytes = self._size * self._count
        rates = {what: all_bytes / statistics.median(spent[1:]) for what, spent in self._spent.items()}
        return TransferBenchResult(
            block_bytes=self._size,
            block_count=self._count,
            rounds=rounds,
            backend=backend,
            checked={name: rate for (kind, name), rate in rates.items() if kind == "checked"},
            raw={name: rate for (kind, name), rate in rates.items() if kind == "raw"},
            memcpy_bytes_per_s=rates["memcpy", ""],
        )


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], order: list[int]) -> None:
    for to, block in enumerate(order):
        target[to] = source[block]
