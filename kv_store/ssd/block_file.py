"""The SSD tier of one size class: a file of slots, each with one block and its label.

Calls block and are meant for a few threads. A block that was not written whole, or is not the one that was
asked for, is never given out: every read checks label and payload. That is why no write waits for the
device's cache: what a crash leaves is either the block or nothing (docs/decisions/0020).
"""

import ctypes
import itertools
import threading
from pathlib import Path
from typing import Literal

from baton.core.errors import SetupError
from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.checksum import checksum as checksum_of
from kv_store.extents import allocate, punch_hole
from kv_store.large_pages import PRIVATE, SHARED, address_of, gives_large_pages
from kv_store.node.events import Recovered
from kv_store.ssd import recovery
from kv_store.ssd.device import LARGE_FROM_BYTES, AlignedBuffers, IoMode, is_aligned
from kv_store.ssd.eraser import Eraser
from kv_store.ssd.errors import CorruptBlock, DiskError
from kv_store.ssd.folder import SizeClassFile, open_size_class_file
from kv_store.ssd.layout import (
    PAGE_BYTES,
    Label,
    decode_label,
    encode_label,
    label_offset,
    payload_offset,
)

IoChoice = Literal["auto", "direct", "buffered"]
SCAN_THREADS = 4
_ALLOCATED_AHEAD_BYTES = 16 * 2**20
"""Where several size classes share a node's disk space, it may hold so much more than it may, at most."""


