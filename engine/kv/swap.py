"""Host memory for the KV of preempted sequences: slots of one block each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kv.pool import KVPool


class SwapSpace:
    """`slot_count` slots, 0 if `swap_bytes` is. Pinned where the pool is on a GPU, so that copies run at
    the link's speed."""

    def __init__(self, pool: KVPool, swap_bytes: int) -> None:
        """Raises SetupError: the host has not that much memory, or not one block fits."""
        self._pool = pool
        self.slot_count = swap_bytes // pool.block_bytes
        if swap_bytes and not self.slot_count:
            raise SetupError(
                f"engine.swap_bytes={swap_bytes} holds no block of {pool.block_bytes} bytes: 0 turns it off"
            )
        shape = (self.slot_count, pool.block_bytes)
        try:
            self._slots: Tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
        except RuntimeError as error:
            raise SetupError(f"the host has no {swap_bytes} bytes for engine.swap_bytes: {error}") from error

    def out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(block, slot)"""
        for block, slot in pairs:
            self._slots[slot].copy_(self._pool.block_view(block), non_blocking=True)
        self._finish()

    def back(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(slot, block)"""
        for slot, block in pairs:
            self._pool.block_view(block).copy_(self._slots[slot], non_blocking=True)
        self._finish()

    def _finish(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
