"""Another process's memory on this host, read by the kernel: `process_vm_readv` (man 2, Linux 3.2).

The kernel copies straight from the other process's pages into ours, without a copy in between and without
the other process's doing. The GIL is free meanwhile.
"""

import ctypes
import errno
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError
from kv_transfer.layout import Ranges

IOV_MAX = 1024
"""Ranges per call and side (limits.h)."""

LAST_STEP_BYTES = 2 * 2**20
STEPS_AHEAD = 8
"""A step is at most this part of what is left."""

Vectors = npt.NDArray[np.uint64]
"""Rows of (address, length): an array of `struct iovec`."""


class MemoryLost(Exception):
    """The other process is gone, or that memory is no longer its."""


class ReadNotPermitted(Exception):
    """The kernel does not let this process read that one."""


class ProcessMemory:
    """Calls from any thread. Raises SetupError where the system call does not exist."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._readv = libc.process_vm_readv
        except AttributeError:
            raise SetupError("this system has no process_vm_readv (Linux with glibc has)") from None
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = [
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
            *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
        ]

    def read(self, pid: int, local: Vectors, remote: Vectors) -> None:
        """Both sides are streams of the same length; at most IOV_MAX rows each. Raises MemoryLost,
        Forbidden."""
        assert local.flags.c_contiguous
        assert remote.flags.c_contiguous
        wanted = int(remote[:, 1].sum())
        done = self._readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        if done == wanted:
            return
        if done >= 0:  # it stopped at the first address that the process does not have
            raise MemoryLost(f"process {pid} has lost memory: {done} of {wanted} B")
        code = ctypes.get_errno()
        if code == errno.EPERM or code == errno.ENOSYS:
            raise ReadNotPermitted(os.strerror(code))
        raise MemoryLost(f"process {pid}: {os.strerror(code)}")

    def read_bytes(self, pid: int, address: int, size: int) -> bytes:
        """Raises MemoryLost, Forbidden."""
        into = np.zeros(size, np.uint8)
        here, there = vector(into.ctypes.data, size), vector(address, size)
        self.read(pid, here, there)
        return into.tobytes()


def vector(address: int, size: int) -> Vectors:
    return np.array([[address, size]], np.uint64)


class CopyPlan:
    """A read as steps, each of one system call, so each within `step_bytes` (or one range) and IOV_MAX.

    Pairs of blocks are taken in the order of the source's addresses, and neighbours become one range on
    either side by itself: the kernel only wants both sides to have the same number of bytes.
    """

    def __init__(
        self,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        ranges: Ranges,
        *,
        source: tuple[int, int],
        local: tuple[int, int],
        step_bytes: int,
        last_step_bytes: int = LAST_STEP_BYTES,
    ) -> None:
        """`source`, `local`: base address and bytes of a block. Steps get shorter towards the end of a
        read, down to `last_step_bytes`."""
        order = np.argsort(np.array(source_blocks, np.uint64), kind="stable")
        pieces = ranges or ((0, 0, local[1]),)
        there, here, lengths = (np.array(column, np.uint64) for column in zip(*pieces, strict=True))
        self._remote = _addresses(np.array(source_blocks, np.uint64)[order], source, there)
        self._local = _addresses(np.array(local_blocks, np.uint64)[order], local, here)
        self._lengths = np.tile(lengths, len(order))
        self._cuts = self._cut(step_bytes, last_step_bytes)

    def _cut(self, step_bytes: int, last_step_bytes: int) -> list[int]:
        """Where steps begin, and the end of the last. Towards the end they get shorter: a thread that shares
        its core with others then keeps the read waiting for a short one only."""
        ends = np.cumsum(self._lengths)
        cuts, begun_bytes = [0], 0
        while cuts[-1] < len(ends):
            left_bytes = int(ends[-1]) - begun_bytes
            size = min(step_bytes, max(last_step_bytes, left_bytes // STEPS_AHEAD))
            fits = int(np.searchsorted(ends, begun_bytes + size, side="right"))
            cuts.append(min(max(fits, cuts[-1] + 1), cuts[-1] + IOV_MAX))
            begun_bytes = int(ends[cuts[-1] - 1])
        return cuts

    @property
    def step_count(self) -> int:
        return len(self._cuts) - 1

    def step(self, index: int) -> tuple[Vectors, Vectors]:
        """(local, remote)"""
        part = slice(self._cuts[index], self._cuts[index + 1])
        lengths = self._lengths[part]
        return _merged(self._local[part], lengths), _merged(self._remote[part], lengths)

    def copies(self, index: int) -> npt.NDArray[np.uint64]:
        """The step as rows of (local, remote, length); only neighbours on both sides are one row."""
        part = slice(self._cuts[index], self._cuts[index + 1])
        local, remote, lengths = self._local[part], self._remote[part], self._lengths[part]
        begins = _begins(local, lengths) | _begins(remote, lengths)
        places = np.flatnonzero(begins)
        return np.stack([local[places], remote[places], np.add.reduceat(lengths, places)], axis=1)


def _addresses(
    blocks: npt.NDArray[np.uint64], place: tuple[int, int], offsets: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Addresses of every range of every block, block by block."""
    base, block_bytes = place
    starts = blocks * np.uint64(block_bytes) + np.uint64(base)
    return (starts[:, None] + offsets[None, :]).ravel()


def _begins(addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """True for pieces that do not follow the piece before them in memory."""
    begins = np.ones(len(addresses), np.bool_)
    begins[1:] = addresses[1:] != addresses[:-1] + lengths[:-1]
    return begins


def _merged(addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Vectors:
    """Rows that follow each other in memory as one."""
    begins = np.flatnonzero(_begins(addresses, lengths))
    return np.ascontiguousarray(
        np.stack([addresses[begins], np.add.reduceat(lengths, begins)], axis=1), dtype=np.uint64
    )
