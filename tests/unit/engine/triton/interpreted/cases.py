"""Pools, batches and definitions that the tests share."""

import numpy as np
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec, BatchLayout, Span
from engine.kv.pool import KVPool

CPU = torch.device("cpu")


def make_pool(geometry, block_count=64, seed=0):
    """Full of random numbers."""
    pool = KVPool(geometry, kv_bytes=block_count * geometry.block_bytes, device=CPU)
    random = torch.Generator().manual_seed(seed)
    if geometry.is_quantized:
        pool.blocks.copy_(torch.randint(-127, 128, pool.blocks.shape, generator=random))
        pool.scales.copy_(torch.rand(pool.scales.shape, generator=random) / 64)
    else:
        pool.blocks.copy_(torch.randn(pool.blocks.shape, generator=random))
    return pool


def make_layout(geometry, sizes, block_count=64, seed=0):
    """sizes: (first position, tokens) of each sequence."""
    free = np.random.default_rng(seed).permutation(block_count).tolist()
    return BatchLayout.of(
        [
            Span(first, n, tuple(free.pop() for _ in range(geometry.blocks_for(first + n))))
            for first, n in sizes
        ]
    )


def stored(pool, span, layer):
    """Keys and values of a sequence's positions, float64 [planes, positions, K, D]."""
    ids = list(span.block_ids)
    numbers = pool.blocks[ids, layer].double()
    if pool.scales is not None:
        numbers = numbers * pool.scales[ids, layer].double()[..., None]
    return numbers.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : span.context_tokens]


def attention_by_definition(q, pool, layout, spec: AttentionSpec):
    geometry: KVGeometry = pool.geometry
    value_dim = geometry.value_dim if geometry.planes == 1 else geometry.head_dim
    out = torch.empty(*q.shape[:2], value_dim, dtype=torch.float64)
    group, row = q.shape[1] // geometry.kv_head_count, 0
    for span in layout.spans:
        planes = stored(pool, span, spec.layer)
        for position in range(span.first_position, span.context_tokens):
            oldest = max(0, position + 1 - spec.window) if spec.window else 0
            for head in range(q.shape[1]):
                keys = planes[0, oldest : position + 1, head // group]
                values = planes[-1, oldest : position + 1, head // group, :value_dim]
                scores = keys @ q[row, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if spec.sinks is not None:
                    scores = torch.cat((scores, spec.sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)
                out[row, head] = weights[: len(keys)] @ values
            row += 1
    return out
