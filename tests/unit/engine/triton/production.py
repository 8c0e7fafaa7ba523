"""Calls of the kernels with the shapes of production, by name: what `test_compiled` compiles."""

from collections.abc import Callable
from functools import partial

import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec, BatchLayout, Span
from engine.kernels.triton.device import DeviceFacts
from engine.kernels.triton.kernels import PackedExpertPair
from engine.kernels.triton.packing import PackedMatrix

from .ahead import META, empty, make_kernels

BATCH = [(5000, 1), (4000, 3), (0, 900)]
"""(first position, tokens): a decode, a checked draft, a chunk."""
GQA = KVGeometry(2, 8, 128, 32, "bfloat16")
NARROW = KVGeometry(2, 8, 64, 32, "bfloat16")
WIDE = KVGeometry(2, 8, 256, 32, "bfloat16")
LATENT = KVGeometry(2, 1, 576, 64, "bfloat16", planes=1, value_dim=512)


def quantized(geometry: KVGeometry, kv_dtype) -> KVGeometry:
    values = {name: getattr(geometry, name) for name in geometry.__struct_fields__}
    return KVGeometry(**{**values, "kv_dtype": kv_dtype})


def attention(geometry, heads, facts: DeviceFacts, *, window=0, softcap=0.0, sinks=False) -> None:
    kernels = make_kernels(geometry, facts)
    spans = [Span(first, n, tuple(range(geometry.blocks_for(first + n)))) for first, n in BATCH]
    layout = BatchLayout.of(spans)
    plan = kernels.plan(layout, {}, windows=frozenset({window}))
    dtype = getattr(torch, geometry.dtype)
    spec = AttentionSpec(1, 0.1, window, softcap, empty(heads, dtype=torch.float32) if sinks else None)
    kernels.attention(empty(layout.token_count, heads, geometry.head_dim, dtype=dtype), spec=spec, plan=plan)


