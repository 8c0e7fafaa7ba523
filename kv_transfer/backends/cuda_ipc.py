"""KV reads between GPUs of one host, or within one GPU: the reader maps the source's pool, its GPU copies.

The counterpart of `cma` for pools on GPUs: the source does nothing at all. Its pool must be an allocation
that CUDA can share (torch's expandable segments, for one, are not), and its process one whose host memory
this process may read, since that is where the generations are; `add_peer` finds out, and another backend is
taken otherwise. The source's device need not be visible here (CUDA_VISIBLE_DEVICES).

The driver keeps mapped memory when its process ends, so no copy goes astray. What was copied out of a dead
source is refused afterwards, because its generations cannot be read.
"""

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.core.errors import IncompatiblePeer, OtherMemory, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, check_blocks
from kv_transfer.backends.cma_memory import CopyPlan
from kv_transfer.backends.copy_threads import StepFailed
from kv_transfer.backends.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaDevice, CudaError
from kv_transfer.backends.host_reads import HostReads
from kv_transfer.backends.source_process import (
    ProcessOffer,
    SourceProcess,
    out_of_range,
    parse_process_offer,
)
from kv_transfer.layout import Ranges, check_ranges

log = logging.getLogger(__name__)

STEP_BYTES = 256 * 2**20
"""Copied in less than a millisecond within a GPU or over NVLink, and in about ten over PCIe."""
MAP_TIMEOUT_S = 10.0
"""Mapping waits for the step that the copying thread is at, and for the driver."""


class CudaIpcOffer(ProcessOffer, frozen=True):
    device_uuid: bytes
    handle: bytes
    """Names the allocation that the pool is in."""
    allocation_bytes: int
    pool_offset: int
    """Where the pool begins in the allocation."""
    base_address: int
    """The pool's, in the source's own process: a process cannot map what is its own."""


@dataclass(slots=True, eq=False)
class _Mapping:
    """A peer's pool in this process, from `open` until its last user has released it. `open` and `release`
    are called on the copying thread."""

    device: CudaDevice
    offer: CudaIpcOffer
    refusal: str = ""
    """Why it cannot be opened."""
    base_address: int = 0
    """The pool's, here."""
    _allocation: int | None = None
    _user_count: int = 1
    _changed: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        return self._user_count == 0

    def open(self) -> None:
        """Raises StepFailed."""
        offer = self.offer
        if offer.pid == os.getpid():
            self.base_address = offer.base_address
            return
        try:
            with self.device.current():
                self._allocation = self.device.map(offer.handle)
        except CudaError as error:
            where = f"GPU-{uuid.UUID(bytes=offer.device_uuid)}"
            self.refusal = f"the pool on {where} cannot be mapped: {error}"
            raise StepFailed(self.refusal) from error
        self.base_address = self._allocation + offer.pool_offset

    def retain(self) -> None:
        with self._changed:
            self._user_count += 1

    def release(self) -> None:
        with self._changed:
            self._user_count -= 1
            if self._user_count:
                return
        self._unmap()

    def end(self) -> None:
        """Whoever still uses it: no copy runs any more."""
        with self._changed:
            self._user_count = 0
        self._unmap()

    def _unmap(self) -> None:
        allocation, self._allocation = self._allocation, None
        if allocation is None:
            return
        try:
            with self.device.current():
                self.device.unmap(allocation)
        except CudaError as error:
            log.warning("CUDA keeps a peer's pool: %s", error)


@dataclass(frozen=True, slots=True)
class _CallOnThread:
    """One call as `copy_threads.Steps`."""

    call: Callable[[], None]

    def plan(self) -> int:
        self.call()
        return 0

    def copy(self, index: int) -> None:
        raise AssertionError(f"no step {index}")

    def finish(self) -> list[int]:
        return []


@dataclass(frozen=True, slots=True)
class _IpcRead:
    """`copy_threads.Steps`."""

    device: CudaDevice
    stream: int
    source: SourceProcess
    memory: KVMemory
    mapping: _Mapping
    source_blocks: Sequence[int]
    local_blocks: Sequence[int]
    ranges: Ranges
    plans: list[CopyPlan]

    def plan(self) -> int:
        if not self.local_blocks:
            return 0
        plan = CopyPlan(
            self.source_blocks,
            self.local_blocks,
            self.ranges,
            source=(self.mapping.base_address, self.mapping.offer.block_bytes),
            local=(self.memory.base_address, self.memory.block_bytes),
            step_bytes=STEP_BYTES,
            last_step_bytes=STEP_BYTES,
        )
        self.plans.append(plan)
        return plan.step_count

    def copy(self, index: int) -> None:
        copies = self.plans[0].copies(index).tolist()
        try:
            with self.device.current():
                try:
                    for to, source, size in copies:
                        self.device.copy(self.stream, to, source, size)
                finally:  # those queued before one that was refused land as well
                    self.device.wait(self.stream)
        except CudaError as error:
            raise StepFailed(str(error)) from error

    def finish(self) -> list[int]:
        return self.source.generations(self.source_blocks)


@dataclass(frozen=True, slots=True)
class _Export:
    """This process's end, as long as the backend is open."""

    device: CudaDevice
    stream: int
    device_uuid: bytes
    handle: bytes
    allocation: tuple[int, int]


