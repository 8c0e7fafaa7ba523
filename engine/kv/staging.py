"""Host memory on the way between a KV pool on a GPU and something that the GPU cannot reach."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kv.pool import KVPool


class Staging:
    """Room for `block_count` blocks, pinned, so that copies run at the link's speed and beside others; on a
    stream of its own, so that they run beside the engine's steps. Not for two threads at once.

    The blocks named must not be written by a step meanwhile, nor read if they are filled here.
    """

    def __init__(self, pool: KVPool, block_count: int) -> None:
        self._pool, self.block_count = pool, block_count
        is_cuda = pool.device.type == "cuda"
        self._rows: Tensor = torch.empty(
            (block_count, pool.block_bytes), dtype=torch.uint8, pin_memory=is_cuda
        )
        self._stream: Any = torch.cuda.Stream(pool.device) if is_cuda else None

    @property
    def base_address(self) -> int:
        """Address of row 0 in this process; each row has a block's bytes."""
        return self._rows.data_ptr()

    def fetch(self, blocks: Sequence[int]) -> None:
        """Pool blocks[i] to row i; in place after `wait`."""
        with torch.cuda.stream(self._stream):
            for row, block in enumerate(blocks):
                self._rows[row].copy_(self._pool.block_view(block), non_blocking=True)

    def fill(self, blocks: Sequence[int]) -> None:
        """Row i to pool blocks[i]; in place, and the rows free again, after `wait`."""
        with torch.cuda.stream(self._stream):
            for row, block in enumerate(blocks):
                self._pool.block_view(block).copy_(self._rows[row], non_blocking=True)

    def wait(self) -> None:
        """Wait until the copies that were begun are done."""
        if self._stream is not None:
            self._stream.synchronize()
