"""Compares every kernel with its limit: memory bandwidth, or the rate of matrix products.

All kernels are called through `engine.kernels.interface`, so that every implementation and device gives the
same figures. Inputs rotate through enough copies to leave the caches, if they would do so in a model.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.config import EngineConfig
from baton.core.geometry import KVDTypeName, KVGeometry, blocks_for
from benchmarks import limits
from engine.devices import torch_device
from engine.kernels.choose import make_kernels
from engine.kernels.interface import AttentionSpec, BatchLayout, Kernels, Span
from engine.kernels.native import NativeKernels
from engine.kernels.weights import DenseMatrix, ExpertMatrices, Matrix
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
    decodes: tuple[tuple[int, int], ...] = ((32, 544),)
    """(sequences, context tokens of each)."""
    prefill_tokens: tuple[int, ...] = (512, 2048)


LLAMA_8B = KernelShape(
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=14336,
    vocab=128_256,
    decodes=((1, 4096), (8, 4096), (64, 512), (64, 4096)),
    prefill_tokens=(2048, 8192),
)


class ExpertShape(msgspec.Struct, frozen=True):
    """The experts of a mixture's layer, and the heads of its latent attention, as on a GPU."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    choices: int = 8
    rows: tuple[int, ...] = (64, 4096)
    latent_heads: int = 128
    latent: KVGeometry = KVGeometry(1, 1, 576, 32, "bfloat16", planes=1, value_dim=512)


EXPERTS = ExpertShape()
"""Experts as Qwen3-30B-A3B has them, latents as DeepSeek-V3."""


class _Limits:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.read = limits.read_bandwidth(device)
        self.copy = limits.copy_bandwidth(device)
        self.matmul = limits.matmul_rate(device, dtype)


def fill_with_numbers(pool: KVPool) -> None:
    """Write random numbers to the whole pool. Memory that was never written is one page of zeros to the
    system, which reads of the pool would then find in the cache."""
    if pool.scales is not None:
        pool.memory.random_(0, 64)  # any byte is a number, and these are small floats as scales
    else:
        pool.blocks.normal_()


