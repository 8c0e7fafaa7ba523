"""A prefill of one tensor-parallel width feeds a decode of another, between real processes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from baton.core.geometry import KVGeometry
from kv_transfer.layout import shard_geometry, shard_reads
from kv_transfer.manager import TransferManager
from tests.contract.transfer_peer import PeerProcess, Pool, block_read, content, make_backend, shard_of
from tests.loopback_backend import LoopbackFabric

BLOCK_COUNT = 6
SEED = 1
GQA = KVGeometry(layer_count=3, kv_head_count=4, head_dim=8, block_tokens=16, dtype="float32")
QUANTIZED = KVGeometry(
    layer_count=2, kv_head_count=4, head_dim=8, block_tokens=16, dtype="bfloat16", kv_dtype="int8"
)
MLA = KVGeometry(
    layer_count=2, kv_head_count=1, head_dim=24, block_tokens=16, dtype="bfloat16", planes=1, value_dim=16
)
TIMEOUT_S = 20.0


class Shards:
    """The prefill side: one process per rank. `read_into` is a decode rank's transfer."""

    def __init__(self, kind, geometry, width):
        self.kind, self.geometry, self.width = kind, geometry, width
        with ThreadPoolExecutor(width) as starters:
            self.ranks = list(starters.map(self._start, range(width)))

    def _start(self, rank):
        shard = (self.geometry, self.width, rank)
        return PeerProcess(self.kind, f"p{rank}.1", seed=SEED, block_count=BLOCK_COUNT, shard=shard)

    def close(self):
        for rank in self.ranks:
            rank.close()

    async def read_into(self, pool, *, width, rank, source, local, stale=()):
        """The outcomes, one per source rank; `stale`: source blocks whose grants are out of date."""
        size = shard_geometry(self.geometry, self.width).block_bytes
        backend = make_backend(self.kind, f"d{rank}.1", pool.memory, LoopbackFabric())
        manager = TransferManager([backend], memory=pool.memory)
        await manager.start()
        try:
            reads = shard_reads(self.geometry, source_width=self.width, target_width=width, target_rank=rank)
            for read in reads:
                peer = self.ranks[read.source_rank]
                await manager.add_peer(peer.worker_id, {backend.name: peer.offer}, block_bytes=size)
            granted = [100 + block - (block in stale) for block in source]
            return await asyncio.gather(
                *(
                    manager.read_checked(
                        block_read(
                            *(self.ranks[read.source_rank].worker_id, source, local, granted),
                            timeout_s=TIMEOUT_S,
                            block_bytes=size,
                            ranges=read.ranges,
                        )
                    )
                    for read in reads
                )
            )
        finally:
            await manager.close()


def attention(blocks, geometry):
    """Return the outputs [H, D], in fp32, of one query of ones per head over all positions of the blocks."""
    g = geometry
    values = torch.from_numpy(blocks.copy()).view(torch.float32)
    kv = values.view(len(blocks), g.layer_count, 2, g.kv_head_count, g.block_tokens, g.head_dim)
    out = []
    for head in range(g.kv_head_count):
        k, v = (kv[:, 0, plane, head].reshape(-1, g.head_dim) for plane in (0, 1))
        weights = torch.softmax(torch.ones(1, g.head_dim) @ torch.nan_to_num(k).clamp(-1, 1).T, dim=-1)
        out.append(weights @ torch.nan_to_num(v).clamp(-1, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("geometry", "source_width", "target_width"),
    [
        *((GQA, 2, 1), (GQA, 1, 2), (GQA, 2, 4), (GQA, 8, 2), (GQA, 1, 8)),
        *((QUANTIZED, 2, 4), (MLA, 2, 1), (MLA, 1, 2)),
    ],
)
async def test_every_rank_gets_what_it_would_have_computed_itself(geometry, source_width, target_width):
    whole = content(SEED, geometry.block_bytes, BLOCK_COUNT)
    shards = await asyncio.to_thread(Shards, "cma", geometry, source_width)
    source, local = [4, 0, 5], [1, 2, 5]
    outputs = []
    try:
        for rank in range(target_width):
            pool = Pool(0, block_count=BLOCK_COUNT, shard=(geometry, target_width, rank))
            expected = pool.blocks.copy()
            expected[local] = shard_of(whole[source], geometry, target_width, rank)
            outcomes = await shards.read_into(pool, width=target_width, rank=rank, source=source, local=local)
            assert [o.error for o in outcomes] == [""] * len(outcomes)
            assert sum(o.byte_count for o in outcomes) == len(source) * pool.memory.block_bytes
            assert (pool.blocks == expected).all()
            if geometry is GQA:
                outputs.append(attention(pool.blocks[local], shard_geometry(geometry, target_width)))
    finally:
        await asyncio.to_thread(shards.close)
    if geometry is GQA and target_width <= geometry.kv_head_count:
        assert torch.equal(torch.cat(outputs), attention(whole[source], geometry))


@pytest.mark.parametrize("kind", ["nixl", "tcp"])
async def test_other_backends_do_the_same(kind):
    whole = content(SEED, GQA.block_bytes, BLOCK_COUNT)
    shards = await asyncio.to_thread(Shards, kind, GQA, 2)
    try:
        pool = Pool(0, block_count=BLOCK_COUNT, shard=(GQA, 1, 0))
        await shards.read_into(pool, width=1, rank=0, source=[1, 2], local=[0, 3])
        assert (pool.blocks[[0, 3]] == whole[[1, 2]]).all()
    finally:
        await asyncio.to_thread(shards.close)


async def test_a_block_that_one_rank_gave_away_is_stale_whatever_the_others_say():
    shards = await asyncio.to_thread(Shards, "cma", GQA, 2)
    try:
        await asyncio.to_thread(shards.ranks[1].reuse, 4)
        pool = Pool(0, block_count=BLOCK_COUNT, shard=(GQA, 1, 0))
        outcomes = await shards.read_into(pool, width=1, rank=0, source=[4, 0], local=[1, 2])
        assert [o.is_stale for o in outcomes] == [False, True]
        outcomes = await shards.read_into(pool, width=1, rank=0, source=[4, 0], local=[1, 2], stale=[0])
        assert [o.is_stale for o in outcomes] == [True, True]
    finally:
        await asyncio.to_thread(shards.close)


def test_the_reference_shards_are_the_whole():
    whole = content(SEED, GQA.block_bytes, 2)
    assert (shard_of(whole, GQA, 1, 0) == whole).all()
    parts = [shard_of(whole, GQA, 4, rank).reshape(2, GQA.layer_count, 2, 1, -1) for rank in range(4)]
    assert (np.concatenate(parts, axis=3).reshape(2, -1) == whole).all()
