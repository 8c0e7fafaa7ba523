"""Places of a block's bytes, for every kind of KV."""

import pytest
import torch

from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from engine.kv.pool import KVPool

CPU = torch.device("cpu")


def make(geometry: KVGeometry, block_count: int = 5) -> KVPool:
    return KVPool(geometry, kv_bytes=block_count * geometry.block_bytes, device=CPU)


def test_scales_follow_the_values_of_their_block() -> None:
    pool = make(KVGeometry(3, 2, 8, 4, "bfloat16", kv_dtype="int8"))
    assert pool.scales is not None
    assert pool.blocks.shape == (5, 3, 2, 2, 4, 8)
    assert pool.scales.shape == (5, 3, 2, 2, 4)
    pool.blocks[2] = 7
    pool.scales[2] = 0.5
    block = pool.block_view(2)
    vectors = 3 * 2 * 2 * 4
    assert len(block) == vectors * (8 + 4)
    assert (block[: vectors * 8] == 7).all()
    assert (block[vectors * 8 :].view(torch.float32) == 0.5).all()
    assert not pool.block_view(1).any()
    assert not pool.block_view(3).any()
    pool.clear(2)
    assert not pool.block_view(2).any()


def test_latents_have_one_plane() -> None:
    pool = make(KVGeometry(3, 1, 24, 4, "float32", planes=1, value_dim=16))
    assert pool.blocks.shape == (5, 3, 1, 1, 4, 24)
    assert pool.blocks.is_contiguous()
    assert pool.block_bytes == 3 * 4 * 24 * 4


def test_what_cannot_be_stored_is_refused_at_the_start() -> None:
    with pytest.raises(SetupError, match="fp8"):
        make(KVGeometry(1, 1, 8, 4, "bfloat16", kv_dtype="fp8"))
    with pytest.raises(SetupError, match="block_tokens"):
        make(KVGeometry(1, 1, 2, 1, "bfloat16", planes=1, value_dim=2, kv_dtype="int8"))