class CudaIpcBackend:
    """See `kv_transfer.backend.TransferBackend`; all public methods belong to the event loop."""

    name = "cuda_ipc"

    def __init__(
        self,
        worker_id: WorkerId,
        memory: KVMemory,
        *,
        open_device: Callable[[int], CudaDevice] = CudaDevice,
    ) -> None:
        self._worker_id, self._memory, self._open_device = worker_id, memory, open_device
        self._peers: dict[WorkerId, _Mapping] = {}
        self._mappings: list[_Mapping] = []
        """All that may be open: those of peers, and those that wait for their last read."""
        self._host: HostReads | None = None

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._memory.is_host:
            raise OtherMemory("CUDA IPC reads the memory of GPUs, not of the host")
        self._export = await asyncio.to_thread(self._open)
        try:
            # One thread: the GPU copies, and a second one would only queue copies behind those of the first.
            self._host = HostReads(thread_count=1, name=f"kv cuda ipc {self._worker_id}")
        except SetupError:
            await asyncio.to_thread(self._shut)
            raise

    def _open(self) -> _Export:
        """Raises SetupError."""
        device = self._open_device(self._memory.device_index)
        try:
            with device.current():
                allocation = device.allocation(self._memory.base_address)
                handle = device.export(allocation[0])
                return _Export(device, device.make_stream(), device.uuid(), handle, allocation)
        except CudaError as error:
            with contextlib.suppress(CudaError):
                device.close()
            raise SetupError(f"CUDA does not share the KV pool with other processes: {error}") from None

    async def close(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        await host.close()
        self._peers.clear()
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        for mapping in self._mappings:
            mapping.end()
        self._mappings.clear()
        device = self._export.device
        try:
            with device.current():
                device.drop_stream(self._export.stream)
            device.close()
        except CudaError as error:
            log.warning("CUDA keeps a stream or its context: %s", error)

    def offer(self) -> bytes:
        export, base = self._export, self._memory.base_address
        return msgspec.msgpack.encode(
            CudaIpcOffer(
                device_uuid=export.device_uuid,
                handle=export.handle,
                allocation_bytes=export.allocation[1],
                pool_offset=base - export.allocation[0],
                base_address=base,
                **self._open_host().offered(self._memory),
            )
        )

    # --- peers ------------------------------------------------------------------------------------

    async def add_peer(self, peer: WorkerId, offer: bytes, *, block_bytes: int | None = None) -> None:
        parsed = parse_offer(offer, block_bytes=block_bytes or self._memory.block_bytes)
        self._open_host().check(peer, parsed)
        if (known := self._peers.get(peer)) is not None and known.offer == parsed:
            return
        mapping = await self._map(peer, parsed)
        if peer in self._peers:
            await self.remove_peer(peer)
        self._peers[peer] = mapping

    async def _map(self, peer: WorkerId, offer: CudaIpcOffer) -> _Mapping:
        host, mapping = self._open_host(), _Mapping(self._export.device, offer)
        self._mappings = [other for other in self._mappings if not other.is_over]
        self._mappings.append(mapping)
        try:
            await host.run(peer, _CallOnThread(mapping.open), (), MAP_TIMEOUT_S)
            if self._host is None:
                raise TransferFailed("transfers are closed")
        except BaseException as error:
            host.submit(_CallOnThread(mapping.release))  # behind an `open` that goes on nevertheless
            if isinstance(error, TransferFailed) and mapping.refusal:
                raise IncompatiblePeer(f"{peer}: {mapping.refusal}") from None
            raise
        return mapping

    async def remove_peer(self, peer: WorkerId) -> None:
        mapping = self._peers.pop(peer, None)
        if mapping is not None and self._host is not None:
            self._host.give_up(peer)
            self._host.submit(_CallOnThread(mapping.release))

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
        host, mapping = self._open_host(), self._known(peer)
        offer, export = mapping.offer, self._export
        check_blocks(self._memory, peer, offer.block_count, source_blocks, local_blocks)
        check_ranges(ranges, source_bytes=offer.block_bytes, local_bytes=self._memory.block_bytes)
        mapping.retain()
        steps = _IpcRead(
            export.device,
            export.stream,
            host.source(offer),
            self._memory,
            mapping,
            source_blocks,
            local_blocks,
            ranges,
            [],
        )
        return await host.run(peer, steps, local_blocks, timeout_s, on_end=mapping.release)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        if self._host is not None:
            await self._host.settled(local_blocks)

    def _open_host(self) -> HostReads:
        if self._host is None:
            raise TransferFailed("transfers are closed")
        return self._host

    def _known(self, peer: WorkerId) -> _Mapping:
        mapping = self._peers.get(peer)
        if mapping is None:
            raise TransferFailed(f"{peer} is not a peer on this host")
        return mapping


def parse_offer(offer: bytes, *, block_bytes: int) -> CudaIpcOffer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than expected."""
    parsed = parse_process_offer(CudaIpcOffer, offer, block_bytes=block_bytes, backend="CUDA IPC")
    pool_bytes = parsed.block_bytes * parsed.block_count
    is_sane = (
        len(parsed.handle) == HANDLE_BYTES
        and len(parsed.device_uuid) == UUID_BYTES
        and 0 <= parsed.pool_offset <= parsed.allocation_bytes - pool_bytes
        and 0 < parsed.allocation_bytes < 2**63
        and 0 < parsed.base_address < 2**63 - pool_bytes
    )
    if not is_sane:
        raise out_of_range("CUDA IPC")
    return parsed
