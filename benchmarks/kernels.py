"""Compares every kernel with its limit: memory bandwidth, or the rate of matrix products.

All kernels are called through `engine.kernels.interface`, so that every implementation and device gives the
same figures. Inputs rotate through enough copies to leave the caches, if they would do so in a model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.config import EngineConfig
from baton.core.geometry import KVGeometry, blocks_for
from benchmarks import limits
from engine.devices import torch_device
from engine.kernels.choose import make_kernels
from engine.kernels.interface import AttentionSpec, BatchLayout, Kernels, Span
from engine.kernels.native import NativeKernels
from engine.kernels.weights import DenseMatrix, Matrix
from engine.kv.pool import KVPool
from engine.native.classes import processor_name
from engine.quant.round import round_int4, round_int8

CACHE_BYTES = 256 * 2**20
"""Matrices of one shape fill this many bytes."""
COPIES_MAX = 64


class KernelResult(msgspec.Struct, frozen=True):
    kernel: str
    case: str
    seconds: float
    limit: str
    """The resource that bounds it."""
    ratio: float
    """Seconds at that limit divided by the measured seconds."""
    torch_ratio: float | None = None
    """Seconds of torch's own operation on the same input divided by the measured seconds, if there is one."""


class KernelShape(msgspec.Struct, frozen=True):
    """The shapes of a model whose kernels are measured."""

    hidden: int = 768
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    inner: int = 2048
    vocab: int = 8192
    block_tokens: int = 32
    decode_batch: int = 32
    decode_context: int = 544
    prefill_tokens: tuple[int, ...] = (512, 2048)


LLAMA_8B = KernelShape(
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=14336,
    vocab=128_256,
    decode_batch=64,
    decode_context=4096,
    prefill_tokens=(2048, 8192),
)


class _Limits:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.read = limits.read_bandwidth(device)
        self.copy = limits.copy_bandwidth(device)
        self.matmul = limits.matmul_rate(device, dtype)


