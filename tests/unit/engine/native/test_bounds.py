"""What the C++ code is told is checked before it is: it reads and writes wherever it is told."""

import pytest
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import BatchLayout, Span
from engine.kernels.native_attention import NativeAttention
from engine.kv.pool import KVPool
from tests.unit.engine.native.test_products import kernels as kernels
from tests.unit.engine.native.test_products import random

GEOMETRY = KVGeometry(layer_count=1, kv_head_count=2, head_dim=16, block_tokens=4, dtype="float32")
BLOCKS = 3


@pytest.fixture
def attention():
    pool = KVPool(GEOMETRY, kv_bytes=BLOCKS * GEOMETRY.block_bytes, device=torch.device("cpu"))
    return NativeAttention(pool)


@pytest.mark.parametrize("block", [-1, BLOCKS, 2**31 - 1, -(2**31)])
def test_blocks_that_there_are_not_are_refused(attention, block):
    data = torch.zeros(1, GEOMETRY.block_bytes, dtype=torch.uint8)
    for call in (
        lambda: attention.copy_blocks([(0, block)]),
        lambda: attention.copy_blocks([(block, 0)]),
        lambda: attention.gather_blocks([0, block]),
        lambda: attention.scatter_blocks([block], data),
        lambda: attention.plan(BatchLayout.of([Span(0, 4, (block,))]), {}, windows=frozenset()),
    ):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize(
    ("first", "count", "blocks"), [(0, 5, 1), (4, 1, 1), (-1, 1, 1), (2**31 - 2, 1, 3), (0, 1, 0)]
)
def test_positions_outside_their_blocks_are_refused(attention, first, count, blocks):
    with pytest.raises(IndexError):
        attention.plan(BatchLayout.of([Span(first, count, tuple(range(blocks)))]), {}, windows=frozenset())


def test_nothing_is_done_with_nothing(attention):
    attention.copy_blocks([])
    assert attention.gather_blocks([]).shape == (0, GEOMETRY.block_bytes)
    attention.scatter_blocks([], torch.zeros(0, GEOMETRY.block_bytes, dtype=torch.uint8))
    plan = attention.plan(BatchLayout.of([]), {}, windows=frozenset())
    assert plan.token_count == 0


@pytest.mark.parametrize("token", [-1, 7, 2**62, -(2**63)])
def test_tokens_that_the_table_does_not_have_are_refused(kernels, token):
    with pytest.raises(IndexError):
        kernels.embed(torch.tensor([0, token]), random(7, 12))
    assert kernels.embed(torch.zeros(0, dtype=torch.int64), random(7, 12)).shape == (0, 12)
