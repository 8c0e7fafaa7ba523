"""Copies between a worker's KV pool in host memory and the arena, many blocks at once.

Everything big happens with the GIL released, a slice at a time. Other threads of the worker run on, and wait
for this one a few microseconds per slice at most.

The C library streams past the caches from sizes on that are larger than a block, and whether that is better
differs between processors. So it is tried.
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import xxhash

SLICE_BYTES = 2**20
"""Bytes of adjacent blocks that are copied in one call: 50 us or so."""

Move = Callable[[int, int, int], object]
"""Copies (destination, source, bytes)."""
CheckedMove = Callable[[int, int, int], int]
"""Copies (destination, source, bytes), and returns the XXH3-64 of what arrived."""
AnyMove = TypeVar("AnyMove", bound=Move)

TRIED_BYTES, TRIED_BLOCK_BYTES, TRIED_ROUNDS = 64 * 2**20, 2**19, 2
"""More than a cache holds, so that the memory is what is measured: 25 ms or so for each way."""
CLEAR_GAIN = 1.1
"""Another way than the first is chosen if it is so many times as fast. So the one that takes least of the
caches comes first."""


def _checked_by_libraries(to: int, origin: int, size: int) -> int:
    ctypes.memmove(to, origin, size)
    return xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(to))


@dataclass(slots=True)
class BlockMoves:
    """The two ways in which a block is copied. Others may take their places while copies run."""

    plain: Move = ctypes.memmove
    checked: CheckedMove = _checked_by_libraries


def fastest(moves: Sequence[AnyMove], *, now: Callable[[], float] = time.perf_counter) -> AnyMove:
    """Choose how blocks are copied on this machine. They take turns, and the best of each counts. The first
    is taken if none is clearly faster."""
    if len(moves) == 1:
        return moves[0]
    source, target = _pages(TRIED_BYTES), _pages(TRIED_BYTES)
    places = [
        (ctypes.addressof(target) + at, ctypes.addressof(source) + at)
        for at in range(0, TRIED_BYTES, TRIED_BLOCK_BYTES)
    ]
    best = [float("inf")] * len(moves)
    for _ in range(TRIED_ROUNDS):
        for number, move in enumerate(moves):
            began_s = now()
            for to, origin in places:
                move(to, origin, TRIED_BLOCK_BYTES)
            best[number] = min(best[number], now() - began_s)
    quickest = best.index(min(best))
    return moves[quickest if best[0] > CLEAR_GAIN * best[quickest] else 0]


def _pages(size: int) -> "ctypes.Array[ctypes.c_char]":
    """Memory at the beginning of a page, as that of pools and arenas is: ways past the caches need that. It
    is written to, since pages that were never written are not what is compared."""
    memory = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
    ctypes.memset(memory, 1, size)
    return memory


class BlockCopier:
    """Copies blocks. Addresses are of this process, and must stay valid until `copy` returns. Thread-safe."""

    def __init__(self, threads: int = 1, *, moves: BlockMoves | None = None) -> None:
        """`threads` work on one `copy`, the caller's among them. `moves` copy in place of the libraries."""
        assert threads > 0, "somebody must copy"
        self._moves = moves or BlockMoves()
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
        if has_checksums:
            places = zip(destinations, sources, strict=True)
            return [self._moves.checked(to, origin, block_bytes) for to, origin in places]
        for first, end in _runs(sources, destinations, block_bytes):
            self._moves.plain(destinations[first], sources[first], (end - first) * block_bytes)
        return []


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
