"""KV reads over NIXL: RDMA between hosts that have it, cross-memory attach within one, TCP otherwise.

A read that runs out of time is *abandoned*, never cancelled: over TCP the bytes keep arriving after
NIXL was told to forget the request, even after the peer was removed. So its request is kept and watched
until it completes or fails, and only then do `settled` and a postponed `remove_peer` go through:

- peer dead: its connection breaks, the request fails, it settles within a fraction of a second;
- peer host gone without a word: UCX's TCP keep-alive fails the request after some tens of seconds;
- peer frozen (stopped, swapping): it stays in flight until the peer thaws or dies. Its target blocks
  stay in quarantine that long, which costs memory and never correctness.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, check_blocks
from kv_transfer.backends.cuda_driver import CudaDevice, CudaError
from kv_transfer.backends.nixl_agent import DescriptorList, NixlAgent, NixlPeerLost, set_up_ucx
from kv_transfer.backends.nixl_thread import Job, Refused, Steps, TransferThread
from kv_transfer.layout import Ranges, check_ranges, cover

_T = TypeVar("_T")

log = logging.getLogger(__name__)

OFFER_VERSION = 1
OFFER_BYTES_MAX = 64 * 1024
BLOCK_COUNT_MAX = 2**24
"""Blocks of a peer, at most: NIXL keeps a descriptor of each, about 32 bytes."""
GENERATION_BYTES = 8
SCRATCH_ENTRIES = 4096
RANGED_DESCRIPTORS = 65_536
"""Descriptors of one request for parts of blocks, at most."""
CONTROL_TIMEOUT_S = 10.0
"""Adding a peer waits for the reads before it in the transfer thread's queue."""
COVER_GAP_ENTRIES = 32
"""A further descriptor costs about as much as copying this many table entries (1 µs, one host)."""


class NixlOffer(msgspec.Struct, frozen=True):
    version: int
    agent_name: str
    metadata: bytes
    base_address: int
    block_bytes: int
    block_count: int
    generations_address: int
    device: str


@dataclass(slots=True, eq=False)
class _NixlPeer:
    worker_id: WorkerId
    offer: NixlOffer
    blocks: DescriptorList
    generations: DescriptorList
    job_count: int = 0
    is_removed: bool = False
    """NIXL forgets it as soon as no job is left."""


@dataclass(slots=True, eq=False)
class _Scratch:
    """Registered host memory where generations land; one job's at a time."""

    entries: npt.NDArray[np.uint64]
    pieces: DescriptorList


@dataclass(slots=True, eq=False)
class _NixlRead:
    """The event loop's side of a job."""

    peer: _NixlPeer
    local_blocks: frozenset[int]
    result: asyncio.Future[list[int]]
    job: Job
    over: asyncio.Event = field(default_factory=asyncio.Event)


