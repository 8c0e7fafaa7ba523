"""The host memory that a store node shares with the workers of its host.

It is a memfd: the node makes it, and a worker gets its descriptor over the local socket and maps the same
pages. The file is sparse, and a page is taken when somebody first touches it, which would fail by a signal.
So memory is *reserved* first, which fails with an error code, and given back by a hole punched into the file.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

from baton.core.errors import BatonError, SetupError
from kv_store.extents import punch_hole
from kv_store.host_memory import available_bytes
from kv_store.large_pages import SETTINGS, SHARED, gives_large_pages, setting_of

PAGE_BYTES = mmap.PAGESIZE
SLAB_BYTES = 16 * 2**20
"""Bytes reserved or mapped in one call: some 10 ms, for which others who reserve may wait."""

_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No one who has the descriptor can take pages away from under the others."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class NoHostMemory(BatonError):
    """The system has no memory left for what the arena was made for."""


def slot_bytes_for(block_bytes: int) -> int:
    """`block_bytes` rounded up to whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def check_room(size: int) -> None:
    """Raise SetupError if a store of so many bytes has no room now."""
    room = available_bytes()
    if size > room:
        raise SetupError(
            f"the store's {size} bytes of host memory (store.host_bytes) do not fit: "
            f"{room} bytes are available here, by the machine's memory and this process's limits"
        )


