"""Workers of several shapes, as far as their KV pools and transfers go: plain numpy memory, real backends."""

import contextlib
from itertools import pairwise

import numpy as np

from baton.core.geometry import KVGeometry
from baton.core.ids import ReadId, WorkerId
from kv_transfer.backend import KVMemory
from kv_transfer.layout import Places, part_geometry
from kv_transfer.manager import TransferManager
from kv_transfer.part_plan import part_name
from kv_transfer.part_transfer import OwnPart, PartTransfer
from kv_transfer.read import BlockRead
from tests.contract.transfer_peer import content, cut, make_backend
from tests.loopback_backend import LoopbackFabric

BLOCK_COUNT = 6
TIMEOUT_S = 20.0

GROUPED = KVGeometry(layer_count=5, kv_head_count=4, head_dim=8, block_tokens=4, dtype="bfloat16")
FEW_HEADS = KVGeometry(layer_count=5, kv_head_count=2, head_dim=6, block_tokens=2, dtype="float32")
QUANTIZED = KVGeometry(
    layer_count=5, kv_head_count=4, head_dim=8, block_tokens=4, dtype="bfloat16", kv_dtype="int8"
)
LATENT = KVGeometry(
    layer_count=5, kv_head_count=1, head_dim=24, block_tokens=4, dtype="bfloat16", planes=1, value_dim=16
)
GEOMETRIES = {"grouped": GROUPED, "few heads": FEW_HEADS, "int8": QUANTIZED, "latent": LATENT}

SHAPES = {
    "1": (1, (5,)),
    "tp2": (2, (5,)),
    "tp4": (4, (5,)),
    "pp2": (1, (2, 3)),
    "pp3": (1, (1, 3, 1)),
    "tp2pp2": (2, (2, 3)),
}
"""Tensor ranks, and layers of each stage."""


def heads_of(kv_head_count, tensor, rank):
    """Key-value heads of a tensor rank: an equal part of them, or one where there are fewer than ranks."""
    if kv_head_count >= tensor:
        count = kv_head_count // tensor
        return range(rank * count, (rank + 1) * count)
    head = rank * kv_head_count // tensor
    return range(head, head + 1)


def places_of_shape(geometry, shape):
    """Parts of the shape's ranks, by rank."""
    tensor, stages = SHAPES[shape]
    assert sum(stages) == geometry.layer_count
    ends = np.cumsum([0, *stages]).tolist()
    return [
        Places(range(first, end), heads_of(geometry.kv_head_count, tensor, rank))
        for first, end in pairwise(ends)
        for rank in range(tensor)
    ]


def random_blocks(geometry, seed=1, block_count=BLOCK_COUNT):
    return content(seed, geometry.block_bytes, block_count)


class PartedWorker:
    """A worker's pools, filled with its parts of `blocks` (zeros: a reader), and its transfer.

    `make(kind, name, memory, fabric)` makes the backend of each part.
    """

    def __init__(self, kind, name, geometry, places, blocks=None, *, fabric=None, make=make_backend):
        if blocks is None:
            blocks = np.zeros((BLOCK_COUNT, geometry.block_bytes), np.uint8)
        self.name, self.geometry, self.places = WorkerId(name), geometry, places
        self.generations = np.arange(100, 100 + len(blocks), dtype=np.uint64)
        self.pools = [cut(blocks, geometry, each) for each in places]
        fabric = fabric if fabric is not None else LoopbackFabric()
        self.backends, self.parts = [], []
        for number, pool in enumerate(self.pools):
            memory = KVMemory(pool.ctypes.data, pool.shape[1], len(pool), self.generations)
            backend = make(kind, part_name(self.name, number, len(places)), memory, fabric)
            self.backends.append(backend)
            manager = TransferManager([backend], memory=memory)
            self.parts.append(OwnPart(places[number], memory, manager))
            assert pool.shape[1] == part_geometry(geometry, places[number]).block_bytes
        self.transfer = PartTransfer(geometry, self.parts)

    @property
    def memories(self):
        return [(part.places, part.memory) for part in self.parts]

    async def read(self, owner, source, local, *, granted=None, timeout_s=TIMEOUT_S, checksums=()):
        granted = granted or [100 + block for block in source]
        read = BlockRead(
            ReadId(7),
            WorkerId(owner),
            tuple(source),
            tuple(local),
            tuple(granted),
            timeout_s,
            self.geometry.block_bytes,
            checksums=tuple(checksums),
        )
        return await self.transfer.read_checked(read)


@contextlib.asynccontextmanager
async def started(*workers):
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            stack.push_async_callback(worker.transfer.close)
            await worker.transfer.start()
        yield
