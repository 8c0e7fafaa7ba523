"""Pages that the kernel gives in the background."""

import gc
import mmap
from pathlib import Path

import numpy as np

from engine.kv.populate import PIECE_BYTES, SMALLEST_BYTES, populate_in_background

MIB = 2**20


def mapped(size: int) -> tuple[mmap.mmap, int]:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages, np.frombuffer(pages, np.uint8).ctypes.data


def resident_bytes(address: int) -> int:
    """Bytes of the mapping at `address` that are in memory, as the kernel counts them."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        first, _, rest = line.partition("-")
        end = rest.split(" ", 1)[0]
        try:
            is_it = int(first, 16) <= address < int(end, 16)
        except ValueError:
            continue
        if is_it:
            return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("Rss:"))
    raise AssertionError("no such mapping")


def test_all_pages_are_given_and_what_was_written_stays() -> None:
    size = SMALLEST_BYTES + PIECE_BYTES // 2
    pages, address = mapped(size)
    pages[PIECE_BYTES + 5] = 77
    thread = populate_in_background(address, size, owner=pages)
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert resident_bytes(address) >= size
    assert pages[PIECE_BYTES + 5] == 77
    assert not any(pages[:PIECE_BYTES])


def test_memory_that_goes_meanwhile_ends_it() -> None:
    pages, address = mapped(4 * SMALLEST_BYTES)
    thread = populate_in_background(address, 4 * SMALLEST_BYTES, owner=pages)
    assert thread is not None
    del pages
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_small_mapping_is_left_to_its_first_writer() -> None:
    pages, address = mapped(PIECE_BYTES)
    assert populate_in_background(address, PIECE_BYTES, owner=pages) is None
