"""KV reads within one host by cross-memory attach: the reader's kernel copies out of the source's pages.

The source does nothing at all, so a frozen one can be read and a busy one is not slowed down. It must be a
process of the same host and PID namespace that this one may trace (same user, and where Yama restricts that,
kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE); `add_peer` finds out, and another backend is taken otherwise.

A process id may be given again after a process ended. So the source keeps a random nonce in its memory, and
every read fetches it after the last byte: whoever has it then is the source, and has been since before the
read began, because a process that ended does not come back.
"""

import asyncio
import ctypes
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, check_blocks
from kv_transfer.backends.cma_memory import (
    IOV_MAX,
    CopyPlan,
    MemoryLost,
    ProcessMemory,
    ReadNotPermitted,
    Vectors,
    vector,
)
from kv_transfer.backends.copy_threads import CopyJob, CopyThreads, StepFailed
from kv_transfer.backends.open_reads import BackendReads
from kv_transfer.layout import Ranges, check_ranges, cover

OFFER_VERSION = 1
BLOCK_COUNT_MAX = 2**31 - 1
NONCE_BYTES = 16
GENERATION_BYTES = 8
STEP_BYTES = 16 * 2**20
"""Bytes copied in about a millisecond: the longest wait of a late read, or of a short one behind it."""
THREADS_MAX = 2
"""More do not add to what one read gets out of a host's memory, and take cores from the engine."""
COVER_GAP_ENTRIES = 128
"""A further range costs about as much as copying this many table entries."""


class CmaOffer(msgspec.Struct, frozen=True):
    version: int
    host: str
    """Boot id and PID namespace: where `pid` means something."""
    pid: int
    nonce: bytes
    nonce_address: int
    base_address: int
    block_bytes: int
    block_count: int
    generations_address: int


@dataclass(frozen=True, slots=True)
class _CmaRead:
    """`copy_threads.Steps`."""

    process: ProcessMemory
    memory: KVMemory
    offer: CmaOffer
    source_blocks: Sequence[int]
    local_blocks: Sequence[int]
    ranges: Ranges
    plans: list[CopyPlan]

    def plan(self) -> int:
        if not self.local_blocks:
            return 0
        offer, memory = self.offer, self.memory
        plan = CopyPlan(
            self.source_blocks,
            self.local_blocks,
            self.ranges,
            source=(offer.base_address, offer.block_bytes),
            local=(memory.base_address, memory.block_bytes),
            step_bytes=STEP_BYTES,
        )
        self.plans.append(plan)
        return plan.step_count

    def copy(self, index: int) -> None:
        self._copy(*self.plans[0].step(index))

    def finish(self) -> list[int]:
        found = self._generations()
        if self.process_nonce() != self.offer.nonce:
            raise StepFailed("the source has closed, or its process id belongs to another process")
        return found

    def process_nonce(self) -> bytes:
        into = ctypes.create_string_buffer(NONCE_BYTES)
        there = vector(self.offer.nonce_address, NONCE_BYTES)
        self._copy(vector(ctypes.addressof(into), NONCE_BYTES), there)
        return into.raw

    def _generations(self) -> list[int]:
        """Entries of the source's table, those between near ones along with them."""
        if not self.source_blocks:
            return []
        ranges = cover(self.source_blocks, gap_max=COVER_GAP_ENTRIES)
        starts = np.array([r.start for r in ranges], np.uint64)
        counts = np.array([len(r) for r in ranges], np.uint64)
        table = np.empty(int(counts.sum()), np.uint64)
        base = np.uint64(self.offer.generations_address)
        there = np.stack(
            [base + starts * np.uint64(GENERATION_BYTES), counts * np.uint64(GENERATION_BYTES)], 1
        )
        address = table.ctypes.data
        for part in range(0, len(there), IOV_MAX):
            rows = np.ascontiguousarray(there[part : part + IOV_MAX])
            size = int(rows[:, 1].sum())
            self._copy(vector(address, size), rows)
            address += size
        firsts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts)[:-1]])
        asked = np.array(self.source_blocks, np.uint64)
        which = np.searchsorted(starts, asked, side="right") - 1
        return table[(firsts[which] + asked - starts[which]).astype(np.int64)].tolist()

    def _copy(self, local: Vectors, remote: Vectors) -> None:
        try:
            self.process.read(self.offer.pid, local, remote)
        except (MemoryLost, ReadNotPermitted) as error:
            raise StepFailed(str(error)) from error


