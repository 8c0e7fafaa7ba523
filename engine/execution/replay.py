"""Decode steps on the CPU without the Python of the layers: the counterpart of `graphs` for the native kernels.

The first step of a batch size is computed as it is, then once more while it is recorded, then replayed; if the
three do not agree to the last bit, the size is never replayed. Later steps of that size write their numbers
where the recording reads them and replay it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.execution.decode_inputs import DecodeInputs
from engine.execution.graphs import CapturableModel, DecodeGraphs, is_capturable, make_graphs
from engine.execution.rope_rows import RopeRows
from engine.execution.step_buffers import StepBuffers
from engine.execution.tracing import Trace, trace
from engine.kernels.interface import BatchLayout
from engine.kernels.native import NativeKernels
from engine.kv.pool import KVPool
from engine.models.linear import StepContext
from engine.native.recording import NotRecordable

log = logging.getLogger(__name__)

_BYTES_MAX = 64 * 2**20
"""Memory of all recordings together, results between kernels included."""
_SHARING_MAX, _BLOCKS_MAX = 4, 2**20
"""Block ids that a step has room for: so many times the pool's blocks, since sequences share prefixes."""

Forward = Callable[[Tensor, BatchLayout, Tensor], Tensor]


def make_recorder(
    model: object, kernels: object, pool: KVPool, *, sequences_max: int, positions_max: int
) -> "DecodeGraphs | DecodeReplay | None":
    """What records decode steps on this device; None: nothing does, for this model or with these kernels."""
    if pool.device.type != "cpu":
        return make_graphs(model, kernels, pool, sequences_max=sequences_max)
    if not sequences_max or not isinstance(model, CapturableModel) or not isinstance(kernels, NativeKernels):
        return None
    return DecodeReplay(model, kernels, pool, sequences_max=sequences_max, positions_max=positions_max)


class DecodeReplay:
    """Owned by the thread that computes. Weights stay where they are while it lives."""

    def __init__(
        self,
        model: CapturableModel,
        kernels: NativeKernels,
        pool: KVPool,
        *,
        sequences_max: int,
        positions_max: int,
    ) -> None:
        """positions_max: of the longest sequence."""
        self._model, self._kernels = model, kernels
        self._sequences_max = sequences_max
        self._inputs = DecodeInputs(
            sequences_max=sequences_max,
            blocks_max=min(_BLOCKS_MAX, _SHARING_MAX * pool.block_count),
            block_tokens=pool.geometry.block_tokens,
            pool_blocks=pool.block_count,
            ropes=RopeRows(model.ropes, positions_max),
        )
        self._buffers = StepBuffers(_BYTES_MAX)
        self._traces: dict[int, Trace | None] = {}
        """Recordings by batch size; None: it could not be recorded."""
        self._trace_bytes = 0
        self.replayed_count = 0
        """Steps since the start that were replayed."""

    @property
    def recorded(self) -> dict[int, Trace]:
        """Recordings by batch size."""
        return {size: made for size, made in self._traces.items() if made is not None}

    def run(self, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
        """Final hidden states of every sequence, [n, hidden], valid until the next call; None: this step
        is none that is replayed. tokens: int64 [n] that the model has. Raises IndexError, see
        `DecodeInputs.fill`."""
        count = len(layout.spans)
        if not 0 < count <= self._sequences_max or not is_capturable(layout):
            return None
        if count not in self._traces:
            return self._first(tokens, layout)
        made = self._traces[count]
        if made is None or not self._inputs.fill(tokens.tolist(), layout.spans):
            return None
        self._replay(count, made)
        return made.result

    def _replay(self, count: int, made: Trace) -> None:
        try:
            made.replay()
        except NotRecordable:
            self._traces[count] = None
            log.exception("a recorded step of %d sequences failed", count)
            raise
        self.replayed_count += 1

    def _first(self, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
        """Record the batch size, and return the step's result as it is without a recording."""
        count = len(layout.spans)
        self._traces[count] = None
        rows = torch.arange(count)
        expected = self._model.forward(tokens, layout, rows)
        if not self._inputs.fill(tokens.tolist(), layout.spans):
            del self._traces[count]  # a smaller one may come
            return expected
        try:
            made = self._record(count)
            made.replay(with_effects=False)
        except NotRecordable as reason:
            log.info("decode steps of %d sequences are not recorded: %s", count, reason)
            return expected
        if not torch.equal(_bits(made.result), _bits(expected)):
            log.error("a replay of %d sequences gives another result: they are not replayed", count)
            return expected
        if self._trace_bytes + made.memory_bytes + self._buffers.memory_bytes > _BYTES_MAX:
            log.info("decode steps of %d sequences are not recorded: too much memory", count)
            return expected
        self._trace_bytes += made.memory_bytes
        self._traces[count] = made
        log.info(
            "recorded decode steps of %d sequences: %d kernels, %d calls of torch",
            *(count, made.native_calls, made.torch_calls),
        )
        return expected

    def _record(self, count: int) -> Trace:
        inputs = self._inputs
        plan: Any = self._kernels.decode_plan(inputs.spans[:count], inputs.tables, inputs.ropes(count))
        tokens = inputs.tokens[:count]
        return trace(lambda: self._model.compute(tokens, StepContext(plan), None), self._buffers)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)