def write(geometry, heads, rotated, facts: DeviceFacts) -> None:
    kernels = make_kernels(geometry, facts)
    layout = BatchLayout.of([Span(0, 1, (0,)), Span(31, 1, (0, 1))])
    half = empty(2, rotated // 2, dtype=torch.float32)
    plan = kernels.plan(layout, {0: (half, half)}, windows=frozenset({0}))
    dim, kv_heads = geometry.head_dim, geometry.kv_head_count
    if geometry.planes == 1:
        kernels.store_latent(empty(2, dim), layer=1, plan=plan)
        kernels.rotate(empty(2, heads, 192)[..., 128:], rope=0, plan=plan)
        return
    q, k, v = empty(2, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
    kernels.rotate_and_store(q, k, v, spec=AttentionSpec(1, 0.1), plan=plan)


def rows(hidden, facts: DeviceFacts) -> None:
    kernels = make_kernels(GQA, facts)
    x, weight = empty(64, hidden), empty(hidden)
    kernels.add_rms_norm(x, x, weight, 1e-6)
    kernels.rms_norm(x, weight.float(), 1e-6)
    kernels.rms_norm(empty(64, 48, 128)[:, :32], empty(128), 1e-6)
    for activation in ("silu", "gelu", "gelu_tanh", "swiglu_oai"):
        kernels.gated(x, x, activation)


def block_copies(facts: DeviceFacts) -> None:
    kernels = make_kernels(GQA, facts)
    kernels.copy_blocks([(0, 1), (2, 3)])
    kernels.scatter_blocks([2, 3], kernels.gather_blocks([0, 1]))


def packed(kind, out, inp, *, group=0, zeros=False, experts=0) -> PackedMatrix:
    lead = (experts,) if experts else ()
    if kind == "dense":
        return PackedMatrix("dense", out, inp, empty(*lead, out, inp))
    half = min(group or 64, 64) if kind == "int4" else 0
    values = empty(*lead, out, inp // 2 if half else inp, dtype=torch.int8 if kind == "int8" else torch.uint8)
    groups = inp // group if group else 1
    scales = empty(*lead, groups, out, dtype=torch.float16)
    return PackedMatrix(kind, out, inp, values, scales, scales if zeros else None, group, half)


def linear(facts: DeviceFacts, *, kind, tokens, group=0, zeros=False, size=4096) -> None:
    kernels = make_kernels(GQA, facts)
    matrix = packed(kind, size, size, group=group, zeros=zeros)
    kernels.linear(empty(tokens, size), matrix, residual=empty(tokens, size))
    kernels.gated_linear(empty(tokens, size), packed(kind, 8 * size, size, group=group, zeros=zeros), "silu")


def experts(facts: DeviceFacts, *, kind, tokens, group=0, zeros=False) -> None:
    kernels = make_kernels(GQA, facts)
    many = {"group": group, "zeros": zeros, "experts": 64}
    pair = PackedExpertPair(packed(kind, 2 * 768, 2048, **many), packed(kind, 2048, 768, **many))
    chosen = torch.empty(tokens, 8, dtype=torch.int64, device=META)
    kernels.experts(empty(tokens, 2048), pair, chosen, empty(tokens, 8, dtype=torch.float32), "silu")


Call = Callable[[DeviceFacts], None]
ATTENTION: dict[str, Call] = {
    "gqa": partial(attention, GQA, 32),
    "gqa of 7, window": partial(attention, GQA, 56, window=1024),
    "gqa, int8": partial(attention, quantized(GQA, "int8"), 32),
    "gqa, fp8, window": partial(attention, quantized(GQA, "fp8"), 32, window=4096),
    "narrow heads, sinks": partial(attention, NARROW, 64, window=128, sinks=True),
    "wide heads, softcap": partial(attention, WIDE, 16, window=4096, softcap=50.0),
    "heads of 96, float16": partial(attention, KVGeometry(2, 32, 96, 16, "float16"), 32),
    "softcap": partial(attention, GQA, 16, softcap=30.0),
    "latent": partial(attention, LATENT, 128),
    "latent, few heads, int8": partial(attention, quantized(LATENT, "int8"), 16),
    "latent, fp8": partial(attention, quantized(LATENT, "fp8"), 128),
    "float32": partial(attention, KVGeometry(2, 8, 64, 32, "float32"), 32),
}
WRITES: dict[str, Call] = {
    "write": partial(write, GQA, 32, 128),
    "write, part rotated, int8": partial(write, quantized(GQA, "int8"), 32, 64),
    "write, fp8": partial(write, quantized(GQA, "fp8"), 32, 128),
    "write latent": partial(write, LATENT, 128, 64),
    "write latent, int8": partial(write, quantized(LATENT, "int8"), 128, 64),
    "rows of 4096": partial(rows, 4096),
    "rows of 5120": partial(rows, 5120),
    "blocks": block_copies,
}
_KINDS = {
    "int8": {"kind": "int8"},
    "int8 groups": {"kind": "int8", "group": 128, "zeros": True},
    "int4 groups": {"kind": "int4", "group": 128},
    "int4 zeros": {"kind": "int4", "group": 32, "zeros": True},
    "fp8": {"kind": "fp8"},
    "fp8 blocks": {"kind": "fp8", "group": 128},
}
PRODUCTS: dict[str, Call] = {
    f"{name}, {tokens} tokens": partial(linear, tokens=tokens, **how)
    for name, how in _KINDS.items()
    for tokens in (8, 64, 2048)
}
EXPERTS: dict[str, Call] = {
    f"experts {name}, {tokens} tokens": partial(experts, tokens=tokens, **how)
    for name, how in {"dense": {"kind": "dense"}, **_KINDS}.items()
    for tokens in (16, 4096)
}
ALL = {**ATTENTION, **WRITES, **PRODUCTS, **EXPERTS}
CHOSEN = (
    "gqa", "latent", "write, part rotated, int8", "rows of 4096", "blocks", "int8, 8 tokens",
    "fp8 blocks, 2048 tokens", "experts int4 groups, 16 tokens",
)  # fmt: skip
"""Every kernel, and what is nearest to the limits."""