class KernelBench:
    """One implementation on one device. Raises SetupError if it cannot run there."""

    def __init__(self, shape: KernelShape, *, device: str, engine: EngineConfig, rounds: int) -> None:
        self.shape, self.rounds = shape, rounds
        self.device, self.dtype = torch_device(device), torch.bfloat16
        blocks = shape.decode_batch * blocks_for(shape.decode_context, shape.block_tokens)
        blocks = max(blocks, blocks_for(max(shape.prefill_tokens), shape.block_tokens))
        geometry = KVGeometry(1, shape.kv_heads, shape.head_dim, shape.block_tokens, "bfloat16")
        kv_bytes = (blocks + 1) * geometry.block_bytes
        self.pool = KVPool(geometry, kv_bytes=kv_bytes, device=self.device)
        self.pool.blocks.normal_()
        self.kernels: Kernels[Any, Any, Any] = make_kernels(engine, self.pool)
        self.limits = _Limits(self.device, self.dtype)

    def run(self, progress: Callable[[str], None]) -> Iterator[KernelResult]:
        for part in (self._linears, self._attention, self._rowwise, self._blocks):
            for result in part():
                progress(f"{result.kernel} {result.case}: {result.seconds * 1e6:.0f} us, {result.ratio:.2f}")
                yield result

    @property
    def title(self) -> str:
        """The implementation; of the native kernels also their class, which follows from the processor."""
        name = type(self.kernels).__name__
        if isinstance(self.kernels, NativeKernels):
            return f"{name} of class {self.kernels.features} on {processor_name()}"
        return name

    # --- matrices ---

    def _linears(self) -> Iterator[KernelResult]:
        s = self.shape
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        for name, out, size in (("qkv", qkv, s.hidden), ("down", s.hidden, s.inner)):
            for rows in (1, 8, 32, *s.prefill_tokens):
                yield self._linear(name, rows, out, size, "bf16", lambda m: m, 16)
        for rows in (1, 8, 32):
            yield self._linear("down", rows, s.hidden, s.inner, "int8", round_int8, 8)
            yield self._linear("down", rows, s.hidden, s.inner, "int4", round_int4, 4.25)
        yield self._gated(1)
        yield self._gated(max(s.prefill_tokens))

    def _linear(
        self, name: str, rows: int, out: int, size: int, kind: str, made: Callable[[DenseMatrix], Matrix],
        bits: float,
    ) -> KernelResult:  # fmt: skip
        dense = [DenseMatrix(self._random(out, size) * 0.02) for _ in range(self._copies(out * size * 2))]
        packed = [self.kernels.pack(made(matrix)) for matrix in dense]
        x = self._random(rows, size)
        taken_s = self._each(lambda i: self.kernels.linear(x, packed[i]), len(packed))
        torch_s = self._each(lambda i: F.linear(x, dense[i].weight), len(packed))
        case = f"{name} {kind}, {rows} rows, {size}→{out}"
        return self._result("linear", case, taken_s, out * size * bits / 8, 2 * rows * out * size, torch_s)

    def _gated(self, rows: int) -> KernelResult:
        s = self.shape
        out = 2 * s.inner
        copies = self._copies(out * s.hidden * 2)
        weights = [self._random(out, s.hidden) * 0.02 for _ in range(copies)]
        packed = [self.kernels.pack(DenseMatrix(weight)) for weight in weights]
        x = self._random(rows, s.hidden)

        def by_torch(i: int) -> Tensor:
            gate, up = F.linear(x, weights[i]).chunk(2, dim=-1)
            return F.silu(gate) * up

        taken_s = self._each(lambda i: self.kernels.gated_linear(x, packed[i], "silu"), copies)
        torch_s = self._each(by_torch, copies)
        case = f"silu, {rows} rows, {s.hidden}→{s.inner}"
        flops = 2 * rows * out * s.hidden
        return self._result("gated_linear", case, taken_s, out * s.hidden * 2, flops, torch_s)

    # --- attention ---

    def _attention(self) -> Iterator[KernelResult]:
        s = self.shape
        per_sequence = blocks_for(s.decode_context, s.block_tokens)
        spans = [
            Span(s.decode_context - 1, 1, tuple(range(i * per_sequence, (i + 1) * per_sequence)))
            for i in range(s.decode_batch)
        ]
        kv_bytes = s.decode_batch * s.decode_context * 2 * s.kv_heads * s.head_dim * 2
        flops = 4 * s.decode_batch * s.decode_context * s.heads * s.head_dim
        case = f"decode, {s.decode_batch} × {s.decode_context}"
        yield self._attend(case, spans, kv_bytes, flops)
        for tokens in s.prefill_tokens:
            span = Span(0, tokens, tuple(range(blocks_for(tokens, s.block_tokens))))
            flops = 2 * tokens * tokens * s.heads * s.head_dim  # causal masking skips half of the square
            q, k, v = (self._random(1, heads, tokens, s.head_dim) for heads in (s.heads, *[s.kv_heads] * 2))
            torch_s = limits.seconds(
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                ),
                rounds=self.rounds,
                device=self.device,
            )
            yield self._attend(f"prefill, {tokens}", [span], 0, flops, torch_s)

    def _attend(
        self, case: str, spans: list[Span], kv_bytes: float, flops: float, torch_s: float | None = None
    ) -> KernelResult:
        s = self.shape
        layout = BatchLayout.of(spans)
        angles = torch.zeros(layout.token_count, s.head_dim // 2, device=self.device)
        plan = self.kernels.plan(layout, {0: (angles.cos(), angles.sin())}, windows=frozenset({0}))
        spec = AttentionSpec(0, s.head_dim**-0.5)
        q, k, v = (
            self._random(layout.token_count, heads, s.head_dim) for heads in (s.heads, *[s.kv_heads] * 2)
        )
        rotated = self.kernels.rotate_and_store(q, k, v, spec=spec, plan=plan)
        taken_s = limits.seconds(
            lambda: self.kernels.attention(rotated, spec=spec, plan=plan),
            rounds=self.rounds,
            device=self.device,
        )
        return self._result("attention", case, taken_s, kv_bytes, flops, torch_s)

    # --- the rest ---

    def _rowwise(self) -> Iterator[KernelResult]:
        s = self.shape
        rows = max(s.prefill_tokens)
        x, residual = self._random(rows, s.hidden), self._random(rows, s.hidden)
        weight = self._random(s.hidden)
        bytes_once = rows * s.hidden * 2
        taken_s = self._each(lambda _: self.kernels.rms_norm(x, weight, 1e-6), 1)
        torch_s = self._each(lambda _: F.rms_norm(x, (s.hidden,), weight, 1e-6), 1)
        yield self._copying("rms_norm", f"{rows} × {s.hidden}", taken_s, 2 * bytes_once, torch_s)
        taken_s = self._each(lambda _: self.kernels.add_rms_norm(x, residual, weight, 1e-6), 1)
        yield self._copying("add_rms_norm", f"{rows} × {s.hidden}", taken_s, 4 * bytes_once)
        gate, up = self._random(rows, s.inner), self._random(rows, s.inner)
        taken_s = self._each(lambda _: self.kernels.gated(gate, up, "silu"), 1)
        yield self._copying("gated", f"silu, {rows} × {s.inner}", taken_s, 3 * rows * s.inner * 2)

    def _blocks(self) -> Iterator[KernelResult]:
        count = self.pool.block_count // 2
        ids = list(range(0, 2 * count, 2))
        moved = 2 * count * self.pool.block_bytes
        data = self.kernels.gather_blocks(ids)
        taken_s = self._each(lambda _: self.kernels.gather_blocks(ids), 1)
        yield self._copying("gather_blocks", f"{count} × {self.pool.block_bytes} B", taken_s, moved)
        taken_s = self._each(lambda _: self.kernels.scatter_blocks(ids, data), 1)
        yield self._copying("scatter_blocks", f"{count} × {self.pool.block_bytes} B", taken_s, moved)

    # --- figures ---

    def _each(self, call: Callable[[int], object], copies: int) -> float:
        """Seconds of one call, over `copies` different inputs in turn."""

        def all_of_them() -> None:
            for i in range(copies):
                call(i)

        return limits.seconds(all_of_them, rounds=self.rounds, device=self.device) / copies

    def _copies(self, size: int) -> int:
        return max(1, min(COPIES_MAX, CACHE_BYTES // size))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _result(
        self, kernel: str, case: str, taken_s: float, read_bytes: float, flops: float, torch_s: float | None
    ) -> KernelResult:
        bounds = {"memory reads": read_bytes / self.limits.read, "matmul rate": flops / self.limits.matmul}
        limit = max(bounds, key=lambda name: bounds[name])
        beside = None if torch_s is None else torch_s / taken_s
        return KernelResult(kernel, case, taken_s, limit, bounds[limit] / taken_s, beside)

    def _copying(
        self, kernel: str, case: str, taken_s: float, moved: float, torch_s: float | None = None
    ) -> KernelResult:
        beside = None if torch_s is None else torch_s / taken_s
        return KernelResult(kernel, case, taken_s, "memory copy", moved / self.limits.copy / taken_s, beside)
