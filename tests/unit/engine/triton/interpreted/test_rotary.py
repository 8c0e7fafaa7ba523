"""Rotation and writing against plain torch."""

import pytest
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec
from engine.kernels.triton.kernels import TritonKernels

from .cases import make_layout, make_pool, stored

SIZES = [(3, 1), (40, 1), (0, 5), (14, 9)]


def rotated(x, cos, sin):
    half = cos.shape[1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def run(geometry, half, *, heads=6):
    pool = make_pool(geometry)
    before = pool.memory.clone()
    layout = make_layout(geometry, SIZES)
    random = torch.Generator().manual_seed(3)
    tokens, kv_heads, dim = layout.token_count, geometry.kv_head_count, geometry.head_dim
    dtype = getattr(torch, geometry.dtype)
    both = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=random).to(dtype)
    q, k, v = both.split((heads, kv_heads, kv_heads), 1)
    angles = torch.randn(tokens, half, generator=random)
    ropes = {0: (angles.cos(), angles.sin())} if half else {}
    kernels = TritonKernels(pool)
    plan = kernels.plan(layout, ropes, windows=frozenset({0}))
    out = kernels.rotate_and_store(q, k, v, spec=AttentionSpec(layer=1, scale=1.0), plan=plan)
    cos, sin = angles.cos(), angles.sin()
    return pool, before, layout, (rotated(q.float(), cos, sin), rotated(k.float(), cos, sin), v.float()), out


@pytest.mark.parametrize(
    ("dtype", "half", "dim"), [("float32", 8, 16), ("bfloat16", 5, 24), ("float32", 0, 16)]
)
def test_queries_are_rotated_and_keys_and_values_are_where_they_belong(dtype, half, dim) -> None:
    geometry = KVGeometry(2, 2, dim, 8, dtype)
    pool, before, layout, (q, k, v), out = run(geometry, half)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == "float32" else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(out.float(), q, **tolerance)
    row = 0
    for span in layout.spans:
        planes = stored(pool, span, 1)[:, span.first_position :].float()
        rows = slice(row, row + span.token_count)
        torch.testing.assert_close(planes[0], k[rows], **tolerance)
        torch.testing.assert_close(planes[1], v[rows], **tolerance)
        row = rows.stop
    changed = (pool.memory != before).sum().item()
    assert changed <= 2 * layout.token_count * 2 * dim * pool.blocks.element_size()


@pytest.mark.parametrize("half", [8, 4])
def test_int8_is_the_nearest_code_of_each_vector(half) -> None:
    geometry = KVGeometry(2, 2, 16, 8, "float32", kv_dtype="int8")
    pool, _, layout, (_, k, v), _ = run(geometry, half)
    row = 0
    for span in layout.spans:
        planes = stored(pool, span, 1)[:, span.first_position :].float()
        for plane, exact in zip(planes, (k, v), strict=True):
            exact = exact[row : row + span.token_count]
            step = exact.abs().amax(-1, keepdim=True) / 127
            assert ((plane - exact).abs() <= step * 0.5001).all()
        row += span.token_count


def test_latents_are_stored_and_parts_are_rotated() -> None:
    geometry = KVGeometry(2, 1, 40, 16, "float32", planes=1, value_dim=32)
    pool, layout = make_pool(geometry), make_layout(geometry, SIZES)
    latent = torch.randn(layout.token_count, 40)
    x, angles = torch.randn(layout.token_count, 6, 8), torch.randn(layout.token_count, 4)
    kernels = TritonKernels(pool)
    plan = kernels.plan(layout, {0: (angles.cos(), angles.sin())}, windows=frozenset({0}))
    torch.testing.assert_close(
        kernels.rotate(x, rope=0, plan=plan), rotated(x, angles.cos(), angles.sin()), atol=1e-6, rtol=1e-5
    )
    kernels.store_latent(latent, layer=1, plan=plan)
    row = 0
    for span in layout.spans:
        written = stored(pool, span, 1)[0, span.first_position :, 0].float()
        assert torch.equal(written, latent[row : row + span.token_count])
        row += span.token_count