class BlockFile:
    """A file of blocks. It is thread-safe, but a slot's calls must not overlap: its read or write ends before
    the next begins. `forget` may be called at any time at which none of them is under way."""

    def __init__(self, file: SizeClassFile, slot_count: int) -> None:
        """Use `open`."""
        self.path, self.notes, self.slot_count = file.device.path, file.notes, slot_count
        self.io: IoMode = file.device.mode
        self.block_bytes, self.slot_bytes = file.title.block_bytes, file.title.slot_bytes
        self._file, self._device, self._title = file, file.device, file.title
        self._buffers = AlignedBuffers()
        self._is_staged = self.io == "direct" and pays_to_stage(self.slot_bytes)
        if self._is_staged:
            self.notes = (*self.notes, f"{self.path}: by way of buffers in 2 MiB pages")
        self._sequence = itertools.count(1)
        self._eraser = Eraser(self._erase, name=f"ssd-eraser-{self.block_bytes}")
        self._calls = _CallsUnderWay()
        self._allocated_slots = 0
        """Slots below this one have disk space, or had."""
        self._allocating = threading.Lock()

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        block_bytes: int,
        slot_bytes: int,
        slot_count: int,
        io: IoChoice = "auto",
        progress: recovery.Progress | None = None,
    ) -> tuple["BlockFile", list[Recovered]]:
        """Make the file or read what it holds; in a smaller file than before, what lies beyond is gone.

        `block_bytes` are the payload bytes of a block. Raises SetupError if the folder cannot be used,
        another process uses it, or the file is not ours to write: nothing is changed then.
        """
        assert 0 < block_bytes <= slot_bytes, f"blocks of {block_bytes} bytes in slots of {slot_bytes}"
        assert slot_bytes % PAGE_BYTES == 0, f"a slot of {slot_bytes} bytes is not of whole pages"
        assert slot_count > 0, "a file without slots"
        file = open_size_class_file(Path(directory), block_bytes, slot_bytes, slot_count, io)
        try:
            labels = recovery.read_labels(
                file.device, file.title, slot_count, threads=SCAN_THREADS, progress=progress
            )
        except DiskError as error:
            file.close()
            raise SetupError(f"store.ssd_dir: {error}") from error
        opened = cls(file, slot_count)
        kept, superseded = recovery.newest_of_each(labels)
        opened._sequence = itertools.count(max((label.sequence for label in labels), default=0) + 1)
        opened._allocated_slots = max((label.slot for label in labels), default=-1) + 1
        for slot in superseded:
            opened.forget(slot)
        return opened, [recovery.recovered(label) for label in kept]

    def read(self, ssd_slot: int, into: memoryview, block_hash: BlockHash) -> int:
        """Fill `into` [slot_bytes, or just the payload's bytes] and return the payload's checksum.

        Raises CorruptBlock if the slot does not hold that block whole (`into` is then garbage), DiskError if
        the device fails. The read goes straight into `into` if it is a whole slot at a page's address and
        no staging pays, else by a copy.
        """
        with self._calls:
            target, is_copied = self._io_buffer(into)
            page = self._buffers.get(PAGE_BYTES)
            self._device.read([target, page], payload_offset(self._checked(ssd_slot), self.slot_bytes))
            label = decode_label(page, file_id=self._title.file_id, slot=ssd_slot)
            if (
                label is None
                or label.facts.block_hash != block_hash
                or label.payload_bytes != self.block_bytes
            ):
                raise CorruptBlock(f"{self.path}: slot {ssd_slot} does not hold the block that was written")
            if checksum_of(target[: self.block_bytes]) != label.payload_checksum:
                raise CorruptBlock(f"{self.path}: slot {ssd_slot}: the checksum does not hold")
            if is_copied:
                _copy(into, target, self.block_bytes)
            return label.payload_checksum

    def write(self, ssd_slot: int, source: memoryview, facts: BlockFacts, checksum: int = 0) -> int:
        """Store `source` [slot_bytes, or just the payload's bytes], and return the payload's checksum, which
        is computed here if 0 is given.

        A wrong checksum makes a block that no read gives out. Raises DiskFull, DiskError: the slot is then
        forgotten, whatever it held.
        """
        with self._calls:
            offset = payload_offset(self._checked(ssd_slot), self.slot_bytes)
            checksum = checksum or checksum_of(source[: self.block_bytes])
            self._eraser.take_off(ssd_slot)
            self._allocate_ahead(ssd_slot)
            try:
                payload, is_copied = self._io_buffer(source)
                if is_copied:
                    _copy(payload, source, len(source))
                page = self._buffers.get(PAGE_BYTES)
                page[:] = self._label_page(ssd_slot, facts, checksum)
                self._device.write([payload, page], offset)
            except DiskError:
                self._eraser.add(ssd_slot)
                raise
            return checksum

    def forget(self, ssd_slot: int) -> None:
        """Make sure that the slot's block is not found again, and give its disk space back. Returns at once.

        It is done a moment later, unless a `write` to the slot comes first; `flush` waits for it. If the
        process is killed within that moment the block may be found after the restart: whole, as all that are
        found.
        """
        self._eraser.add(self._checked(ssd_slot))

    def flush(self) -> None:
        """Make what was written safe, and what was forgotten gone, in a power cut also. Raises DiskError."""
        with self._calls:
            self._eraser.finish()
            self._device.sync()

    def close(self) -> None:
        """Wait for the calls under way, flush, and give the folder free. A second call does nothing; all
        other calls then raise DiskError. Raises DiskError if flushing failed; it is closed nevertheless."""
        if not self._calls.end():
            return
        try:
            self._eraser.close()
            self._device.sync()
        finally:
            self._file.close()

    def _allocate_ahead(self, slot: int) -> None:
        """Take disk space in long pieces: writes into a new file are half as fast again.

        It is a hint: what fails here fails in the write, with the right name.
        """
        if slot < self._allocated_slots:
            return
        with self._allocating:
            count = max(1, _ALLOCATED_AHEAD_BYTES // (self.slot_bytes + PAGE_BYTES))
            end = min(self.slot_count, slot + count)
            offset = payload_offset(slot, self.slot_bytes)
            if slot >= self._allocated_slots:
                allocate(self._device.fd, offset, payload_offset(end, self.slot_bytes) - offset)
                self._allocated_slots = end

    def _label_page(self, slot: int, facts: BlockFacts, checksum: int) -> bytes:
        try:
            return encode_label(
                Label(slot, next(self._sequence), self.block_bytes, checksum, facts), self._title.file_id
            )
        except ValueError as error:
            raise DiskError(str(error)) from error

    def _io_buffer(self, buffer: memoryview) -> tuple[memoryview, bool]:
        """The buffer itself if the device can use it as it is, else one of this thread's, to be copied."""
        assert len(buffer) in (self.block_bytes, self.slot_bytes), f"{len(buffer)} bytes for a slot"
        fits = self.io == "buffered" or (not self._is_staged and is_aligned(buffer))
        if len(buffer) == self.slot_bytes and fits:
            return buffer, False
        return self._buffers.get(self.slot_bytes), True

    def _erase(self, slot: int) -> None:
        offset, size = payload_offset(slot, self.slot_bytes), self.slot_bytes + PAGE_BYTES
        try:
            punch_hole(self._device.fd, offset, size)
        except OSError:  # a file system without holes: then only the label
            page = memoryview(self._buffers.get(PAGE_BYTES))
            page[:] = bytes(PAGE_BYTES)
            self._device.write([page], label_offset(slot, self.slot_bytes))

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count, f"slot {slot} of {self.slot_count}"
        return slot


def pays_to_stage(slot_bytes: int) -> bool:
    """Whether direct IO of the arena's memory is slower than by way of a buffer. A device is given a list of
    the pieces of memory: with pages of 4 KiB, 129 for 512 KiB, which made reads and writes of a virtual disk
    two to three times as slow (docs/benchmarks/transfer-and-store.md)."""
    return slot_bytes >= LARGE_FROM_BYTES and gives_large_pages(PRIVATE) and not gives_large_pages(SHARED)


def _copy(to: memoryview, source: memoryview, size: int) -> None:
    """Copy with the GIL released, since the event loop would wait for it."""
    assert size <= min(len(to), len(source)), "a copy beyond a buffer"
    ctypes.memmove(address_of(to), address_of(source), size)


class _CallsUnderWay:
    """Keeps a file open while a thread is in it, and shut afterwards."""

    def __init__(self) -> None:
        self._count, self._is_ended = 0, False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._is_ended:
                raise DiskError("the file of blocks is closed")
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def end(self) -> bool:
        """Let no new call begin, and wait for those under way. False means that it has ended already."""
        with self._changed:
            if self._is_ended:
                return False
            self._is_ended = True
            self._changed.wait_for(lambda: self._count == 0)
            return True
