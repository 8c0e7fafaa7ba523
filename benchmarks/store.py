"""Compares the store's paths with the limit of each, all in one run: copies with memcpy of the same bytes.

Compared operations take turns, round after round, so that other load on the machine affects all alike.
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from engine.kv.pool import KVPool
from kv_store.arena import Arena, slot_bytes_for
from kv_store.copying import BlockCopier
from worker.store_pool import choose_fastest, usual_moves

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Medians over the rounds, in bytes per second of wall time."""

    path: str
    bytes_per_s: float
    beside: str
    """The name of the compared operation; empty if there is none."""
    beside_bytes_per_s: float = 0.0

    @property
    def ratio(self) -> float:
        return self.bytes_per_s / self.beside_bytes_per_s if self.beside else 0.0


def rates_of(calls: dict[str, Callable[[], object]], size: int, *, rounds: int) -> dict[str, float]:
    """Median bytes per second of each call, in turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started_s = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started_s)
    return {name: size / statistics.median(times[1:]) for name, times in seconds.items()}


def make_pool(block_bytes: int, block_count: int) -> KVPool:
    """A worker's pool of blocks of this size. Raises SetupError if such a block is not possible, or there is
    no memory."""
    if block_bytes % 4:
        raise SetupError(f"--block-bytes {block_bytes}: must be a multiple of 4, like KV in bfloat16")
    needed, free = 3 * block_bytes * block_count, psutil.virtual_memory().available
    if needed > free:
        raise SetupError(f"the bench needs {needed} bytes of memory, {free} are available: lower --blocks")
    geometry = KVGeometry(
        layer_count=1, kv_head_count=1, head_dim=block_bytes // 4, block_tokens=1, dtype="bfloat16"
    )
    return KVPool(geometry, kv_bytes=block_bytes * block_count, device=torch.device("cpu"))


def bench_copies(
    block_bytes: int, block_count: int, *, rounds: int, threads: int, progress: Progress
) -> tuple[list[MeasuredRate], tuple[str, ...]]:
    """Copy scattered blocks between a worker's pool and the arena, both ways, and write the arena's notes."""
    slot_bytes = slot_bytes_for(block_bytes)
    pool, other = (make_pool(block_bytes, block_count) for _ in range(2))
    arena = Arena.create(slot_bytes, block_count, name="baton-bench")
    moves = usual_moves()
    choose_fastest(moves)
    copier = BlockCopier(threads, moves=moves)
    try:
        progress("copies: making the arena ready")
        while arena.reserve_slab():
            pass
        for _ in arena.map_slabs():
            pass
        pool.memory.random_(0, 256)
        progress(f"copies: {block_count} blocks of {block_bytes} bytes, {rounds} rounds")
        calls = _copy_calls(pool, other, arena, copier)
        found = rates_of(calls, block_bytes * block_count, rounds=rounds)
    finally:
        copier.close()
        arena.close()
    limit = max(("memcpy, one call", "memcpy, block by block"), key=lambda name: found[name])
    ours = [name for name in found if not name.startswith("memcpy")]
    rates = [MeasuredRate(name, found[name], limit, found[limit]) for name in ours]
    return rates + [MeasuredRate(name, found[name], "") for name in found if name not in ours], arena.notes


def _copy_calls(
    pool: KVPool, other: KVPool, arena: Arena, copier: BlockCopier
) -> dict[str, Callable[[], object]]:
    block_bytes, count = pool.block_bytes, pool.block_count
    scattered, slots = (random.Random(seed).sample(range(count), count) for seed in (1, 2))
    blocks = [pool.base_address + block * block_bytes for block in scattered]
    places = [arena.address(slot) for slot in slots]
    targets = [other.base_address + slot * block_bytes for slot in slots]

    def memcpy_blocks() -> None:
        for source, target in zip(blocks, targets, strict=True):
            ctypes.memmove(target, source, block_bytes)

    def ours(sources: list[int], destinations: list[int], has_checksums: bool) -> Callable[[], object]:
        return lambda: copier.copy(sources, destinations, block_bytes, has_checksums=has_checksums)

    return {
        "memcpy, one call": lambda: ctypes.memmove(
            other.base_address, pool.base_address, block_bytes * count
        ),
        "memcpy, block by block": memcpy_blocks,
        "pool to arena": ours(blocks, places, False),
        "pool to arena, checksums": ours(blocks, places, True),
        "arena to pool": ours(places, blocks, False),
        "arena to pool, checksums": ours(places, blocks, True),
    }
