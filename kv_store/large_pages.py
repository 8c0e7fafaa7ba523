"""Memory in pages of 2 MiB, which a disk needs a short list of pieces for.

Linux gives private memory such pages where they are asked for, by default, and shared memory none
(Documentation/admin-guide/mm/transhuge.rst).
"""

import contextlib
import mmap
from pathlib import Path

import numpy as np

LARGE_PAGE_BYTES = 2 * 2**20
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
SHARED, PRIVATE = "shmem_enabled", "enabled"
_GIVES = ("always", "advise", "madvise", "within_size", "force")


def setting_of(kind: str) -> str:
    """What the system says of `SHARED` or `PRIVATE` memory; empty: nothing."""
    try:
        return (SETTINGS / kind).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def gives_large_pages(kind: str) -> bool:
    """Whether memory of this kind gets large pages where they are asked for."""
    return setting_of(kind) in _GIVES


def address_of(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def large_page_buffer(size: int) -> memoryview:
    """Return private memory of so many bytes, from a large page's address on, in large pages if the system
    gives them. It is freed with the last view of it."""
    # One page more to begin at its address, and one so that the last one is whole.
    memory = mmap.mmap(-1, size + 2 * LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -address_of(view) % LARGE_PAGE_BYTES
    return view[start : start + size]
