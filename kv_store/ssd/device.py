"""Whole reads and writes at an offset, direct or buffered, with the file system's errors told apart."""

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Literal, Protocol

from kv_store.large_pages import address_of, large_page_buffer
from kv_store.ssd.errors import DiskError, DiskFull
from kv_store.ssd.layout import PAGE_BYTES

IoMode = Literal["direct", "buffered"]

LARGE_FROM_BYTES = 64 * 2**10
"""Buffers of this size and more are worth a large page."""

_RWF_DONTCACHE = 0x80
"""Linux 6.14: buffered, but the pages go after use. Python has no name for it yet."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_aligned(buffer: memoryview) -> bool:
    """Whether direct IO can use the buffer: whole pages at a page's address."""
    return len(buffer) % PAGE_BYTES == 0 and address_of(buffer) % PAGE_BYTES == 0


class AlignedBuffers(threading.local):
    """One page-aligned buffer per thread and size, in large pages if it is as large as they are worth."""

    def __init__(self) -> None:
        self._by_size: dict[int, memoryview] = {}

    def get(self, size: int) -> memoryview:
        if size not in self._by_size:
            is_large = size >= LARGE_FROM_BYTES
            self._by_size[size] = large_page_buffer(size) if is_large else memoryview(mmap.mmap(-1, size))
        return self._by_size[size]


class Device:
    """An open file. It is thread-safe: no position is kept.

    Raises DiskError, and DiskFull where there is no room; a read beyond the end is a DiskError too.
    """

    def __init__(self, path: Path, mode: IoMode) -> None:
        """Raises OSError, EINVAL where the file system has no direct IO."""
        self.path = path
        self.mode: IoMode = mode
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if mode == "direct" else 0)
        self.fd = os.open(path, flags)
        self._flags = 0
        if mode == "buffered":
            # Blocks are kept in the arena if they are wanted again; a second copy in the page cache would be
            # memory that nobody configured.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._flags = _RWF_DONTCACHE if self._has_dontcache() else 0

    @property
    def drops_by_advice(self) -> bool:
        return self.mode == "buffered" and not self._flags

    def read(self, buffers: list[memoryview], offset: int) -> None:
        """Fill all buffers. In direct mode they must be aligned, as must be `offset`."""
        self._transfer(os.preadv, buffers, offset, "read")

    def write(self, buffers: list[memoryview], offset: int) -> None:
        self._transfer(os.pwritev, buffers, offset, "write")

    def sync(self) -> None:
        """Make what was written survive a power cut from here on."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise _named(error, "sync", self.path) from error

    def close(self) -> None:
        os.close(self.fd)

    def _transfer(
        self, call: "_VectoredIo", buffers: list[memoryview], offset: int, verb: Literal["read", "write"]
    ) -> None:
        left, at = buffers, offset
        while left:
            try:
                done = call(self.fd, left, at, self._flags)
            except OSError as error:
                raise _named(error, verb, self.path) from error
            if done == 0:
                raise DiskError(f"{self.path}: {verb} of {_size(buffers)} bytes at {offset} ended at {at}")
            at += done
            left = _rest(left, done)
        if self.drops_by_advice:
            os.posix_fadvise(self.fd, offset, at - offset, os.POSIX_FADV_DONTNEED)

    def _has_dontcache(self) -> bool:
        try:
            os.preadv(self.fd, [bytearray(1)], 0, _RWF_DONTCACHE)
        except OSError:
            return False
        return True


class _VectoredIo(Protocol):
    """The type of os.preadv and os.pwritev."""

    def __call__(self, fd: int, buffers: Any, offset: int, flags: int, /) -> int: ...


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The part of the buffers that is left after so many bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _size(buffers: list[memoryview]) -> int:
    return sum(len(buffer) for buffer in buffers)


def _named(error: OSError, verb: str, path: Path) -> DiskError:
    kind = DiskFull if error.errno in _FULL else DiskError
    return kind(f"{path}: {verb}: {error.strerror}")
