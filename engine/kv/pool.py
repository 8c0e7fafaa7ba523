"""The memory that KV blocks live in: one allocation, block-major.

One block is one contiguous range of `block_bytes` (all layers, K and V), so that it is one descriptor
to transfer and one range to write to a file. Host memory is mapped with the advice to use 2 MiB pages; reads
by a peer are about twice as fast with them. (Whoever allocates large host tensors through torch itself sets
THP_MEM_ALLOC_ENABLE=1 before importing it.) The kernel gives zeroed pages, when they are first used or when
`populate_in_background` asks for them: a worker's start need not wait for them.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from baton.core.errors import SetupError
from baton.core.geometry import SCALE_BYTES, KVGeometry
from engine.devices import STORED_TORCH_DTYPES
from engine.kv.populate import populate_in_background
from engine.model_files.sizes import pool_block_count

_ALIGNMENT_BYTES = 2 * 2**20
"""Alignment of the first block: a 2 MiB page, hence also a 4 KiB one."""


class KVPool:
    """Blocks 0 … block_count-1, laid out as `KVGeometry` says.

    All bytes start as zeros. `generations` is in host memory whatever the device; whoever gives blocks
    out raises their entries (`kv_transfer.backend.KVMemory`).
    """

    def __init__(
        self, geometry: KVGeometry, *, kv_bytes: int, device: torch.device, is_shared: bool = False
    ) -> None:
        """is_shared: other processes of this host may map the memory, see `attach`.

        Raises SetupError if `kv_bytes` holds no block, the device has not that much memory, or it cannot
        compute with the geometry's dtype.
        """
        _check_dtype(geometry, device)
        block_count = pool_block_count(geometry, kv_bytes)
        size = block_count * geometry.block_bytes
        _check_room(size, device)
        self.address = ""
        """Name of the memory for `attach` in another process; empty: it is not shared."""
        self._pages: mmap.mmap | None = None
        """Memory of this process alone, whose pages the kernel has yet to give."""
        if is_shared:
            memory, self.address = _allocate_shared(size, device)
        else:
            memory = _allocate(size, device) if device.type != "cpu" else self._map(size)
        self._lay_out(geometry, memory, block_count, device)

    @classmethod
    def attach(cls, geometry: KVGeometry, address: str, *, block_count: int) -> "KVPool":
        """Map the pool of another process of this host. It lives as long as any process has it mapped. The
        generations are not shared: they are the leader's.

        Raises SetupError: that process is gone, or its pool has another size.
        """
        size = block_count * geometry.block_bytes
        process, _, descriptor = address.partition(".")
        try:
            fd = os.open(f"/proc/{int(process)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(fd, "rb+", buffering=0)):
                if os.fstat(fd).st_size != size:
                    raise SetupError(
                        f"the KV pool of process {process} has {os.fstat(fd).st_size} bytes, not {size}"
                    )
                memory = _mapped(fd, size)
        except (OSError, ValueError) as error:
            raise SetupError(f"the KV pool at {address} cannot be mapped: {error}") from error
        pool = cls.__new__(cls)
        pool.address, pool._pages = address, None
        pool._lay_out(geometry, memory, block_count, torch.device("cpu"))
        return pool

    def _map(self, size: int) -> Tensor:
        """Zeroed bytes [size] of this process, aligned. Raises SetupError."""
        try:
            pages = mmap.mmap(-1, size + _ALIGNMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SetupError(
                f"the KV pool of {size} bytes (engine.kv_bytes) does not fit: {error}"
            ) from error
        with contextlib.suppress(OSError):  # systems without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages = pages
        return _aligned(torch.frombuffer(pages, dtype=torch.uint8), size)

    def populate_in_background(self) -> None:
        """Have the kernel give all pages of the pool while others use it, so that a lack of memory shows soon
        after the start rather than under load."""
        if self._pages is not None:
            populate_in_background(self._memory.data_ptr(), self._memory.numel(), owner=self._pages)

    def _lay_out(self, geometry: KVGeometry, memory: Tensor, block_count: int, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self.block_bytes, self.block_count = geometry.block_bytes, block_count
        self._memory = memory
        per_block = (
            geometry.layer_count,
            geometry.planes,
            geometry.kv_head_count,
            geometry.block_tokens,
        )
        by_block = self._memory.view(self.block_count, self.block_bytes)
        values, scales = by_block[:, : geometry.values_bytes], by_block[:, geometry.values_bytes :]
        self.blocks: Tensor = values.view(STORED_TORCH_DTYPES[geometry.stored_dtype]).unflatten(
            1, (*per_block, geometry.head_dim)
        )
        """The stored numbers of the whole pool, [B, L, planes, H, P, D]; contiguous unless quantised."""
        self.scales: Tensor | None = None
        """float32 [B, L, planes, H, P] where the KV is quantised: one per vector of `blocks`."""
        if geometry.is_quantized:
            self.scales = scales.view(torch.float32).unflatten(1, per_block)
        self.generations: npt.NDArray[np.uint64] = np.zeros(self.block_count, dtype=np.uint64)
        self._raising = threading.Lock()

    @property
    def memory(self) -> Tensor:
        """The whole pool's bytes, uint8 [B, block_bytes]."""
        return self._memory.view(self.block_count, self.block_bytes)

    @property
    def base_address(self) -> int:
        return self.blocks.data_ptr()

    def raise_generations(self, blocks: Sequence[int], generations: Sequence[int]) -> None:
        """Raise entries to what the leader's are, before anything is written into these blocks. None ever
        falls. Any thread may call."""
        places = np.asarray(blocks, np.intp)
        with self._raising:
            # An assignment, and no sum: peers read the table at any moment.
            self.generations[places] = np.maximum(
                self.generations[places], np.asarray(generations, np.uint64)
            )

    def clear(self, block_id: int) -> None:
        """Zero a block before it is written in part.

        The torch kernels multiply the unwritten positions with a weight of zero; a NaN left there by
        the block's last user would survive that, and spread from one request to another.
        """
        self.block_view(block_id).zero_()

    def block_view(self, block_id: int) -> Tensor:
        """One block's bytes, a uint8 view [block_bytes]."""
        start = block_id * self.block_bytes
        return self._memory[start : start + self.block_bytes]


