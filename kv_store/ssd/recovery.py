"""The blocks that a file holds, read from its labels alone, as fast as the device gives small reads."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from baton.core.ids import BlockHash
from kv_store.node.events import Recovered
from kv_store.ssd.device import AlignedBuffers, Device
from kv_store.ssd.layout import PAGE_BYTES, Label, Title, decode_label, label_offset, payload_offset

Progress = Callable[[int, int], None]
"""A callback with (slots looked at, slots in all). Any thread may call it, now and then."""

_SLOTS_PER_TASK = 512
_MAGIC_BYTES = 8


def read_labels(
    device: Device, title: Title, slot_count: int, *, threads: int, progress: Progress | None = None
) -> list[Label]:
    """All sound labels. A label that is torn, or of another file or version, is no block. Raises
    DiskError."""
    buffers, done, guard = AlignedBuffers(), 0, threading.Lock()

    def read_range(slots: range) -> list[Label]:
        nonlocal done
        found = list(_labels_in(device, title, slots, buffers.get(PAGE_BYTES)))
        with guard:
            done += len(slots)
            if progress:
                progress(done, slot_count)
        return found

    ranges = [
        range(first, min(slot_count, first + _SLOTS_PER_TASK))
        for first in range(0, slot_count, _SLOTS_PER_TASK)
    ]
    with ThreadPoolExecutor(threads, thread_name_prefix="ssd-recovery") as pool:
        return [label for found in pool.map(read_range, ranges) for label in found]


def newest_of_each(labels: Iterable[Label]) -> tuple[list[Label], list[int]]:
    """The labels to keep, and the slots to forget.

    A block can be found twice after a power cut, when a slot was evicted, the block stored again elsewhere,
    and the eviction had not reached the disk. Both are whole; the one written later stays.
    """
    newest: dict[BlockHash, Label] = {}
    superseded: list[int] = []
    for label in labels:
        other = newest.get(label.facts.block_hash)
        if other is not None:
            older, label = sorted((other, label), key=lambda one: (one.sequence, one.slot))
            superseded.append(older.slot)
        newest[label.facts.block_hash] = label
    return list(newest.values()), superseded


def recovered(label: Label) -> Recovered:
    return Recovered(label.slot, label.facts, label.payload_checksum)


def _labels_in(device: Device, title: Title, slots: range, page: memoryview) -> Iterable[Label]:
    slot_bytes, slot = title.slot_bytes, slots.start
    while slot < slots.stop:
        device.read([page], label_offset(slot, slot_bytes))
        label = decode_label(page, file_id=title.file_id, slot=slot)
        if label is not None and label.payload_bytes == title.block_bytes:
            yield label
        is_hole = label is None and not any(page[:_MAGIC_BYTES])
        slot = _next_with_data(device.fd, slot + 1, slot_bytes) if is_hole else slot + 1


def _next_with_data(fd: int, slot: int, slot_bytes: int) -> int:
    """The first slot from here on that was ever written, as far as the file system tells holes."""
    try:
        data_at = os.lseek(fd, payload_offset(slot, slot_bytes), os.SEEK_DATA)
    except OSError:  # no data behind it; or no such call, and then the size is where the data end
        return 2**63
    return max(slot, (data_at - PAGE_BYTES) // (slot_bytes + PAGE_BYTES))