class KernelBench:
    """One implementation on one device. Raises SetupError if it cannot run there."""

    def __init__(self, shape: KernelShape, *, device: str, engine: EngineConfig, rounds: int) -> None:
        self.shape, self.rounds = shape, rounds
        self.device, self.dtype = torch_device(device), torch.bfloat16
        blocks = [count * blocks_for(context, shape.block_tokens) for count, context in shape.decodes]
        self._block_count = max(*blocks, blocks_for(max(shape.prefill_tokens), shape.block_tokens)) + 1
        self._engine = engine
        geometry = KVGeometry(1, shape.kv_heads, shape.head_dim, shape.block_tokens, "bfloat16")
        self.pool, self.kernels = self._kernels_of(geometry)
        self.limits = _Limits(self.device, self.dtype)

    def _kernels_of(self, geometry: KVGeometry) -> tuple[KVPool, Kernels[Any, Any, Any]]:
        """Kernels on a pool of their own, with random values."""
        pool = KVPool(geometry, kv_bytes=self._block_count * geometry.block_bytes, device=self.device)
        fill_with_numbers(pool)
        return pool, make_kernels(self._engine, pool)

    def run(self, progress: Callable[[str], None]) -> Iterator[KernelResult]:
        parts = [self._attention, self._linears, self._rowwise, self._blocks]
        if self.device.type == "cuda":
            parts[1:1] = [self._quantised_attention, self._latent_attention, self._experts]
        for part in parts:
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
        for count, context in s.decodes:
            yield self._decodes(self.kernels, s.heads, count, context)
        for tokens in s.prefill_tokens:
            yield self._prefill(tokens, self._causal_by_torch(tokens))
        if self.device.type == "cuda":
            tokens, before = 512, max(s.prefill_tokens) - 512
            yield self._prefill(tokens, None, before)

    def _quantised_attention(self) -> Iterator[KernelResult]:
        s = self.shape
        kinds: tuple[KVDTypeName, ...] = ("int8", "fp8")
        for kind in kinds:
            geometry = KVGeometry(1, s.kv_heads, s.head_dim, s.block_tokens, "bfloat16", kv_dtype=kind)
            kernels = self._kernels_of(geometry)[1]
            yield self._decodes(kernels, s.heads, *s.decodes[-1], geometry=geometry)

    def _latent_attention(self) -> Iterator[KernelResult]:
        geometry = EXPERTS.latent
        kernels = self._kernels_of(geometry)[1]
        yield self._decodes(kernels, EXPERTS.latent_heads, *self.shape.decodes[-1], geometry=geometry)

    def _decodes(
        self,
        kernels: Kernels[Any, Any, Any],
        heads: int,
        count: int,
        context: int,
        *,
        geometry: KVGeometry | None = None,
    ) -> KernelResult:
        """One token for each of `count` sequences of `context` tokens."""
        held = geometry or self.pool.geometry
        per_sequence = blocks_for(context, held.block_tokens)
        spans = [
            Span(context - 1, 1, tuple(range(i * per_sequence, (i + 1) * per_sequence))) for i in range(count)
        ]
        kv_bytes = count * context * held.block_bytes / held.block_tokens
        flops = 2 * count * context * heads * (held.head_dim + (held.value_dim or held.head_dim))
        kind = "latent, " if held.planes == 1 else "" if held.kv_dtype == "auto" else f"{held.kv_dtype}, "
        torch_s = None
        if self.device.type == "cuda" and geometry is None:
            q = self._random(count, heads, 1, held.head_dim)
            k, v = (self._random(count, held.kv_head_count, context, held.head_dim) for _ in range(2))
            torch_s = self._by_torch(q, k, v, is_causal=False)
        taken_s = self._attend(kernels, spans, heads, held)
        return self._result(
            "attention", f"decode, {kind}{count} × {context}", taken_s, kv_bytes, flops, torch_s
        )

    def _prefill(self, tokens: int, torch_s: float | None, before: int = 0) -> KernelResult:
        """A chunk of `tokens` tokens after `before` others."""
        s = self.shape
        span = Span(before, tokens, tuple(range(blocks_for(before + tokens, s.block_tokens))))
        # Causal masking skips half of the square.
        flops = 2 * (tokens + 2 * before) * tokens * s.heads * s.head_dim
        case = f"prefill, {tokens}" + (f" after {before}" if before else "")
        taken_s = self._attend(self.kernels, [span], s.heads, self.pool.geometry)
        return self._result("attention", case, taken_s, 0, flops, torch_s)

    def _causal_by_torch(self, tokens: int) -> float:
        s = self.shape
        q, k, v = (self._random(1, heads, tokens, s.head_dim) for heads in (s.heads, *[s.kv_heads] * 2))
        return self._by_torch(q, k, v, is_causal=True)

    def _by_torch(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> float:
        """Seconds of torch's fastest attention over keys that are not paged."""

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

        if self.device.type != "cuda":
            return limits.seconds(attend, rounds=self.rounds, device=self.device)
        seen: list[float] = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
                seen.append(limits.seconds(attend, rounds=self.rounds, device=self.device))
        return min(seen)

    def _attend(
        self, kernels: Kernels[Any, Any, Any], spans: list[Span], heads: int, geometry: KVGeometry
    ) -> float:
        layout = BatchLayout.of(spans)
        plan = kernels.plan(layout, {}, windows=frozenset({0}))
        spec = AttentionSpec(0, geometry.head_dim**-0.5)
        q = self._random(layout.token_count, heads, geometry.head_dim)
        return limits.seconds(
            lambda: kernels.attention(q, spec=spec, plan=plan), rounds=self.rounds, device=self.device
        )

    def _experts(self) -> Iterator[KernelResult]:
        e = EXPERTS
        up, down = (
            tuple(DenseMatrix(self._random(out, size) * 0.02) for _ in range(e.experts))
            for out, size in ((2 * e.inner, e.hidden), (e.hidden, e.inner))
        )
        packed = self.kernels.pack_experts(ExpertMatrices(up, down))
        weight_bytes = 3 * e.experts * e.hidden * e.inner * 2
        for rows in e.rows:
            x = self._random(rows, e.hidden)
            weights, chosen = torch.rand(rows, e.experts, device=self.device).topk(e.choices)
            taken_s = self._each(
                lambda _, x=x, w=weights, c=chosen: self.kernels.experts(x, packed, c, w, "silu"), 1
            )
            flops = 6 * rows * e.choices * e.hidden * e.inner
            case = f"{rows} rows, {e.choices} of {e.experts}, {e.hidden}→{e.inner}"
            yield self._result("experts", case, taken_s, weight_bytes, flops, None)

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
