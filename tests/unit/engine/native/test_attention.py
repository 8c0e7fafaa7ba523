"""The native attention against its definition in double precision, and against itself, bit for bit."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec, BatchLayout, Span
from engine.kernels.native_attention import NativeAttention
from engine.kernels.torch_ref import TorchKernels
from engine.kv.pool import KVPool
from engine.native.library import set_threads

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def pool_of(geometry: KVGeometry, block_count: int) -> KVPool:
    return KVPool(geometry, kv_bytes=block_count * geometry.block_bytes, device=CPU)


def poison(pool: KVPool) -> None:
    """NaN wherever the format has one: what nobody wrote must not matter."""
    if pool.scales is None:
        pool.blocks.fill_(math.nan)
    else:
        pool.blocks.fill_(-128)
        pool.scales.fill_(math.nan)


def ropeless(layout: BatchLayout, dim: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    ones = torch.ones(layout.token_count, dim // 2)
    return {0: (ones, ones * 0)}


@contextmanager
def threads(count: int) -> Iterator[None]:
    set_threads(count)
    try:
        yield
    finally:
        set_threads(1)


@dataclass(frozen=True)
class Sequence_:
    """q [n, H, D], k and v [n, K, D] of one whole sequence; v is None for latents."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    block_ids: tuple[int, ...]

    def span(self, start: int, count: int, block_tokens: int) -> Span:
        return Span(start, count, self.block_ids[: -(-(start + count) // block_tokens)])


def random_sequence(geometry: KVGeometry, heads: int, length: int, blocks: list[int], seed: int) -> Sequence_:
    random = torch.Generator().manual_seed(seed)
    dtype = DTYPES[geometry.dtype]
    q, k, v = (
        torch.randn(length, count, geometry.head_dim, generator=random).to(dtype)
        for count in (heads, geometry.kv_head_count, geometry.kv_head_count)
    )
    table = tuple(blocks.pop() for _ in range(geometry.blocks_for(length)))
    return Sequence_(q, k, v if geometry.planes == 2 else None, table)


def attend(
    kernels: NativeAttention | TorchKernels,
    geometry: KVGeometry,
    spec: AttentionSpec,
    parts: Sequence[tuple[Sequence_, int, int]],
) -> list[torch.Tensor]:
    """One step over tokens start … start + count - 1 of each sequence; results in the order of `parts`."""
    layout = BatchLayout.of([s.span(start, count, geometry.block_tokens) for s, start, count in parts])
    plan: Any = kernels.plan(layout, ropeless(layout, geometry.head_dim), windows=frozenset({spec.window}))
    chosen = [parts[i] for i in layout.order]
    q = torch.cat([s.q[start : start + count] for s, start, count in chosen])
    k = torch.cat([s.k[start : start + count] for s, start, count in chosen])
    if geometry.planes == 1:
        kernels.store_latent(k[:, 0], layer=spec.layer, plan=plan)
    else:
        v = torch.cat([s.v[start : start + count] for s, start, count in chosen if s.v is not None])
        q = kernels.rotate_and_store(q, k, v, spec=spec, plan=plan)
    out = kernels.attention(q, spec=spec, plan=plan)
    pieces = out.split([count for _, _, count in chosen])
    return [pieces[layout.order.index(i)] for i in range(len(parts))]


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.float().abs().amax(-1) / 127
    divisor = torch.where(scales > 0, scales, 1.0)
    return (x.float() / divisor[..., None]).round().to(torch.int8), scales


def by_definition(
    geometry: KVGeometry, spec: AttentionSpec, sequence: Sequence_, start: int, count: int
) -> torch.Tensor:
    keys = sequence.k
    values = keys[..., : geometry.value_dim] if sequence.v is None else sequence.v
    if geometry.is_quantized:
        k, k_scales = quantized(keys)
        keys = k * k_scales[..., None]
        v, v_scales = quantized(sequence.k if sequence.v is None else sequence.v)
        values = (v * v_scales[..., None])[..., : values.shape[-1]]
    keys, values, q = keys.double(), values.double(), sequence.q.double()
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    out = torch.empty(count, q.shape[1], values.shape[-1], dtype=torch.float64)
    for i in range(count):
        newest = start + i
        seen = slice(max(0, newest + 1 - spec.window) if spec.window else 0, newest + 1)
        scores = torch.einsum("hd,mhd->hm", q[newest], keys[seen]) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.sinks is not None:
            scores = torch.cat((scores, spec.sinks.double()[:, None]), -1)
        weights = torch.softmax(scores, -1)[:, : keys[seen].shape[0]]
        out[i] = torch.einsum("hm,mhd->hd", weights, values[seen])
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVGeometry, int, AttentionSpec, list[tuple[int, int]], int]:
    planes = draw(st.sampled_from((2, 2, 2, 1)))
    dim = draw(st.sampled_from((8, 16, 48, 64, 80, 96, 128, 192, 256) if planes == 2 else (24, 72, 192, 576)))
    geometry = KVGeometry(
        layer_count=2,
        kv_head_count=draw(st.sampled_from((1, 2, 3))) if planes == 2 else 1,
        head_dim=dim,
        block_tokens=draw(st.sampled_from((1, 4, 16, 32, 48, 100))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        planes=planes,
        value_dim=0 if planes == 2 else dim - 8,
        kv_dtype=draw(st.sampled_from(("auto", "auto", "int8"))),
    )
    heads = geometry.kv_head_count * draw(st.sampled_from((1, 2, 3, 4, 7, 16)))
    seed = draw(st.integers(0, 1000))
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if draw(st.booleans()) else None
    spec = AttentionSpec(
        layer=draw(st.integers(0, 1)),
        scale=draw(st.sampled_from((dim**-0.5, 0.2))),
        window=draw(st.sampled_from((0, 0, 1, 5, 64, 130))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.5))),
        sinks=sinks,
    )
    start = st.one_of(st.integers(0, 150), st.integers(500, 530))
    spans = draw(
        st.lists(st.tuples(start, st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=4)
    )
    return geometry, heads, spec, spans, seed


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_attention_is_its_definition(case) -> None:
    geometry, heads, spec, spans, seed = case
    needed = sum(geometry.blocks_for(s + n) for s, n in spans)
    # A few blocks are free. A pool of thousands would take most of the time, for gigabytes of NaN.
    blocks = np.random.default_rng(seed).permutation(needed + 3).tolist()
    sequences = [random_sequence(geometry, heads, s + n, blocks, seed + i) for i, (s, n) in enumerate(spans)]
    pool = pool_of(geometry, needed + 3)
    poison(pool)
    kernels = NativeAttention(pool)
    early = [(s, 0, start) for s, (start, _) in zip(sequences, spans, strict=True) if start]
    if early:
        attend(kernels, geometry, spec, early)
    parts = [(s, start, count) for s, (start, count) in zip(sequences, spans, strict=True)]
    for (sequence, start, count), actual in zip(parts, attend(kernels, geometry, spec, parts), strict=True):
        expected = by_definition(geometry, spec, sequence, start, count)
        tolerance = TOLERANCE[geometry.dtype]
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


SPECS = {
    "plain": AttentionSpec(0, 0.25),
    "window": AttentionSpec(0, 0.25, window=100),
    "capped, with sinks": AttentionSpec(0, 0.25, softcap=3.0, sinks=torch.linspace(-1, 1, 6)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 64)])
def test_the_same_bits_in_any_chunk_batch_and_thread_count(dtype, dim, kv_dtype, name) -> None:
    """Up to sixteen rows of whole tiles of numbers are computed in another way than more, with AMX."""
    geometry = KVGeometry(1, 2, dim, 16, dtype, kv_dtype=kv_dtype)
    length, spec = 600, SPECS[name]
    blocks = list(range(400))
    subject, other = (random_sequence(geometry, 6, length, blocks, seed) for seed in (1, 2))

    def run(chunk: int, *, beside: bool, thread_count: int) -> torch.Tensor:
        pool = pool_of(geometry, 400)
        poison(pool)
        kernels, results = NativeAttention(pool), []
        with threads(thread_count):
            for start in range(0, length, chunk):
                parts = [(subject, start, min(chunk, length - start))]
                if beside:
                    parts.insert(0, (other, start, min(1 + chunk // 2, length - start)))
                results.append(attend(kernels, geometry, spec, parts)[-1])
        return torch.cat(results)

    whole = run(length, beside=False, thread_count=1)
    assert whole.isfinite().all()
    for chunk, beside, thread_count in (
        (1, False, 1),
        (1, True, 2),
        (2, True, 1),
        (5, False, 2),
        (7, True, 1),
        (64, False, 2),
        (600, True, 2),
    ):
        assert torch.equal(whole, run(chunk, beside=beside, thread_count=thread_count)), (chunk, beside)


@pytest.mark.parametrize("planes", [1, 2])
def test_a_long_context_shared_out_over_threads_has_the_same_bits(planes) -> None:
    geometry = KVGeometry(1, 1, 32, 32, "bfloat16", planes=planes, value_dim=0 if planes == 2 else 24)
    sequence = random_sequence(geometry, 4, 3001, list(range(100)), 3)
    kernels = NativeAttention(pool_of(geometry, 100))
    for spec in (AttentionSpec(0, 0.2), AttentionSpec(0, 0.2, window=1500)):
        attend(kernels, geometry, spec, [(sequence, 0, 2995)])
        outputs: list[torch.Tensor] = []
        for count in (1, 2, 4):
            with threads(count):
                (out,) = attend(kernels, geometry, spec, [(sequence, 2995, 6)])
                outputs.append(out)
        assert all(torch.equal(outputs[0], out) for out in outputs[1:])
        expected = by_definition(geometry, spec, sequence, 2995, 6)
        torch.testing.assert_close(outputs[0].double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_torch_kernels_agree(kv_dtype, planes) -> None:
    """Down to the bytes in the pool."""
    geometry = KVGeometry(
        *(2, planes, 32, 16, "float32"),
        planes=planes,
        value_dim=0 if planes == 2 else 24,
        kv_dtype=kv_dtype,
    )
    blocks = list(range(60))
    one, two = (random_sequence(geometry, 4, 150, blocks, seed) for seed in (1, 2))
    spec = AttentionSpec(1, 0.2, window=70)
    pools = [pool_of(geometry, 60) for _ in range(2)]
    outputs: list[list[torch.Tensor]] = []
    for kernels in (NativeAttention(pools[0]), TorchKernels(pools[1])):
        attend(kernels, geometry, spec, [(one, 0, 140), (two, 0, 99)])
        outputs.append(attend(kernels, geometry, spec, [(one, 140, 10), (two, 99, 1)]))
    for native, reference in zip(*outputs, strict=True):
        torch.testing.assert_close(native, reference, atol=1e-5, rtol=1e-5)
    for block in range(60):
        assert torch.equal(pools[0].block_view(block), pools[1].block_view(block))


def test_int8_keys_and_values_cost_little() -> None:
    """Each number is off by at most half a step of its vector: results by about one part in a hundred."""
    exact = KVGeometry(1, 2, 64, 32, "float32")
    coarse = KVGeometry(1, 2, 64, 32, "float32", kv_dtype="int8")
    spec = AttentionSpec(0, 64**-0.5)
    sequence = random_sequence(exact, 6, 400, list(range(40)), 5)
    (a,), (b,) = (
        attend(NativeAttention(pool_of(g, 40)), g, spec, [(sequence, 0, 400)]) for g in (exact, coarse)
    )
    assert ((a - b).norm() / a.norm()).item() < 0.01
    assert not torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rotary", [64, 40, 6])
def test_rotation_and_storage(dtype, rotary) -> None:
    """The expectation is computed with complex numbers: (x_i + j x_{i + R/2}) times e^{j angle}. The rest of
    a head is not rotated."""
    geometry = KVGeometry(2, 2, 64, 4, dtype)
    pool = pool_of(geometry, 12)
    pool.blocks.fill_(7)
    kernels = NativeAttention(pool)
    spans = [Span(5, 1, (9, 2)), Span(2, 40, (0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 9))]
    layout = BatchLayout.of(spans)
    angles = torch.rand(41, rotary // 2) * 6
    plan = kernels.plan(layout, {3: (angles.cos(), angles.sin())}, windows=frozenset({0}))
    mixed = torch.randn(41, 10 * 64).to(DTYPES[dtype])
    q, k, v = (x.unflatten(1, (-1, 64)) for x in mixed.split((6 * 64, 2 * 64, 2 * 64), 1))

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)[:, None]
        return torch.cat((pairs.real, pairs.imag, x[..., rotary:].double()), -1)

    expected_q, expected_k, expected_v = turned(q), turned(k), v.clone()
    ready = kernels.rotate_and_store(q, k, v, spec=AttentionSpec(1, 1.0, rope=3), plan=plan)
    bound = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    torch.testing.assert_close(ready.double(), expected_q, atol=4 * bound, rtol=bound)
    written = torch.zeros(12, 4, dtype=torch.bool)
    row = 0
    for span in layout.spans:
        for position in range(span.first_position, span.context_tokens):
            block, offset = span.block_ids[position // 4], position % 4
            stored = pool.blocks[block, 1, :, :, offset]
            torch.testing.assert_close(stored[0].double(), expected_k[row], atol=4 * bound, rtol=bound)
            assert torch.equal(stored[1], expected_v[row])
            written[block, offset] = True
            row += 1
    assert (pool.blocks[:, 0] == 7).all()
    assert (pool.blocks[:, 1].permute(0, 3, 1, 2, 4)[~written] == 7).all()


def test_part_of_each_head_is_rotated_in_place() -> None:
    geometry = KVGeometry(1, 1, 24, 4, "float32", planes=1, value_dim=16)
    kernels = NativeAttention(pool_of(geometry, 4))
    layout = BatchLayout.of([Span(0, 5, (0, 1))])
    angles = torch.rand(5, 4)
    plan = kernels.plan(layout, {0: (angles.cos(), angles.sin())}, windows=frozenset({0}))
    q = torch.randn(5, 3, 24)
    before, part = q.clone(), q[..., 16:]
    out = kernels.rotate(part, rope=0, plan=plan)
    a, b = before[..., 16:20], before[..., 20:]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    torch.testing.assert_close(out, torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    assert torch.equal(q[..., :16], before[..., :16])


def test_int8_is_rounded_to_nearest_with_one_scale_per_vector() -> None:
    geometry = KVGeometry(1, 2, 48, 4, "bfloat16", kv_dtype="int8")
    pool = pool_of(geometry, 3)
    sequence = random_sequence(geometry, 2, 9, [0, 1, 2], 1)
    assert sequence.v is not None
    sequence.k[3] = 0
    attend(NativeAttention(pool), geometry, AttentionSpec(0, 1.0), [(sequence, 0, 9)])
    for plane, x in enumerate((sequence.k, sequence.v)):
        values, scales = quantized(x)
        ids = list(sequence.block_ids)
        assert torch.equal(pool.blocks[ids, 0, plane].transpose(1, 2).flatten(0, 1)[:9], values)
        assert pool.scales is not None
        assert torch.equal(pool.scales[ids, 0, plane].transpose(1, 2).flatten(0, 1)[:9], scales)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_blocks_move_whole(kv_dtype) -> None:
    geometry = KVGeometry(2, 2, 16, 4, "float32", kv_dtype=kv_dtype)
    source, target = pool_of(geometry, 6), pool_of(geometry, 6)
    everything = torch.arange(6 * geometry.block_bytes) % 251
    for block in range(6):
        source.block_view(block).copy_(everything[block * geometry.block_bytes :][: geometry.block_bytes])
    before = [source.block_view(block).clone() for block in range(6)]
    moved = NativeAttention(source).gather_blocks([4, 1])
    NativeAttention(target).scatter_blocks([0, 5], moved)
    assert torch.equal(target.block_view(0), before[4])
    assert torch.equal(target.block_view(5), before[1])
    assert not any(target.block_view(block).any() for block in (1, 2, 3, 4))
    NativeAttention(source).copy_blocks([(2, 3), (3, 0)])
    assert torch.equal(source.block_view(0), before[2])
    assert torch.equal(source.block_view(3), before[2])
    NativeAttention(source).copy_blocks([])
    assert NativeAttention(source).gather_blocks([]).shape == (0, geometry.block_bytes)


def test_kinds_of_kv_without_code_are_refused_at_the_start() -> None:
    with pytest.raises(SetupError, match="float16"):
        NativeAttention(pool_of(KVGeometry(1, 1, 8, 4, "float16"), 2))
    with pytest.raises(SetupError, match="2050"):
        NativeAttention(pool_of(KVGeometry(1, 1, 2050, 4, "float32"), 2))