def _check_dtype(geometry: KVGeometry, device: torch.device) -> None:
    if geometry.kv_dtype == "fp8" and device.type == "cpu":
        raise SetupError("model.kv_dtype=fp8 needs a GPU that computes with fp8: on the CPU use int8")
    if geometry.is_quantized and geometry.values_bytes % SCALE_BYTES:
        raise SetupError(
            f"model.kv_dtype={geometry.kv_dtype}: the {geometry.values_bytes} bytes of a block's values are "
            f"no multiple of {SCALE_BYTES}: choose another engine.block_tokens"
        )


def _check_room(size: int, device: torch.device) -> None:
    is_cuda = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] if is_cuda else psutil.virtual_memory().available
    if size > room:
        raise SetupError(
            f"the KV pool of {size} bytes (engine.kv_bytes) does not fit: {device} has {room} bytes free"
        )


def _allocate_shared(size: int, device: torch.device) -> tuple[Tensor, str]:
    """Zeroed bytes [size] that other processes can map, and their address. Raises SetupError."""
    if device.type != "cpu":
        raise SetupError(f"a KV pool on {device} cannot be shared with another process: only host memory can")
    try:
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)  # a lack of memory shows here, and would be a signal later
            return _mapped(fd, size), f"{os.getpid()}.{fd}"
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise SetupError(f"the KV pool of {size} bytes (engine.kv_bytes) does not fit: {error}") from error


def _mapped(fd: int, size: int) -> Tensor:
    memory = mmap.mmap(fd, size)
    with contextlib.suppress(OSError):  # systems that have no large pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _allocate(size: int, device: torch.device) -> Tensor:
    """Zeroed bytes [size] of a device, aligned. Raises SetupError."""
    try:
        whole = torch.empty(size + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise SetupError(f"the KV pool of {size} bytes (engine.kv_bytes) does not fit on {device}") from error
    return _aligned(whole, size).zero_()


def _aligned(whole: Tensor, size: int) -> Tensor:
    skip = -whole.data_ptr() % _ALIGNMENT_BYTES
    return whole[skip : skip + size]
