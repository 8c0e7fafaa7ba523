"""A GPU of the tests: its memory is host memory that processes can map, its handles name files."""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

from kv_transfer.backends.cuda_driver import HANDLE_BYTES, CudaError

ALLOCATION_OFFSET = 512
"""A pool does not begin where its allocation does."""
_allocations: dict[int, tuple[int, int]] = {}
"""First address -> (bytes, file descriptor) of what may be shared."""


def shareable_array(shape):
    """Zeros, uint8, in memory that `FakeDevice` takes for a device's."""
    size = int(np.prod(shape)) + ALLOCATION_OFFSET
    fd = os.memfd_create("device memory of the tests")
    os.ftruncate(fd, size)
    pages = mmap.mmap(fd, size)
    whole = np.frombuffer(pages, np.uint8)
    _allocations[whole.ctypes.data] = (size, fd)
    weakref.finalize(pages, _forget, whole.ctypes.data, fd)
    return whole[ALLOCATION_OFFSET:].reshape(shape)


def _forget(address, fd):
    del _allocations[address]
    os.close(fd)


class FakeDevice:
    """`cuda_driver.CudaDevice` without a driver. Copies are carried out by `wait`, in `queued` until then."""

    def __init__(self, index):
        self.index = index
        self.log = []
        """What was called, copies with their sizes."""
        self.failing = {}
        """Name of a method -> what it raises."""
        self.queued = []
        self.mapped = {}
        self.copies_begin = threading.Event()
        self.copies_begin.set()
        self.is_copying = threading.Event()
        self._current = threading.local()

    def _called(self, name, *arguments):
        assert self.is_current, f"{name}: no device is current on this thread"
        self.log.append((name, *arguments))
        if name in self.failing:
            raise CudaError(f"{name}: {self.failing[name]}")

    @contextlib.contextmanager
    def current(self):
        self._current.depth = getattr(self._current, "depth", 0) + 1
        try:
            yield
        finally:
            self._current.depth -= 1

    @property
    def is_current(self):
        """Whether the calling thread has this device as its current one."""
        return getattr(self._current, "depth", 0) > 0

    def uuid(self):
        return bytes([self.index]) * 16

    def allocation(self, address):
        self._called("allocation")
        for first, (size, _) in _allocations.items():
            if first <= address < first + size:
                return first, size
        raise CudaError("cuMemGetAddressRange_v2: CUDA_ERROR_NOT_FOUND")

    def export(self, address):
        self._called("export")
        return f"/proc/{os.getpid()}/fd/{_allocations[address][1]}".encode().ljust(HANDLE_BYTES, b"\0")

    def map(self, handle):
        self._called("map")
        path = handle.rstrip(b"\0").decode()
        if path.startswith(f"/proc/{os.getpid()}/"):
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT")
        try:
            with open(path, "r+b") as file:
                pages = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise CudaError(f"cuIpcOpenMemHandle_v2: {error}") from None
        whole = np.frombuffer(pages, np.uint8)
        self.mapped[whole.ctypes.data] = whole
        return whole.ctypes.data

    def unmap(self, address):
        self._called("unmap")
        assert not self.queued
        del self.mapped[address]

    def make_stream(self):
        self._called("make_stream")
        return 7

    def drop_stream(self, stream):
        self._called("drop_stream")
        assert stream == 7

    def copy(self, stream, to, source, size_bytes):
        assert stream == 7
        self._called("copy", size_bytes)
        self.queued.append((to, source, size_bytes))

    def wait(self, stream):
        self.is_copying.set()
        assert self.copies_begin.wait(20)
        for to, source, size in self.queued:
            ctypes.memmove(to, source, size)
        self.queued.clear()
        self._called("wait")

    def close(self):
        self.log.append(("close",))
        assert not self.mapped
