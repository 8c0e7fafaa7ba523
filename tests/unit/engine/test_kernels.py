"""The torch kernels against the definition, over random batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec, BatchLayout, Span
from engine.kernels.torch_ref import TorchKernels
from engine.kv.pool import KVPool

BLOCK, HEADS, GROUP, DIM, LAYERS = 4, 2, 3, 8, 2
GEOMETRY = KVGeometry(LAYERS, HEADS, DIM, BLOCK, "float32")
CPU = torch.device("cpu")


def pool(block_count: int = 200) -> KVPool:
    return KVPool(GEOMETRY, kv_bytes=block_count * GEOMETRY.block_bytes, device=CPU)


def by_definition(q, keys, values, first_position: int, window: int) -> torch.Tensor:
    """q [n, H, D] unscaled, keys and values [positions, K, D]."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        newest = first_position + i
        oldest = max(0, newest + 1 - window) if window else 0
        for head in range(q.shape[1]):
            k = keys[oldest : newest + 1, head // GROUP]
            v = values[oldest : newest + 1, head // GROUP]
            out[i, head] = torch.softmax(k @ q[i, head] / DIM**0.5, 0) @ v
    return out


spans = st.lists(
    st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 140))), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(spans=spans, window=st.sampled_from((0, 1, 3, 4, 17, 70)), seed=st.integers(0, 1000))
def test_attention_is_its_definition(spans, window, seed) -> None:
    random = torch.Generator().manual_seed(seed)
    memory = pool(500)
    memory.blocks.normal_(generator=random)
    kernels = TorchKernels(memory)
    free = np.random.default_rng(seed).permutation(500).tolist()
    tables = [tuple(free.pop() for _ in range(-(-(first + n) // BLOCK))) for first, n in spans]
    layout = BatchLayout.of([Span(f, n, t) for (f, n), t in zip(spans, tables, strict=True)])
    total = layout.token_count
    q = torch.randn(total, HEADS * GROUP, DIM, generator=random)
    k, v = (torch.randn(total, HEADS, DIM, generator=random) for _ in range(2))
    still = torch.ones(total, DIM // 2), torch.zeros(total, DIM // 2)
    plan = kernels.plan(layout, {0: still}, windows=frozenset({window}))
    layer = seed % LAYERS
    spec = AttentionSpec(layer, DIM**-0.5, window)
    ready = kernels.rotate_and_store(q.clone(), k, v, spec=spec, plan=plan)
    out = kernels.attention(ready, spec=spec, plan=plan)
    row = 0
    for span in layout.spans:
        rows = slice(row, row + span.token_count)
        stored = memory.blocks[list(span.block_ids), layer]
        keys, values = (stored[:, i].transpose(1, 2).reshape(-1, HEADS, DIM) for i in (0, 1))
        written = slice(span.first_position, span.context_tokens)
        assert torch.equal(keys[written], k[rows])
        assert torch.equal(values[written], v[rows])
        expected = by_definition(q[rows], keys, values, span.first_position, window)
        torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-4)
        row = rows.stop


def test_other_blocks_and_layers_are_not_touched() -> None:
    memory = pool(10)
    memory.blocks.fill_(7.0)
    kernels = TorchKernels(memory)
    layout = BatchLayout.of([Span(2, 4, (3, 8))])
    one = torch.ones(4, DIM // 2)
    plan = kernels.plan(layout, {0: (one, one * 0)}, windows=frozenset({0}))
    zeros = torch.zeros(4, HEADS, DIM)
    kernels.rotate_and_store(
        torch.zeros(4, HEADS * GROUP, DIM), zeros, zeros, spec=AttentionSpec(1, 1.0), plan=plan
    )
    expected = torch.full_like(memory.blocks, 7.0)
    expected[3, 1, :, :, 2:] = 0
    expected[8, 1, :, :, :2] = 0
    assert torch.equal(memory.blocks, expected)


def test_rotation_turns_pairs_by_the_angle() -> None:
    """The expectation is computed with complex numbers: (x_i + j x_{i + D/2}) times e^{j angle}."""
    memory = pool(4)
    kernels = TorchKernels(memory)
    angles = torch.rand(3, DIM // 2) * 6
    tables = {0: (angles.cos(), angles.sin())}
    plan = kernels.plan(BatchLayout.of([Span(0, 3, (0,))]), tables, windows=frozenset({0}))
    q, k = torch.randn(3, HEADS * GROUP, DIM), torch.randn(3, HEADS, DIM)
    ready = kernels.rotate_and_store(q, k, torch.zeros_like(k), spec=AttentionSpec(0, DIM**-0.5), plan=plan)

    def turned(x) -> torch.Tensor:
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    torch.testing.assert_close(ready, turned(q) / DIM**0.5)
    torch.testing.assert_close(memory.blocks[0, 0, 0, :, :3].transpose(0, 1), turned(k))


def test_decodes_of_very_different_length_are_not_padded_to_the_longest() -> None:
    kernels = TorchKernels(pool(600))
    lengths = [2, 3, 5, 8, 400, 410, 1200]
    layout = BatchLayout.of([Span(n - 1, 1, tuple(range(-(-n // BLOCK)))) for n in reversed(lengths)])
    ones = torch.ones(len(lengths), DIM // 2)
    reads = kernels.plan(layout, {0: (ones, ones)}, windows=frozenset({0})).reads[0]
    gathered = sum(len(group.gather) for group in reads.decodes) // HEADS
    assert gathered <= 1.2 * sum(-(-n // BLOCK) for n in lengths) + 8
    assert [(g.start, g.end) for g in reads.decodes][-1] == (6, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_activation(dtype: torch.dtype) -> None:
    kernels = TorchKernels(pool(1))
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    actual = kernels.rms_norm(x, weight, 1e-5).double()
    torch.testing.assert_close(actual, exact, atol=tolerance, rtol=tolerance)
    gate, up = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    actual = kernels.gated(gate.clone(), up, "silu").double()
    torch.testing.assert_close(actual, exact, atol=tolerance, rtol=tolerance)


def test_blocks_move_whole(tmp_path: Path) -> None:
    source, target = pool(6), pool(6)
    source.blocks.normal_()
    moved = TorchKernels(source).gather_blocks([4, 1])
    assert moved.shape == (2, GEOMETRY.block_bytes)
    TorchKernels(target).scatter_blocks([0, 5], moved)
    assert torch.equal(target.blocks[[0, 5]], source.blocks[[4, 1]])
    assert not target.blocks[1:5].any()


def test_a_block_is_one_range_at_its_address() -> None:
    memory = pool(7)
    assert memory.block_count == 7
    assert memory.base_address % 4096 == 0
    assert memory.blocks.is_contiguous()
    for block in range(7):
        address = memory.base_address + block * memory.block_bytes
        assert memory.blocks[block].data_ptr() == memory.block_view(block).data_ptr() == address
    assert memory.generations.dtype == np.uint64
    assert memory.generations.tolist() == [0] * 7
