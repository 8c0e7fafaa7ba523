"""Direct or buffered IO, chosen by asking the disk itself.

Direct IO is the rule, as it needs no second copy and no memory beside the arena. Buffered IO is chosen where
the file system has no direct IO, and where it is clearly faster including the time to reach the device.
"""

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

from kv_store.ssd.device import Device, IoMode
from kv_store.ssd.layout import PAGE_BYTES

PROBE_BYTES = 16 * 2**20
PROBE_SLOTS_MAX = 512
"""Slots that are tried, at most. Fewer bytes of small slots tell as much, and thousands of calls would hold
up the tier's start for seconds."""
_ROUNDS = 3
_CLEARLY = 0.7
"""Buffered IO must take less than this share of direct IO's time: disks are noisy, and its copy costs
memory."""


def supports_direct(path: Path) -> bool:
    """Whether this existing file can be opened and read past the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def choose_io(directory: Path, slot_bytes: int) -> tuple[IoMode, str]:
    """Write and read a few slots of a temporary file both ways, in turn. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-", suffix=".tmp") as file:
        path = Path(file.name)
        count = min(max(2, PROBE_BYTES // slot_bytes), PROBE_SLOTS_MAX)
        os.truncate(path, count * slot_bytes)
        if not supports_direct(path):
            return "buffered", f"{directory}: its file system has no direct IO: buffered"
        times: dict[IoMode, list[float]] = {"direct": [], "buffered": []}
        for _ in range(_ROUNDS):
            for mode, seconds in times.items():
                seconds.append(_seconds(path, mode, slot_bytes, count))
    direct_s, buffered_s = (statistics.median(times[mode]) for mode in ("direct", "buffered"))
    chosen: IoMode = "buffered" if buffered_s < _CLEARLY * direct_s else "direct"
    rates = [count * slot_bytes * 2 / seconds / 1e9 for seconds in (direct_s, buffered_s)]
    return (
        chosen,
        f"{directory}: {chosen} IO; direct {rates[0]:.2f}, buffered {rates[1]:.2f} GB/s (writes + reads)",
    )


def _seconds(path: Path, mode: IoMode, slot_bytes: int, count: int) -> float:
    device = Device(path, mode)
    with mmap.mmap(-1, slot_bytes) as memory, contextlib.closing(device):
        view = memoryview(memory)
        try:
            start = time.perf_counter()
            for index in range(count):
                device.write([view], index * slot_bytes)
            device.sync()
            written = time.perf_counter()
            os.posix_fadvise(device.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            for index in range(count):
                device.read([view], index * slot_bytes)
            return written - start + time.perf_counter() - begun
        finally:
            view.release()
