"""Copies between a worker's KV pool in host memory and the arena, many blocks at once.

Everything big happens with the GIL released, a slice at a time. Other threads of the worker run on, and wait
for this one a few microseconds per slice at most.
"""

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

SLICE_BYTES = 2**20
"""Bytes of adjacent blocks that are copied in one call: 50 us or so. A slice is still in the core's cache
when its checksum is computed. Smaller slices with a running XXH3 are slower: that has no AVX-512 here."""


class BlockCopier:
    """Copies blocks. Addresses are of this process, and must stay valid until `copy` returns. Thread-safe."""

    def __init__(self, threads: int = 1) -> None:
        """`threads` work on one `copy`, the caller's among them."""
        assert threads > 0, "somebody must copy"
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
            return _copy(sources, destinations, block_bytes, has_checksums)
        parts = [
            (sources[at : at + share], destinations[at : at + share], block_bytes, has_checksums)
            for at in range(0, len(sources), share)
        ]
        others = [self._helpers.submit(_copy, *part) for part in parts[1:]]
        checksums = _copy(*parts[0])
        for other in others:
            checksums += other.result()
        return checksums

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        if self._helpers is not None:
            self._helpers.shutdown()


def _copy(
    sources: Sequence[int], destinations: Sequence[int], block_bytes: int, has_checksums: bool
) -> list[int]:
    checksums: list[int] = []
    block_type = ctypes.c_char * block_bytes
    for first, end in _runs(sources, destinations, block_bytes):
        ctypes.memmove(destinations[first], sources[first], (end - first) * block_bytes)
        if has_checksums:
            checksums += [
                xxhash.xxh3_64_intdigest(block_type.from_address(address))
                for address in destinations[first:end]
            ]
    return checksums


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
