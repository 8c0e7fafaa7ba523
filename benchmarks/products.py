"""Products of each kind of weights at each number of rows, beside bf16 and beside torch's, in one process.

What is timed in a round are the products of a layer (q, k, v; attention output; gate and up; down) or of
the head, by every kind in turn, so that a ratio compares calls that are milliseconds apart. One thread is
timed by the processor time of the calling thread, which other work on the machine lengthens less; several
by the clock.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.geometry import KVGeometry
from engine.kernels.native import NativeKernels
from engine.kernels.native_matrices import NativeMatrix
from engine.kernels.weights import DenseMatrix, IntMatrix, Matrix
from engine.kv.pool import KVPool
from engine.quant.round import group_size_for

KINDS = ("bf16", "int8", "int4", "w8a8", "q8_0", "q4_1")
"""bfloat16, what `model.quantization` makes, and two formats of GGUF files."""
_BLOCK = 32
"""Inputs of a block of a GGUF file that share a scale."""
ROWS = (1, 4, 8, 16, 32, 64, 256)
CACHE_BYTES = 96 << 20
"""Weights of one kind fill this many bytes, so that a model's come from memory as they do in a step."""
COPIES_MAX = 32
SECONDS_MIN = 2e-3
"""A sample takes at least this long: calls are repeated."""


class ProductShape(msgspec.Struct, frozen=True):
    """[in, out] of the products, by what they are part of."""

    name: str
    products: tuple[tuple[int, int], ...]


def layer_shape(name: str, *, hidden: int, heads: int, kv_heads: int, inner: int) -> ProductShape:
    head_dim = hidden // heads
    return ProductShape(
        name,
        (
            (hidden, (heads + 2 * kv_heads) * head_dim),
            (hidden, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        ),
    )


SHAPES = (
    layer_shape("SmolLM2-135M, a layer", hidden=576, heads=9, kv_heads=3, inner=1536),
    ProductShape("SmolLM2-135M, the head", ((576, 49152),)),
    layer_shape("Llama 1B, a layer", hidden=2048, heads=32, kv_heads=8, inner=8192),
)


class ProductResult(msgspec.Struct, frozen=True):
    shape: str
    rows: int
    bf16_seconds: float
    """Median of the rounds."""
    faster_than_bf16: dict[str, float]
    """bf16's seconds by the kind's, median of the rounds' ratios."""
    faster_than_torch: dict[str, float]
    """The seconds of torch's bf16 product by the kind's."""


class ProductBench:
    """Raises NativeUnavailable."""

    def __init__(self, *, threads: int, rounds: int) -> None:
        self._rounds = rounds
        pool = KVPool(KVGeometry(1, 1, 8, 4, "bfloat16"), kv_bytes=1 << 16, device=torch.device("cpu"))
        self.kernels = NativeKernels(pool, threads=threads)
        torch.set_num_threads(threads)
        self._clock = time.thread_time if threads == 1 else time.perf_counter

    def run(self, shapes: tuple[ProductShape, ...], rows: tuple[int, ...]) -> Iterator[ProductResult]:
        for shape in shapes:
            byte_count = 2 * sum(size * out for size, out in shape.products)
            copies = max(1, min(COPIES_MAX, CACHE_BYTES * 2 // byte_count))
            dense = [[_dense(size, out) for size, out in shape.products] for _ in range(copies)]
            packed = {
                kind: [[self.kernels.pack(_of_kind(kind, matrix)) for matrix in layer] for layer in dense]
                for kind in KINDS
            }
            for count in rows:
                yield self._measure(shape, count, dense, packed)
            del dense, packed
            gc.collect()

    def _measure(
        self,
        shape: ProductShape,
        rows: int,
        dense: list[list[DenseMatrix]],
        packed: dict[str, list[list[NativeMatrix]]],
    ) -> ProductResult:
        inputs = {size: torch.randn(rows, size).to(torch.bfloat16) for size, _ in shape.products}
        calls: dict[str, Callable[[int], None]] = {"torch": lambda i: _by_torch(inputs, dense[i])}
        for kind, layers in packed.items():
            calls[kind] = lambda i, layers=layers: self._by_ours(inputs, layers[i])
        times = self._times(calls, len(dense))
        base = times["bf16"]
        return ProductResult(
            shape=shape.name,
            rows=rows,
            bf16_seconds=statistics.median(base),
            faster_than_bf16={kind: _ratio(base, times[kind]) for kind in KINDS},
            faster_than_torch={kind: _ratio(times["torch"], times[kind]) for kind in KINDS},
        )

    def _times(self, calls: dict[str, Callable[[int], None]], copies: int) -> dict[str, list[float]]:
        """Seconds of a call, by kind and round; the first round does not count."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self._rounds + 1):
            for name, call in calls.items():
                begun_s, done = self._clock(), 0
                while done < copies or self._clock() - begun_s < SECONDS_MIN:
                    call(done % copies)
                    done += 1
                if number:
                    found[name].append((self._clock() - begun_s) / done)
        return found

    def _by_ours(self, inputs: dict[int, Tensor], layer: list[NativeMatrix]) -> None:
        for matrix in layer:
            self.kernels.linear(inputs[matrix.in_size], matrix)


def _by_torch(inputs: dict[int, Tensor], layer: list[DenseMatrix]) -> None:
    for matrix in layer:
        F.linear(inputs[matrix.weight.shape[1]], matrix.weight)


def _ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


def _dense(in_size: int, out_size: int) -> DenseMatrix:
    return DenseMatrix((torch.randn(out_size, in_size) * 0.02).to(torch.bfloat16))


def _of_kind(kind: str, matrix: DenseMatrix) -> Matrix:
    """Integers of the right kind and size; which they are does not change the time."""
    if kind == "bf16":
        return matrix
    out_size, in_size = matrix.weight.shape
    bits = 4 if kind in ("int4", "q4_1") else 8
    group = _BLOCK if kind.startswith("q") else group_size_for(in_size) if kind == "int4" else 0
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    values = torch.randint(low, high, (out_size, in_size), dtype=torch.int8)
    scales = torch.rand(out_size, in_size // group if group else 1)
    found = IntMatrix(bits, values, scales, scales - 0.5 if kind == "q4_1" else None, group)
    return replace(found, activation_bits=8) if kind == "w8a8" else found
