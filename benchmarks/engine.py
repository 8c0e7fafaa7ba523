"""Measures the engine alone against the machine's own speed: bare matrix products and memory reads.

There is one process and one model, steps are made by hand (no scheduler, no network), and everything is timed
in turn within one run, so that ratios hold on a busy machine.
"""

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from baton.config import EngineConfig, ModelConfig
from baton.core.geometry import STORED_BYTES
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from benchmarks import limits
from benchmarks.kernels import fill_with_numbers
from benchmarks.transformers_prefill import transformers_prefill
from engine.execution.executor import Executor
from engine.execution.tracing import SizedTrace, StepTrace

MODEL_CALLS = ("linear", "gated_linear", "logits", "experts", "attention")
"""Calls that count as the model's own work; everything else is overhead."""


class EngineResult(msgspec.Struct, frozen=True):
    """The result of one way to run the model. Seconds are medians."""

    threads: int
    quantization: str
    kernels: str
    read_bytes_per_s: float
    prefill_tokens: int
    prefill_s: float
    bare_matmul_s: float
    """The same matrices times as many random rows, by torch alone."""
    bare_dtype: str
    """The number type of those products: bfloat16, or float32 where that is faster, as it is on processors
    without instructions for bfloat16."""
    decode_s: dict[int, float]
    """Seconds of one step, by batch size."""
    decode_bytes: dict[int, int]
    """Bytes that a step must read: the weights once, and the KV of all its sequences."""
    overhead_share: dict[int, float]
    """Share of a step outside matrix products, experts and attention, by batch size. Of a step that is
    replayed it is what is outside of all kernels."""
    context_tokens: int
    transformers_s: float | None = None
    """The same prompt by transformers, on as many threads."""

    @property
    def matmul_ratio(self) -> float:
        return self.bare_matmul_s / self.prefill_s

    def bandwidth_ratio(self, batch: int) -> float:
        return self.decode_bytes[batch] / self.decode_s[batch] / self.read_bytes_per_s


class Sizes(msgspec.Struct, frozen=True):
    prefill_tokens: int = 512
    context_tokens: int = 512
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 15
    transformers_dtype: str = ""
    """The number type in which transformers computes the prompt as well, in turn; empty: it does not."""


def measure(
    model: ModelConfig, engine: EngineConfig, sizes: Sizes, *, progress: Callable[[str], None]
) -> EngineResult:
    """Measure the model. Raises SetupError as `Executor.load` does, and if transformers cannot load it."""
    torch.set_num_threads(engine.threads or torch.get_num_threads())
    progress(f"loading {model.path} ({engine.threads} threads, {model.quantization})")
    executor = Executor.load(model, engine)
    try:
        steps = StepPlans(executor)
        reads = limits.read_bandwidth(executor.kv.device)
        shapes = _shapes(executor)
        prompt = steps.prompt(sizes.prefill_tokens)
        dtype = sizes.transformers_dtype
        others = [transformers_prefill(Path(model.path), prompt, dtype)] if dtype else []
        bare_dtype, bare = bare_products(shapes, sizes.prefill_tokens)
        prefill_s, bare_s, *others_s = _in_turn(
            sizes.rounds,
            lambda: steps.prefill(sizes.prefill_tokens),
            bare,
            *others,
        )
        decode_s = {b: _decode(steps, b, sizes) for b in sizes.batches}
        overhead = {b: _overhead(executor, steps, b, sizes) for b in sizes.batches}
        weight_bytes = _weight_bytes(shapes, model, executor)
        kv_bytes = executor.geometry.block_bytes // executor.geometry.block_tokens * sizes.context_tokens
        return EngineResult(
            threads=engine.threads,
            quantization=model.quantization,
            kernels=type(executor.kernels).__name__,
            read_bytes_per_s=reads,
            prefill_tokens=sizes.prefill_tokens,
            prefill_s=prefill_s,
            bare_matmul_s=bare_s,
            bare_dtype=bare_dtype,
            decode_s=decode_s,
            decode_bytes={b: weight_bytes + b * kv_bytes for b in sizes.batches},
            overhead_share=overhead,
            context_tokens=sizes.context_tokens,
            transformers_s=others_s[0] if others_s else None,
        )
    finally:
        executor.close()


