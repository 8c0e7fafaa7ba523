"""Copies between a worker's KV pool in host memory and the arena, many blocks at once.

Everything big happens with the GIL released, a slice at a time. Other threads of the worker run on, and wait
for this one a few microseconds per slice at most.

The C library streams past the caches from sizes on that are larger than a block, and whether that is better
differs between processors. So it is tried.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

SLICE_BYTES = 2**20
"""Bytes of adjacent blocks that are copied in one call: 50 us or so. A slice is still in the core's cache
when its checksum is computed. Smaller slices with a running XXH3 are slower: that has no AVX-512 here."""

Move = Callable[[int, int, int], object]
"""Copies (destination, source, bytes)."""

TRIED_BYTES, TRIED_BLOCK_BYTES, TRIED_ROUNDS = 32 * 2**20, 2**19, 3
"""More than a cache holds, so that the memory is what is measured: 20 ms or so in all."""
STREAM_GAIN = 1.1
"""A streaming copy is used if it is so many times as fast as the C library's."""


def is_faster(stream: Move, *, now: Callable[[], float] = time.perf_counter) -> bool:
    """Whether `stream` copies blocks faster than the C library does on this machine. Both take turns, and the
    best of each counts."""
    source = ctypes.create_string_buffer(TRIED_BYTES)
    target = ctypes.create_string_buffer(TRIED_BYTES)
    places = [
        (ctypes.addressof(target) + at, ctypes.addressof(source) + at)
        for at in range(0, TRIED_BYTES, TRIED_BLOCK_BYTES)
    ]
    ctypes.memset(target, 1, TRIED_BYTES)  # pages that were never written are not what is compared
    ctypes.memset(source, 1, TRIED_BYTES)
    moves: tuple[Move, Move] = (ctypes.memmove, stream)
    best = [float("inf")] * len(moves)
    for _ in range(TRIED_ROUNDS):
        for number, move in enumerate(moves):
            began_s = now()
            for to, origin in places:
                move(to, origin, TRIED_BLOCK_BYTES)
            best[number] = min(best[number], now() - began_s)
    return best[0] > STREAM_GAIN * best[1]


class BlockCopier:
    """Copies blocks. Addresses are of this process, and must stay valid until `copy` returns. Thread-safe."""

    def __init__(self, threads: int = 1, *, stream: Move | None = None) -> None:
        """`threads` work on one `copy`, the caller's among them. `stream` copies in place of the C
        library."""
        assert threads > 0, "somebody must copy"
        self._stream = stream
        self._staging = threading.local()
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "block-copier") if threads > 1 else None

    def copy(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        block_bytes: int,
        *,
        has_checksums: bool = True,
    ) -> list[int]:
        """Copy `block_bytes` from each source to its destination; no two blocks may overlap.

        Returns the XXH3-64 of each block as it arrived, or nothing without `has_checksums`.
        """
        assert len(sources) == len(destinations), "every source needs its destination"
        share = -(-len(sources) // self._threads)
        if self._helpers is None or share == 0:
            return self._copy(sources, destinations, block_bytes, has_checksums)
        parts = [
            (sources[at : at + share], destinations[at : at + share], block_bytes, has_checksums)
            for at in range(0, len(sources), share)
        ]
        others = [self._helpers.submit(self._copy, *part) for part in parts[1:]]
        checksums = self._copy(*parts[0])
        for other in others:
            checksums += other.result()
        return checksums

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        if self._helpers is not None:
            self._helpers.shutdown()

    def _copy(
        self, sources: Sequence[int], destinations: Sequence[int], block_bytes: int, has_checksums: bool
    ) -> list[int]:
        checksums: list[int] = []
        for first, end in _runs(sources, destinations, block_bytes):
            size = (end - first) * block_bytes
            if self._stream is None:
                ctypes.memmove(destinations[first], sources[first], size)
                arrived = destinations[first]
            elif has_checksums:
                # By way of memory that stays in the core's cache: what was streamed is in none.
                arrived = self._staged(size)
                ctypes.memmove(arrived, sources[first], size)
                self._stream(destinations[first], arrived, size)
            else:
                self._stream(destinations[first], sources[first], size)
                continue
            if has_checksums:
                checksums += _checksums(arrived, size, block_bytes)
        return checksums

    def _staged(self, size: int) -> int:
        """Address of memory of this thread, at least so many bytes."""
        memory: ctypes.Array[ctypes.c_char] | None = getattr(self._staging, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._staging.memory = ctypes.create_string_buffer(max(size, SLICE_BYTES))
        return ctypes.addressof(memory)


def _checksums(address: int, size: int, block_bytes: int) -> list[int]:
    block_type = ctypes.c_char * block_bytes
    return [
        xxhash.xxh3_64_intdigest(block_type.from_address(address + at)) for at in range(0, size, block_bytes)
    ]


def _runs(sources: Sequence[int], destinations: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of blocks that lie side by side on both sides, SLICE_BYTES at most."""
    first, count_max = 0, max(1, SLICE_BYTES // block_bytes)
    for at in range(1, len(sources)):
        is_adjacent = (
            at - first < count_max
            and sources[at] - sources[at - 1] == block_bytes
            and destinations[at] - destinations[at - 1] == block_bytes
        )
        if not is_adjacent:
            yield first, at
            first = at
    if sources:
        yield first, len(sources)