class Arena:
    """`slot_count` slots of `slot_bytes`, mapped for reading and writing; slot i begins at i * slot_bytes.

    Nothing here knows which slot holds what. All methods may be called from any thread.
    """

    def __init__(self, fd: int, slot_bytes: int, slot_count: int, notes: tuple[str, ...] = ()) -> None:
        """Map `fd`, and own it from here on. Use `create` and `attach`."""
        self.fd, self.slot_bytes, self.slot_count, self.notes = fd, slot_bytes, slot_count, notes
        self._memory = mmap.mmap(fd, slot_bytes * slot_count)
        self._view = memoryview(self._memory)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._is_reserved = bytearray(slot_count)
        self._granted_bytes = 0
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def create(cls, slot_bytes: int, slot_count: int, *, name: str, room_bytes: int | None = None) -> "Arena":
        """Create an arena. It is sparse, and takes no memory yet.

        `room_bytes` is memory that must be free now: all of it by default, less where another arena will give
        its memory back for this one. Raises SetupError if it is not free, or the system has no memfd.
        """
        assert slot_bytes > 0, "an empty slot"
        assert slot_bytes % PAGE_BYTES == 0, f"a slot of {slot_bytes} bytes is not of whole pages"
        assert slot_count > 0, "an arena without slots"
        size = slot_bytes * slot_count
        check_room(size if room_bytes is None else room_bytes)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SetupError(f"no shared memory for the store (memfd_create): {error.strerror}") from error
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        try:
            arena = cls(fd, slot_bytes, slot_count)
        except OSError as error:  # a limit on the address space
            os.close(fd)
            raise SetupError(
                f"the store's {size} bytes of host memory (store.host_bytes) cannot be mapped, "
                f"see `ulimit -v`: {error.strerror}"
            ) from error
        arena.notes = (arena._advise_huge_pages(),)
        return arena

    @classmethod
    def attach(cls, fd: int, slot_bytes: int, slot_count: int) -> "Arena":
        """Map the arena behind a descriptor that a node sent. The arena owns the descriptor from here on.
        Raises SetupError (and closes it) if it is not what the node described."""
        size, expected = os.fstat(fd).st_size, slot_bytes * slot_count
        is_sound = slot_bytes > 0 and slot_bytes % PAGE_BYTES == 0 and slot_count > 0
        if not is_sound or size != expected:
            os.close(fd)
            raise SetupError(
                f"the store's arena has {size} bytes, but was announced with {slot_count} of {slot_bytes}: "
                "node and worker are not of one version, or the socket is not a store node's"
            )
        arena = cls(fd, slot_bytes, slot_count)
        arena._advise_huge_pages()
        return arena

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, page-aligned."""
        start = self._start(slot)
        return self._view[start : start + self.slot_bytes]

    def address(self, slot: int) -> int:
        return self.base_address + self._start(slot)

    def reserve(self, first_slot: int, slot_count: int = 1) -> None:
        """Take the memory of these slots, so that touching them cannot fail. Slots that have memory cost
        little.

        Raises NoHostMemory: the slots must not be touched then.
        """
        assert 0 <= first_slot <= first_slot + slot_count <= self.slot_count, "slots beyond the end"
        end = first_slot + slot_count
        if self._is_reserved.find(0, first_slot, end) < 0:
            return  # without waiting for a slab
        with self._lock:
            for slot in range(first_slot, end):
                if not self._is_reserved[slot]:
                    self._take(slot, self._run_end(slot, end))

    def reserve_slab(self) -> bool:
        """Take memory for the next slots that have none, about SLAB_BYTES. False means that all have theirs.

        A thread calls it that takes memory ahead of its use, beside other work. Raises NoHostMemory.
        """
        with self._lock:
            first = self._is_reserved.find(0)
            if first < 0:
                return False
            slab_slots = max(1, SLAB_BYTES // self.slot_bytes)
            self._take(first, self._run_end(first, min(self.slot_count, first + slab_slots)))
            return True

    def map_slabs(self, start_bytes: int = 0) -> Iterator[int]:
        """Put what has memory already into this process's page tables, by slabs from `start_bytes` on, and
        yield each slab's end.

        A thread of a worker that has just attached calls it: a first copy into pages that are not mapped yet
        is several times slower. Slots without memory are left alone.
        """
        for start, end in self._data_ranges(start_bytes):
            for at in range(start, end, SLAB_BYTES):
                if self._is_closed:
                    return
                slab_end = min(at + SLAB_BYTES, end)
                _libc.madvise(self.base_address + at, slab_end - at, _MADV_POPULATE_WRITE)  # only a hint
                yield slab_end

    def release(self, slot: int) -> None:
        """Give the slot's memory back to the system. The slot reads as zeros, and nobody may be using it."""
        with self._lock:
            self._is_reserved[slot] = 0
            punch_hole(self.fd, self._start(slot), self.slot_bytes)

    def reserved_count(self) -> int:
        """Slots that have memory."""
        return self._is_reserved.count(1)

    def resident_bytes(self) -> int:
        """The memory that the arena takes now, over all processes."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Unmap the arena. A second call does nothing. Memory in use through a view stays mapped until the
        view is gone."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._view.release()
            with contextlib.suppress(BufferError):  # views are in use: unmapped when the last one goes
                self._memory.close()
            os.close(self.fd)

    def _start(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count, f"slot {slot} of {self.slot_count}"
        return slot * self.slot_bytes

    def _run_end(self, slot: int, limit: int) -> int:
        """The first slot after `slot` that has memory already."""
        found = self._is_reserved.find(1, slot, limit)
        return limit if found < 0 else found

    def _take(self, first: int, end: int) -> None:
        start, size = self._start(first), (end - first) * self.slot_bytes
        self._check_room(size)
        # It takes memory by the mapping and not by fallocate, which takes 4 KiB pages whatever was advised
        # for the mapping.
        if _libc.madvise(self.base_address + start, size, _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            if error != errno.EINVAL:
                raise NoHostMemory(f"no {size} bytes for the store's arena: {os.strerror(error)}")
            self._allocate(start, size)  # Linux before 5.14
        self._is_reserved[first:end] = b"\1" * (end - first)

    def _check_room(self, size: int) -> None:
        """Check that there is memory. The kernel kills somebody rather than refuse a control group's memory,
        so the group is asked before; for small sizes not every time."""
        if size > self._granted_bytes:
            room = available_bytes()
            if size > room:
                raise NoHostMemory(f"no {size} bytes of memory left for the store's arena: {room} available")
            self._granted_bytes = min(room, size + SLAB_BYTES)
        self._granted_bytes -= size

    def _allocate(self, start: int, size: int) -> None:
        try:
            os.posix_fallocate(self.fd, start, size)
        except OSError as error:
            raise NoHostMemory(f"no {size} bytes for the store's arena: {error.strerror}") from error

    def _advise_huge_pages(self) -> str:
        failed = _libc.madvise(self.base_address, len(self._memory), mmap.MADV_HUGEPAGE)
        setting = setting_of(SHARED)
        if not failed and gives_large_pages(SHARED):
            return f"arena: 2 MiB pages ({SHARED} is {setting})"
        return (
            f"arena: 4 KiB pages ({SETTINGS / SHARED} is {setting or 'not there'}; advise would allow 2 MiB)"
        )

    def _data_ranges(self, at: int) -> Iterator[tuple[int, int]]:
        size = self.slot_bytes * self.slot_count
        while at < size and not self._is_closed:
            try:
                start = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:  # no data after `at`
                return
            at = os.lseek(self.fd, start, os.SEEK_HOLE)
            yield start, at
