"""A loaded worker measures its own steps, or takes what it measured at an earlier start."""

import torch

from engine.execution.cached_timings import CachedTimings
from engine.execution.executor import Executor
from engine.execution.self_timing import Measured, execute_together, time_steps
from engine.kernels.beside_torch import notes_beside_torch
from engine.kernels.native import NativeKernels

TIMED_BYTES_MAX = 64 * 2**20
"""Largest part of the KV pool, in bytes, that a worker writes to when it times itself."""


def time_executor(executor: Executor, budget_s: float, *, uses_cache: bool = True) -> Measured:
    """Measure the costs of steps of several shapes, see `time_steps`, and note how the kernels compare with
    torch's. Call it before any block holds anything. uses_cache: whether what an earlier start measured is
    taken where it still holds, and what is measured is kept."""
    cached = CachedTimings(_facts(executor)) if uses_cache and executor.is_alone else None
    earlier = cached.read() if cached is not None else []
    measured = _measure(executor, budget_s, earlier)
    executor.forget_expert_counts()
    executor.notes = (*executor.notes, *notes_beside_torch(executor.kernels))
    # A busy machine leaves time for few shapes, which say less than those of a quiet one.
    if cached is not None and len(measured) >= len(earlier):
        cached.write(measured)
    return measured


def _measure(executor: Executor, budget_s: float, earlier: Measured) -> Measured:
    geometry, engine = executor.geometry, executor.config
    blocks = min(executor.kv.block_count, max(1, TIMED_BYTES_MAX // geometry.block_bytes))
    for block in range(blocks):
        executor.kv.clear(block)  # memory that was never written is faster than any that is used
    return time_steps(
        lambda plans: execute_together(executor, plans),
        stages=executor.stage_count,
        block_tokens=geometry.block_tokens,
        block_count=blocks,
        step_tokens_max=engine.step_tokens_max,
        batch_sequences_max=engine.batch_sequences_max,
        positions_max=executor.max_model_tokens - 1,
        vocab=executor.vocab_size,
        drafts=0 if engine.speculation == "off" else engine.speculation_tokens_max,
        earlier=earlier,
        budget_s=budget_s,
    )


def _facts(executor: Executor) -> tuple[object, ...]:
    """Return what the times of steps depend on. The fingerprint covers weights, their format and KV."""
    engine, kernels = executor.config, executor.kernels
    classes = (kernels.features, kernels.thread_count) if isinstance(kernels, NativeKernels) else ()
    return (
        executor.fingerprint,
        (type(kernels).__name__, *classes, _device_name(executor.kv.device)),
        (
            engine.step_tokens_max,
            engine.batch_sequences_max,
            engine.graph_sequences_max,
            executor.max_model_tokens,
        ),
        (engine.speculation, engine.speculation_tokens_max, engine.self_timing_s),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
