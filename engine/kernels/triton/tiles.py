"""Sizes of tiles, by shape and architecture: small tables instead of timing kernels when they run.

A table is the same in every process and at every start, so results do not depend on what else the device
did while it was timed, no request waits for a search, and every entry can be compiled in the tests.
Shared memory bounds most entries: an attention program holds its queries and `stages` tiles of keys and
values.
"""

from dataclasses import dataclass
from typing import Literal

from baton.core.geometry import KVGeometry
from engine.kernels.triton.device import DeviceFacts

Breadth = Literal["decode", "few", "chunk"]
"""Kind of an attention tile: one token ("decode"); the few tokens of a draft or the end of a prompt ("few");
many tokens ("chunk")."""


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least both."""
    return 1 << (max(n, least) - 1).bit_length()


def tiles_for(n: int, tile: int) -> int:
    """Tiles of `tile` elements that n elements fill. Triton's cdiv returns constants of its language."""
    return -(-n // tile)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    block_m: int
    """Rows: (token, query head) pairs that share a key-value head."""
    block_n: int
    """Keys taken in at once."""
    heads: int
    """Query heads of one tile, at most block_m."""
    warps: int
    stages: int
    has_phases: bool
    """See `attention.attend`. Without, there is one loop, whose loads are in flight from end to end."""

    @property
    def tokens(self) -> int:
        return self.block_m // self.heads


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Facts about a model's attention that choose the kernel's tiles."""

    geometry: KVGeometry
    group: int
    """Query heads per key-value head."""

    @property
    def main(self) -> int:
        """Width of the tile of values, and of the keys' part that goes with it."""
        return power_of_two(self.main_used, 16)

    @property
    def main_used(self) -> int:
        return self.value_dim if self.geometry.planes == 1 else self.geometry.head_dim

    @property
    def value_dim(self) -> int:
        return self.geometry.value_dim if self.geometry.planes == 1 else self.geometry.head_dim

    @property
    def rest_used(self) -> int:
        return self.geometry.head_dim - self.main_used

    @property
    def rest(self) -> int:
        """Width of what keys have beyond values (rotated part of a latent); 0: nothing."""
        return power_of_two(self.rest_used, 16) if self.rest_used else 0


def attention_tile(shape: AttentionShape, facts: DeviceFacts, breadth: Breadth) -> AttentionTile:
    geometry, group = shape.geometry, shape.group
    if geometry.dtype == "float32":
        block_m = power_of_two(min(group, 32), 16)
        return AttentionTile(block_m, 32, min(group, block_m), 4, 1, has_phases=False)
    if geometry.planes == 1 and shape.main > 256:
        return _latent_tile(shape, facts, breadth)
    width = shape.main + shape.rest
    if breadth == "decode":
        block_m = power_of_two(min(group, 64), 16)
        # A tile of keys and one of values are 32 KiB in bf16. More stages than three were slower on an H200:
        # the programs that they leave no room for keep more loads in flight than they do.
        if geometry.is_quantized and width <= 128 and facts.has_wgmma:
            # One byte at a time is what values are read by: small programs, and many, hide it best.
            return AttentionTile(block_m, 32, min(group, block_m), 1, 4, has_phases=False)
        block_n = max(32, min(128, 8192 // width))
        return AttentionTile(block_m, block_n, min(group, block_m), 4, 3, has_phases=False)
    if breadth == "few":
        block_n = 64 if width <= 128 and facts.has_wgmma else 32
        return AttentionTile(64, block_n, min(group, 64), 4, 3, has_phases=False)
    block_m, block_n, warps, stages = _chunk_sizes(width, facts, is_quantized=geometry.is_quantized)
    return AttentionTile(block_m, block_n, min(group, block_m), warps, stages, has_phases=True)


def _chunk_sizes(width: int, facts: DeviceFacts, *, is_quantized: bool) -> tuple[int, int, int, int]:
    """(block_m, block_n, warps, stages). On Hopper a group of 4 warps takes 128 rows of heads of 128, whose
    programs compute while others wait for the softmax; of wider heads two groups take 64 rows each."""
    if width > 128:
        return (128, 64, 8, 3) if facts.has_wgmma else (64, 32, 8, 3)
    # Dequantised numbers pass through registers.
    if facts.has_wgmma:
        return (128, 64, 8, 3) if is_quantized else (128, 64, 4, 3)
    return 128, 32 if is_quantized or width > 64 else 64, 8, 3


def _latent_tile(shape: AttentionShape, facts: DeviceFacts, breadth: Breadth) -> AttentionTile:
    """Multi-head latent attention: 512 + 64 numbers per position, shared by all query heads. The sum of a
    row alone is 512 numbers, so tiles have few rows and many warps. Decodes of many heads take the 64 rows
    that Hopper's products of warp groups want: registers spill, and yet it was the fastest on an H200."""
    if breadth == "decode" and facts.has_wgmma and shape.group >= 64 and not shape.geometry.is_quantized:
        return AttentionTile(64, 64, 64, 8, 2, has_phases=True)
    block_m = 32 if breadth != "decode" else power_of_two(min(shape.group, 32), 16)
    block_n = 64 if facts.has_wgmma and not shape.geometry.is_quantized else 32
    return AttentionTile(block_m, block_n, min(shape.group, block_m), 8, 3, has_phases=False)
