"""How bytes get between a worker's KV pools and the store's arena, by the kind of memory the pools are in.

A slot of the arena holds a block of the whole model as a worker of one rank has it, whatever the shape of the
worker that wrote it. So workers of all shapes share what is stored.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import xxhash

from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.store import StoreWelcome
from engine.kv.parts import PoolPart
from engine.kv.staging import Staging
from engine.kv.stream_copy import checked_copies, stream_copies
from kv_store.arena import Arena
from kv_store.copying import BlockCopier, BlockMoves, CheckedMove, Move, fastest
from kv_transfer.layout import Places, whole_places
from kv_transfer.part_copies import PartCopies, Rows, rows_at
from worker.store_copier import ArenaCopies, OpenCopies

log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 2**20
"""The pinned memory of a worker whose pool is on a GPU."""

FIRST_ANSWER_S = 5.0
"""Time after the ready line at which ways to copy are tried: the first request wants the cores, too."""

MAP_ROUND_S = 0.5
"""Least time between two looks for memory of the arena that the node has taken since."""
MAP_AHEAD_BYTES = 32 * 2**20
"""Copies this near to the end of what is mapped start another look."""


def usual_moves() -> BlockMoves:
    """Return the ways to copy that are fastest on most machines. The native library may be compiled now,
    which takes many seconds: never call this on the event loop."""
    return BlockMoves(_plain_ways()[0], _checked_ways()[0])


def choose_fastest(moves: BlockMoves) -> None:
    """Have blocks copied in the ways that are fastest on this machine, which are timed now: 0.4 s of a
    core."""
    moves.plain = fastest(_plain_ways())
    moves.checked = fastest(_checked_ways())


def choose_later(moves: BlockMoves | None, threads: Executor) -> Callable[[], None]:
    """Call `choose_fastest` in a thread when the first answer has had time; None: there is nothing to copy.
    Returns what calls it off, before `threads` ends. Needs a running event loop."""
    if moves is None:
        return lambda: None

    def choose() -> None:
        try:
            choose_fastest(moves)
        except Exception:
            log.exception("ways to copy were not tried; the usual ones stay")

    loop = asyncio.get_running_loop()
    return loop.call_later(FIRST_ANSWER_S, lambda: threads.submit(choose)).cancel


def _plain_ways() -> list[Move]:
    return [*stream_copies(), BlockMoves().plain]


def _checked_ways() -> list[CheckedMove]:
    return [*checked_copies(), BlockMoves().checked]


def copies_of(parts: Sequence[PoolPart], whole: KVGeometry, moves: BlockMoves | None = None) -> OpenCopies:
    """Choose the copies of a worker's pools for `StoreCopier`. `whole` is the geometry of the whole model;
    `moves` copy in place of the libraries."""

    def open_copies(descriptor: int, welcome: StoreWelcome) -> ArenaCopies:
        if welcome.slot_bytes < whole.block_bytes:
            raise ValueError(f"slots of {welcome.slot_bytes} bytes for blocks of {whole.block_bytes}")
        try:
            arena = Arena.attach(os.dup(descriptor), welcome.slot_bytes, welcome.slot_count)
        except SetupError as error:
            raise ValueError(str(error)) from None
        kind = HostCopies if all(part.pool.device.type == "cpu" for part in parts) else DeviceCopies
        return kind(parts, whole, arena, has_checksums=welcome.has_checksums, moves=moves)

    return open_copies


class HostRows(NamedTuple):
    """Host memory that holds a part of one block in each of its rows: a pool, or the staging of one."""

    places: Places
    base_address: int
    row_bytes: int
    row_count: int


class SlotCopies(Protocol):
    """Copies between rows of host memory and slots. Both return the checksum of each slot's block, if they
    are to make them."""

    def to_slots(self, rows: Sequence[int], slots: Sequence[int], *, has_checksums: bool) -> list[int]: ...

    def from_slots(self, slots: Sequence[int], rows: Sequence[int], *, has_checksums: bool) -> list[int]: ...


class _WholeBlocks:
    """`SlotCopies` of memory with a whole block in each row. Checksums are those of bytes that arrived."""

    def __init__(self, rows: HostRows, arena: Arena, copier: BlockCopier) -> None:
        self._rows, self._arena, self._copier = rows, arena, copier

    def to_slots(self, rows: Sequence[int], slots: Sequence[int], *, has_checksums: bool) -> list[int]:
        return self._copier.copy(
            self._at(rows), self._slots_at(slots), self._rows.row_bytes, has_checksums=has_checksums
        )

    def from_slots(self, slots: Sequence[int], rows: Sequence[int], *, has_checksums: bool) -> list[int]:
        return self._copier.copy(
            self._slots_at(slots), self._at(rows), self._rows.row_bytes, has_checksums=has_checksums
        )

    def _at(self, rows: Sequence[int]) -> list[int]:
        base, size = self._rows.base_address, self._rows.row_bytes
        return [base + row * size for row in rows]

    def _slots_at(self, slots: Sequence[int]) -> list[int]:
        return [self._arena.address(slot) for slot in slots]


class _PartsOfBlocks:
    """`SlotCopies` of several memories, each of which holds a part of every block. Checksums are those of
    slots, after the copy: a slot that changed under a copy is found either way."""

    def __init__(self, whole: KVGeometry, parts: Sequence[HostRows], arena: Arena) -> None:
        self._slots: Rows = rows_at(arena.base_address, arena.slot_bytes, arena.slot_count)
        self._content_bytes = whole.block_bytes
        rows = [(part.places, rows_at(part.base_address, part.row_bytes, part.row_count)) for part in parts]
        self._copies = PartCopies(whole, self._slots, rows)

    def to_slots(self, rows: Sequence[int], slots: Sequence[int], *, has_checksums: bool) -> list[int]:
        sums: list[int] = []
        for row, slot in zip(rows, slots, strict=True):
            self._copies.gather(row, slot)
            if has_checksums:  # while the block is in the core's cache
                sums.append(self._checksum(slot))
        return sums

    def from_slots(self, slots: Sequence[int], rows: Sequence[int], *, has_checksums: bool) -> list[int]:
        sums: list[int] = []
        for row, slot in zip(rows, slots, strict=True):
            self._copies.scatter(slot, row)
            if has_checksums:
                sums.append(self._checksum(slot))
        return sums

    def _checksum(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._slots[slot, : self._content_bytes].data)


class _MappedArena:
    """The part that both kinds share: the mapped arena, which it owns, and the copier."""

    def __init__(
        self,
        parts: Sequence[PoolPart],
        whole: KVGeometry,
        arena: Arena,
        *,
        has_checksums: bool,
        moves: BlockMoves | None = None,
    ) -> None:
        self._parts, self._whole = parts, whole
        self._arena, self._has_checksums = arena, has_checksums
        self._copier = BlockCopier(moves=moves)
        self._closing, self._is_near_end = threading.Event(), threading.Event()
        self._mapped_slots = 0
        """Slots before this one are mapped, as long as the node takes memory in their order."""
        self._mapping = threading.Thread(target=self._map, name="store-map", daemon=True)
        self._mapping.start()

    def close(self) -> None:
        self._closing.set()
        self._is_near_end.set()
        self._mapping.join()  # a slab's time at most
        self._arena.close()
        self._copier.close()

    def _map(self) -> None:
        """Map the arena's memory ahead of copies, which are several times slower into unmapped pages. The
        node takes the arena's memory as it is used, so more is looked for when copies come near the end of
        what is mapped: not from the start, since a look at pages that are mapped takes time as well."""
        end_bytes = 0
        while not self._closing.is_set():
            self._is_near_end.clear()
            for slab_end in self._arena.map_slabs(end_bytes):
                end_bytes = slab_end
                if self._closing.is_set():
                    return
            self._mapped_slots = end_bytes // self._arena.slot_bytes
            if self._mapped_slots >= self._arena.slot_count or self._closing.wait(MAP_ROUND_S):
                return
            self._is_near_end.wait()

    def _about_to_copy(self, slots: Sequence[int]) -> None:
        """Have more of the arena mapped if these slots are near the end of what is."""
        ahead = MAP_AHEAD_BYTES // self._arena.slot_bytes
        if max(slots, default=0) + ahead >= self._mapped_slots:
            self._is_near_end.set()

    def _between(self, rows: Sequence[HostRows]) -> SlotCopies:
        """Choose the copies between the arena and memory with all parts of a block in rows of one number."""
        if len(rows) == 1 and rows[0].places == whole_places(self._whole):
            return _WholeBlocks(rows[0], self._arena, self._copier)
        return _PartsOfBlocks(self._whole, rows, self._arena)


class HostCopies(_MappedArena):
    """`store_copier.ArenaCopies` of pools in host memory."""

    def __init__(
        self,
        parts: Sequence[PoolPart],
        whole: KVGeometry,
        arena: Arena,
        *,
        has_checksums: bool,
        moves: BlockMoves | None = None,
    ) -> None:
        super().__init__(parts, whole, arena, has_checksums=has_checksums, moves=moves)
        self._copies = self._between([_pool_rows(part) for part in parts])

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        self._about_to_copy(slots)
        sums = self._copies.to_slots(blocks, slots, has_checksums=self._has_checksums)
        return tuple(sums) if self._has_checksums else (0,) * len(blocks)

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        self._about_to_copy(slots)
        return _wrong(self._copies.from_slots(slots, blocks, has_checksums=any(checksums)), checksums)


class DeviceCopies(_MappedArena):
    """`store_copier.ArenaCopies` of pools on GPUs, by way of pinned memory of the worker's own, in halves:
    while one is copied on the host, the other moves over the links.

    The arena itself is not registered with the driver. Pages that it gives back to the system
    (`Arena.release`) would stay pinned to the mapping, and the GPU would go on to use memory that nobody
    sees.
    """

    def __init__(
        self,
        parts: Sequence[PoolPart],
        whole: KVGeometry,
        arena: Arena,
        *,
        has_checksums: bool,
        moves: BlockMoves | None = None,
    ) -> None:
        self._count = max(1, STAGING_BYTES // 2 // whole.block_bytes)
        self._halves = [[Staging(part.pool, self._count) for part in parts] for _ in range(2)]
        super().__init__(parts, whole, arena, has_checksums=has_checksums, moves=moves)
        self._copies = [
            self._between([_staged_rows(part, stage) for part, stage in zip(parts, half, strict=True)])
            for half in self._halves
        ]

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        self._about_to_copy(slots)
        pieces, sums = self._pieces(len(blocks)), list[int]()
        for index, piece in enumerate(pieces):
            if index == 0:
                self._fetch(0, blocks[piece])
            if index + 1 < len(pieces):
                self._fetch((index + 1) % 2, blocks[pieces[index + 1]])
            self._wait(index % 2)
            rows, into = range(len(slots[piece])), slots[piece]
            sums += self._copies[index % 2].to_slots(rows, into, has_checksums=self._has_checksums)
        return tuple(sums) if self._has_checksums else (0,) * len(blocks)

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        self._about_to_copy(slots)
        sums: list[int] = []
        for index, piece in enumerate(self._pieces(len(slots))):
            self._wait(index % 2)
            rows = range(len(slots[piece]))
            copies = self._copies[index % 2]
            sums += copies.from_slots(slots[piece], rows, has_checksums=any(checksums))
            for stage in self._halves[index % 2]:
                stage.fill(blocks[piece])
        for half in range(2):
            self._wait(half)
        return _wrong(sums, checksums)

    def _fetch(self, half: int, blocks: Sequence[int]) -> None:
        for stage in self._halves[half]:
            stage.fetch(blocks)

    def _wait(self, half: int) -> None:
        for stage in self._halves[half]:
            stage.wait()

    def _pieces(self, count: int) -> list[slice]:
        size = self._count
        return [slice(first, min(count, first + size)) for first in range(0, count, size)]


def _pool_rows(part: PoolPart) -> HostRows:
    pool = part.pool
    return HostRows(Places(part.layers, part.heads), pool.base_address, pool.block_bytes, pool.block_count)


def _staged_rows(part: PoolPart, stage: Staging) -> HostRows:
    places = Places(part.layers, part.heads)
    return HostRows(places, stage.base_address, part.pool.block_bytes, stage.block_count)


def _wrong(found: Sequence[int], expected: Sequence[int]) -> tuple[int, ...]:
    """Positions where the two differ; 0 is expected where nothing is known. `found` is empty where none was
    made, since nothing is known of any block."""
    if not found:
        return ()
    pairs = enumerate(zip(found, expected, strict=True))
    return tuple(index for index, (actual, wanted) in pairs if wanted and actual != wanted)