class CmaBackend:
    """See `kv_transfer.backend.TransferBackend`; all public methods belong to the event loop."""

    name = "cma"

    def __init__(self, worker_id: WorkerId, memory: KVMemory) -> None:
        self._worker_id, self._memory = worker_id, memory
        self._nonce = np.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), np.uint8)
        self._peers: dict[WorkerId, CmaOffer] = {}
        self._threads: CopyThreads | None = None

    async def start(self) -> None:
        if not self._memory.is_host:
            raise SetupError(f"cross-memory attach reads host memory, not {self._memory.device}")
        self._process = ProcessMemory()
        self._host = host_identity()
        self._reads = BackendReads()
        count = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._threads = CopyThreads(count, name=f"kv cma {self._worker_id}")

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is None:
            return
        self._nonce[:] = 0
        self._reads.give_up("transfers are closed")
        await asyncio.to_thread(threads.close)
        await self._reads.all_over()
        self._peers.clear()

    def offer(self) -> bytes:
        memory = self._memory
        return msgspec.msgpack.encode(
            CmaOffer(
                version=OFFER_VERSION,
                host=self._host,
                pid=os.getpid(),
                nonce=self._nonce.tobytes(),
                nonce_address=self._nonce.ctypes.data,
                base_address=memory.base_address,
                block_bytes=memory.block_bytes,
                block_count=memory.block_count,
                generations_address=memory.generations.ctypes.data,
            )
        )

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        parsed = parse_offer(offer, block_bytes=block_bytes or self._memory.block_bytes)
        if parsed.host != self._host:
            raise IncompatiblePeer(f"{peer} is on another host, or in another PID namespace")
        try:
            found = self._process.read_bytes(parsed.pid, parsed.nonce_address, NONCE_BYTES)
        except ReadNotPermitted as error:
            reason = f"this process may not read that of {peer} ({error}): it must have the same user, and"
            raise IncompatiblePeer(f"{reason} kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE") from None
        except MemoryLost as error:
            raise TransferFailed(f"{peer}: {error}") from None
        if found != parsed.nonce:
            raise TransferFailed(f"{peer} has closed, or its process id belongs to another process")
        if self._peers.get(peer) not in (None, parsed):
            await self.remove_peer(peer)
        self._peers[peer] = parsed

    async def remove_peer(self, peer: WorkerId) -> None:
        if self._peers.pop(peer, None) is not None:
            self._reads.give_up(f"{peer} was removed", peer=peer)

    async def read(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout_s: float,
        ranges: Ranges = (),
    ) -> list[int]:
        offer = self._known(peer)
        check_blocks(self._memory, peer, offer.block_count, source_blocks, local_blocks)
        check_ranges(ranges, source_bytes=offer.block_bytes, local_bytes=self._memory.block_bytes)
        return await self._run(peer, offer, source_blocks, local_blocks, ranges, timeout_s)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        if self._threads is not None:
            await self._reads.settled(local_blocks)

    def _known(self, peer: WorkerId) -> CmaOffer:
        offer = self._peers.get(peer)
        if offer is None:
            raise TransferFailed(f"{peer} is not a peer on this host")
        return offer

    async def _run(
        self,
        peer: WorkerId,
        offer: CmaOffer,
        source: Sequence[int],
        local: Sequence[int],
        ranges: Ranges,
        timeout_s: float,
    ) -> list[int]:
        if self._threads is None:
            raise TransferFailed("transfers are closed")
        read = self._reads.open(peer, local)
        job = CopyJob(
            _CmaRead(self._process, self._memory, offer, source, local, ranges, []),
            time.monotonic() + timeout_s,
            lambda ended: self._reads.ended(read, ended.result, ended.error),
        )

        def abandon() -> None:
            job.is_abandoned = True

        read.abandon = abandon
        if not self._threads.submit(job):
            raise TransferFailed("too many transfers wait")
        return await self._reads.run(read, timeout_s=timeout_s)


def host_identity() -> str:
    """Equal in two processes exactly if a process id means the same process to both. Raises SetupError."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        raise SetupError(f"/proc does not say which host this is: {error}") from error


def parse_offer(offer: bytes, *, block_bytes: int) -> CmaOffer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than expected."""
    try:
        parsed = msgspec.msgpack.decode(offer, type=CmaOffer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompatiblePeer(f"malformed CMA offer: {error}") from error
    if parsed.version != OFFER_VERSION:
        raise IncompatiblePeer(f"CMA offer version {parsed.version}, not {OFFER_VERSION}")
    if parsed.block_bytes != block_bytes:
        raise IncompatiblePeer(f"blocks of {parsed.block_bytes} B, not {block_bytes} B")
    ends = (
        parsed.base_address + parsed.block_bytes * parsed.block_count,
        parsed.generations_address + GENERATION_BYTES * parsed.block_count,
        parsed.nonce_address + NONCE_BYTES,
    )
    is_sane = (
        0 < parsed.block_count <= BLOCK_COUNT_MAX
        and min(parsed.base_address, parsed.generations_address, parsed.nonce_address) > 0
        and max(ends) < 2**63
        and 0 < parsed.pid < 2**31
        and len(parsed.nonce) == NONCE_BYTES
        and any(parsed.nonce)
    )
    if not is_sane:
        raise IncompatiblePeer("malformed CMA offer: a field is out of range")
    return parsed