class StepPlans:
    """Step plans with blocks of their own; their results are thrown away."""

    def __init__(self, executor: Executor) -> None:
        """Overwrites the executor's whole KV pool."""
        self._executor = executor
        self._number = 0
        fill_with_numbers(executor.kv)

    def prefill(self, tokens: int) -> float:
        return self._run(self.prefill_plan(tokens))

    def decode(self, batch: int, context: int) -> float:
        """A step with one token for each of `batch` sequences that have `context - 1` tokens already."""
        return self._run(self.decode_plan(batch, context))

    def prefill_plan(self, tokens: int) -> StepPlan:
        blocks = tuple(range(self._executor.geometry.blocks_for(tokens)))
        return self._plan([self._item(0, self.prompt(tokens), 0, blocks)])

    def decode_plan(self, batch: int, context: int) -> StepPlan:
        per_sequence = self._executor.geometry.blocks_for(context)
        items = [
            self._item(i, (7,), context - 1, tuple(range(i * per_sequence, (i + 1) * per_sequence)))
            for i in range(batch)
        ]
        return self._plan(items)

    def _plan(self, items: Sequence[StepItem]) -> StepPlan:
        self._number += 1
        return StepPlan(tuple(items), self._number)

    def _run(self, plan: StepPlan) -> float:
        started_s = time.perf_counter()
        self._executor.execute(plan)
        return time.perf_counter() - started_s

    def prompt(self, count: int) -> tuple[int, ...]:
        return tuple((i * 7919 + 11) % self._executor.vocab_size for i in range(count))

    def _item(self, number: int, tokens: tuple[int, ...], first: int, blocks: tuple[int, ...]) -> StepItem:
        return StepItem(
            key=SeqKey(SequenceId(f"bench/{number}"), 0),
            tokens=tokens,
            first_position=first,
            block_ids=blocks,
            sample_index=0,
            sampling=SamplingParams(max_tokens=1),
        )


def _in_turn(rounds: int, *calls: Callable[[], float]) -> tuple[float, ...]:
    """Medians of calls that take turns, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, seen in zip(calls, times, strict=True):
            seconds = call()
            if number:
                seen.append(seconds)
    return tuple(statistics.median(seen) for seen in times)


def _decode(steps: StepPlans, batch: int, sizes: Sizes) -> float:
    return _in_turn(4 * sizes.rounds, lambda: steps.decode(batch, sizes.context_tokens))[0]


Shapes = list[tuple[int, int, bool]]
"""(out, in, whether all rows pass through it: the head sees one only)."""


def _shapes(executor: Executor) -> Shapes:
    spec = executor.spec
    q_size, kv_size = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layer = [(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)]
    every = [(out, size, True) for _ in range(spec.layer_count) for out, size in layer]
    return [*every, (spec.vocab_size, hidden, False)]


def bare_products(shapes: Shapes, rows: int) -> tuple[str, Callable[[], float]]:
    """Return the products by torch in the number type in which this processor is faster, and its name. A
    layer's first product decides."""

    def first_s(dtype: str) -> float:
        call = _bare_in(dtype, shapes[:1], rows)
        return min(call() for _ in range(3))

    fastest = min(("bfloat16", "float32"), key=first_s)
    return fastest, _bare_in(fastest, shapes, rows)


def _bare_in(dtype: str, shapes: Shapes, rows: int) -> Callable[[], float]:
    kind: torch.dtype = getattr(torch, dtype)
    weights = [torch.randn(out, size).to(kind) * 0.02 for out, size, _ in shapes]
    inputs = {size: torch.randn(rows, size).to(kind) for _, size, _ in shapes}

    def run() -> float:
        started_s = time.perf_counter()
        for (_, size, all_rows), weight in zip(shapes, weights, strict=True):
            F.linear(inputs[size] if all_rows else inputs[size][:1], weight)
        return time.perf_counter() - started_s

    return run


def _weight_bytes(shapes: Shapes, model: ModelConfig, executor: Executor) -> int:
    if model.path.endswith(".gguf"):
        return Path(model.path).stat().st_size  # its weights stay as they are
    bits = {"int8": 8.0, "w8a8": 8.0, "fp8": 8.0, "int4": 4.25}.get(
        model.quantization, 8.0 * STORED_BYTES[executor.geometry.dtype]
    )
    return int(sum(out * size for out, size, _ in shapes) * bits / 8)


def _overhead(executor: Executor, steps: StepPlans, batch: int, sizes: Sizes) -> float:
    shares: list[float] = []
    with _timed(executor.kernels) as spent:
        for _ in range(2 * sizes.rounds):
            spent[0] = 0.0
            whole_s = steps.decode(batch, sizes.context_tokens)
            shares.append(1 - spent[0] / whole_s)
    return statistics.median(shares)


@contextmanager
def _timed(kernels: Any) -> Generator[list[float]]:
    """Add up the seconds in the kernels' model calls and in replays of them, in the list's only entry."""
    spent = [0.0]
    depth = [0]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:  # these calls may be nested
                    spent[0] += time.perf_counter() - started_s

        return timed

    wrapped = [name for name in MODEL_CALLS if hasattr(kernels, name)]
    whole, sized = StepTrace.replay, SizedTrace.replay
    for name in wrapped:
        setattr(kernels, name, wrap(getattr(kernels, name)))
    StepTrace.replay, SizedTrace.replay = wrap(whole), wrap(sized)
    try:
        yield spent
    finally:
        StepTrace.replay, SizedTrace.replay = whole, sized
        for name in wrapped:
            delattr(kernels, name)