class NixlBackend:
    """See `kv_transfer.backend.TransferBackend`; all public methods belong to the event loop."""

    name = "nixl"

    def __init__(
        self,
        worker_id: WorkerId,
        memory: KVMemory,
        *,
        host: str = "",
        open_device: Callable[[int], CudaDevice] = CudaDevice,
    ) -> None:
        """`host`: the address of this machine that peers reach; empty: any."""
        set_up_ucx(host, is_pool_in_host_memory=memory.is_host)
        self._memory, self._open_device = memory, open_device
        self._progresses_itself = memory.is_host
        self._device: CudaDevice | None = None
        """Where the pool is, if on a GPU."""
        # Unique per life of this backend: a peer that knew an earlier life sees a new agent.
        self._agent_name = f"{worker_id}/{secrets.token_hex(8)}"
        self._thread: TransferThread | None = None
        self._reads: dict[Job, _NixlRead] = {}
        self._peers: dict[WorkerId, _NixlPeer] = {}
        self._by_agent: dict[str, _NixlPeer] = {}
        """Peers by agent name, those whose removal waits for abandoned reads included."""
        self._peers_lock = asyncio.Lock()
        self._free_scratch: list[_Scratch] = []
        """The transfer thread's."""

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = await asyncio.to_thread(self._open)
        self._thread.start()

    def _open(self) -> TransferThread:
        if not self._memory.is_host:
            self._device = self._open_device(self._memory.device_index)
        try:
            with self._within():
                self._agent = self._open_agent()
        except (CudaError, SetupError) as error:
            self._let_go_of_device()
            raise SetupError(str(error)) from None
        return TransferThread(
            self._agent,
            name=f"nixl {self._agent_name}",
            within=self._within,
            progresses_agent=not self._progresses_itself,
        )

    def _open_agent(self) -> NixlAgent:
        agent = NixlAgent(self._agent_name, progresses_itself=self._progresses_itself)
        try:
            self._register(agent)
        except SetupError:
            agent.close()
            raise
        self._metadata = agent.metadata()
        return agent

    def _within(self) -> AbstractContextManager[None]:
        """What every call of the agent is made in: UCX finds a GPU by the calling thread's context."""
        return contextlib.nullcontext() if self._device is None else self._device.current()

    def _register(self, agent: NixlAgent) -> None:
        memory = self._memory
        agent.register(memory.base_address, memory.pool_bytes, memory.device)
        agent.register(memory.generations.ctypes.data, memory.generations.nbytes)
        try:
            self._local = agent.pieces(
                None, memory.base_address, memory.block_bytes, memory.block_count, memory.device
            )
        except ValueError as error:
            raise SetupError(str(error)) from error

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        for read in self._reads.values():
            self._give_up(read, "transfers are closed", may_still_land=False)
        await asyncio.to_thread(self._shut, thread)
        for job in list(self._reads):
            self._on_over(job)
        self._peers.clear()
        self._by_agent.clear()

    def _shut(self, thread: TransferThread) -> None:
        if not thread.close():
            log.error("a call into NIXL hangs: its memory stays registered until this process ends")
            return
        with self._within():
            for peer in self._by_agent.values():
                self._release_pieces(peer)
            for scratch in self._free_scratch:
                self._agent.release_pieces(scratch.pieces)
            self._agent.release_pieces(self._local)
            self._agent.close()
        self._let_go_of_device()

    def _let_go_of_device(self) -> None:
        if self._device is not None:
            with contextlib.suppress(CudaError):  # a context that stays goes with the process
                self._device.close()

    def offer(self) -> bytes:
        memory = self._memory
        return msgspec.msgpack.encode(
            NixlOffer(
                version=OFFER_VERSION,
                agent_name=self._agent_name,
                metadata=self._metadata,
                base_address=memory.base_address,
                block_bytes=memory.block_bytes,
                block_count=memory.block_count,
                generations_address=memory.generations.ctypes.data,
                device=memory.device,
            )
        )

    # --- peers ------------------------------------------------------------------------------------

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        parsed = parse_offer(offer, block_bytes=block_bytes or self._memory.block_bytes)
        async with self._peers_lock:
            known = self._by_agent.get(parsed.agent_name)
            if parsed.agent_name == self._agent_name or (
                known is not None and (known.offer, known.worker_id) != (parsed, peer)
            ):
                raise IncompatiblePeer(f"{peer}: its NIXL agent's name is somebody else's")
            current = self._peers.get(peer)
            if current is not None and current is not known:
                self._remove(current)
            if known is None:
                known = await self._connect(peer, parsed)
                self._by_agent[parsed.agent_name] = known
            known.is_removed = False
            self._peers[peer] = known

    async def _connect(self, worker_id: WorkerId, offer: NixlOffer) -> _NixlPeer:
        connected: asyncio.Future[_NixlPeer] = self._loop.create_future()

        def connect() -> None:
            try:
                peer = self._load(worker_id, offer)
            except Exception as error:  # a library's code on what a peer sent: it may fail in any way
                self._call_soon(_set_error, connected, IncompatiblePeer(f"{worker_id}: {error}"))
            else:
                self._call_soon(self._connected, connected, peer)

        self._submit(connect)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return await connected
        except TimeoutError:
            raise TransferFailed(f"NIXL did not take up {worker_id} in time") from None

    def _connected(self, waiting: "asyncio.Future[_NixlPeer]", peer: _NixlPeer) -> None:
        if not waiting.done():
            waiting.set_result(peer)
            return
        # Nobody waits any more. Another attempt at the same agent may be under way, or have succeeded: then
        # only our own handles go.
        is_wanted = self._peers_lock.locked() or peer.offer.agent_name in self._by_agent
        with contextlib.suppress(TransferFailed):  # closed: all goes with the agent
            self._submit(lambda: self._release_pieces(peer) if is_wanted else self._unload(peer))

    def _load(self, worker_id: WorkerId, offer: NixlOffer) -> _NixlPeer:
        """Load a peer's offer; runs on the transfer thread. Raises ValueError."""
        agent, name = self._agent, offer.agent_name
        loaded = agent.add_remote(offer.metadata)
        try:
            if loaded != name:
                raise ValueError(f"the metadata is that of {loaded}")
            table = agent.pieces(name, offer.generations_address, GENERATION_BYTES, offer.block_count)
            blocks = agent.pieces(
                name, offer.base_address, offer.block_bytes, offer.block_count, offer.device
            )
        except ValueError:
            agent.remove_remote(loaded)
            raise
        return _NixlPeer(worker_id, offer, blocks, table)

    async def remove_peer(self, peer: WorkerId) -> None:
        async with self._peers_lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                self._remove(known)

    def _remove(self, peer: _NixlPeer) -> None:
        peer.is_removed = True
        for read in self._reads.values():
            if read.peer is peer:
                self._give_up(read, f"{peer.worker_id} was removed", may_still_land=True)
        self._forget_if_idle(peer)

    def _forget_if_idle(self, peer: _NixlPeer) -> None:
        if not peer.is_removed or peer.job_count or self._thread is None:
            return
        if peer.offer.agent_name not in self._by_agent:
            return
        try:
            self._submit(lambda: self._unload(peer))
        except TransferFailed as error:  # overfull, or ended: what stays is let go of by `close`
            log.warning("NIXL keeps peer %s: %s", peer.worker_id, error)
        else:
            del self._by_agent[peer.offer.agent_name]

    def _unload(self, peer: _NixlPeer) -> None:
        self._release_pieces(peer)
        self._agent.remove_remote(peer.offer.agent_name)

    def _release_pieces(self, peer: _NixlPeer) -> None:
        self._agent.release_pieces(peer.blocks)
        self._agent.release_pieces(peer.generations)

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
        if ranges:
            steps = self._range_steps(known, source_blocks, local_blocks, ranges)
        else:
            steps = self._read_steps(known, source_blocks, local_blocks)
        return await self._run(known, steps, frozenset(local_blocks), timeout_s)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        wanted = frozenset(local_blocks)
        for read in list(self._reads.values()):
            if read.job.is_abandoned and read.local_blocks & wanted:
                await read.over.wait()

    def _known(self, peer: WorkerId) -> _NixlPeer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferFailed(f"{peer} is not a NIXL peer")
        return known

    async def _run(
        self, peer: _NixlPeer, steps: Steps, local_blocks: frozenset[int], timeout_s: float
    ) -> list[int]:
        job = Job(steps, on_end=lambda job: self._call_soon(self._on_over, job))
        read = _NixlRead(peer, local_blocks, self._loop.create_future(), job)
        self._submit(job)
        self._reads[job] = read  # A job that referred to its read would be left to the garbage collector.
        peer.job_count += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await read.result
        except TimeoutError:
            message = f"{peer.worker_id}: no end within {timeout_s:.3f} s"
            raise TransferFailed(message, may_still_land=bool(local_blocks)) from None
        finally:
            job.is_abandoned = not read.over.is_set()

    def _give_up(self, read: _NixlRead, message: str, *, may_still_land: bool) -> None:
        read.job.is_abandoned = True
        _set_error(read.result, TransferFailed(message, may_still_land=may_still_land))

    def _on_over(self, job: Job) -> None:
        """Nothing of the read can land any more."""
        if (read := self._reads.pop(job, None)) is None:
            return
        read.over.set()
        read.peer.job_count -= 1
        if read.job.error:
            _set_error(read.result, TransferFailed(f"{read.peer.worker_id}: {read.job.error}"))
        else:
            _set_result(read.result, read.job.result)
        self._forget_if_idle(read.peer)

    def _submit(self, work: Job | Callable[[], None]) -> None:
        if self._thread is None:
            raise TransferFailed("transfers are closed")
        try:
            self._thread.submit(work)
        except Refused as error:
            raise TransferFailed(str(error)) from None

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        """Called from the transfer thread. The loop may be gone when the process ends."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    # --- on the transfer thread -------------------------------------------------------------------

    def _read_steps(self, peer: _NixlPeer, source: Sequence[int], local: Sequence[int]) -> Steps:
        if source:
            yield self._agent.make_read(
                self._local, np.array(local, np.int32), peer.blocks, np.array(source, np.int32)
            )
        return (yield from self._generation_steps(peer, source))

    def _range_steps(
        self, peer: _NixlPeer, source: Sequence[int], local: Sequence[int], ranges: Ranges
    ) -> Steps:
        """Descriptor lists of this read only: all ranges of all blocks of a pool would be too many."""
        memory, offer = self._memory, peer.offer
        for start in range(0, len(source), step := max(1, RANGED_DESCRIPTORS // len(ranges))):
            part = slice(start, start + step)
            there = _places(offer.base_address, offer.block_bytes, source[part], [r.source for r in ranges])
            here = _places(memory.base_address, memory.block_bytes, local[part], [r.local for r in ranges])
            lengths = np.tile(np.array([r.length for r in ranges], np.uint64), len(source[part]))
            indices = np.arange(len(lengths), dtype=np.int32)
            made: list[DescriptorList] = []
            try:
                for owner, places, device in (
                    (None, here, memory.device),
                    (offer.agent_name, there, offer.device),
                ):
                    made.append(self._agent.scattered(owner, np.column_stack([places, lengths]), device))
                yield self._agent.make_read(made[0], indices, made[1], indices)
            except ValueError as error:
                raise NixlPeerLost(str(error)) from error
            finally:
                for pieces in made:
                    self._agent.release_pieces(pieces)
        return (yield from self._generation_steps(peer, source))

    def _generation_steps(self, peer: _NixlPeer, source: Sequence[int]) -> Steps:
        if not source:
            return []
        ranges = cover(source, gap_max=COVER_GAP_ENTRIES)
        indices = np.concatenate([np.arange(r.start, r.stop, dtype=np.int32) for r in ranges])
        found = np.empty(len(indices), np.uint64)
        scratch = self._take_scratch()
        try:
            for start in range(0, len(indices), SCRATCH_ENTRIES):
                part = indices[start : start + SCRATCH_ENTRIES]
                places = np.arange(len(part), dtype=np.int32)
                yield self._agent.make_read(scratch.pieces, places, peer.generations, part)
                found[start : start + len(part)] = scratch.entries[: len(part)]
        finally:
            self._free_scratch.append(scratch)
        return found[np.searchsorted(indices, np.array(source, np.int32))].tolist()

    def _take_scratch(self) -> _Scratch:
        """A free table: as many exist as jobs ever ran at once."""
        if self._free_scratch:
            return self._free_scratch.pop()
        entries = np.zeros(SCRATCH_ENTRIES, np.uint64)
        try:
            self._agent.register(entries.ctypes.data, entries.nbytes)
            pieces = self._agent.pieces(None, entries.ctypes.data, GENERATION_BYTES, SCRATCH_ENTRIES)
        except (SetupError, ValueError) as error:
            raise NixlPeerLost(f"no memory for generations: {error}") from error
        return _Scratch(entries, pieces)


def _places(
    base_address: int, block_bytes: int, blocks: Sequence[int], offsets: Sequence[int]
) -> npt.NDArray[np.uint64]:
    """Addresses of every range of every block, block by block."""
    starts = np.array(blocks, np.uint64) * np.uint64(block_bytes) + np.uint64(base_address)
    return (starts[:, None] + np.array(offsets, np.uint64)[None, :]).ravel()


def parse_offer(offer: bytes, *, block_bytes: int) -> NixlOffer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than ours."""
    if len(offer) > OFFER_BYTES_MAX:
        raise IncompatiblePeer(f"a NIXL offer of {len(offer)} B")
    try:
        parsed = msgspec.msgpack.decode(offer, type=NixlOffer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompatiblePeer(f"malformed NIXL offer: {error}") from error
    if parsed.version != OFFER_VERSION:
        raise IncompatiblePeer(f"NIXL offer version {parsed.version}, not {OFFER_VERSION}")
    if parsed.block_bytes != block_bytes:
        raise IncompatiblePeer(f"blocks of {parsed.block_bytes} B, ours have {block_bytes} B")
    ends = (
        parsed.base_address + parsed.block_bytes * parsed.block_count,
        parsed.generations_address + GENERATION_BYTES * parsed.block_count,
    )
    is_sane = (
        0 < parsed.block_count <= BLOCK_COUNT_MAX
        and min(parsed.base_address, parsed.generations_address) > 0
        and max(ends) < 2**64
        and re.fullmatch(r"cpu|cuda(:\d{1,3})?", parsed.device) is not None
        and parsed.agent_name != ""
    )
    if not is_sane:
        raise IncompatiblePeer("malformed NIXL offer: a field is out of range")
    return parsed


def _set_error(future: "asyncio.Future[_T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _set_result(future: "asyncio.Future[_T]", result: _T) -> None:
    if not future.done():
        future.set_result(result)
