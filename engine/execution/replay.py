"""Decode steps on the CPU without the Python of the layers: what `graphs` is on a GPU.

The first step is computed as it is. Then the calls of steps of a few sizes are taken down without being made,
which tells them for all sizes (`engine.native.sized_replay`), and this step's are made; if the results do not
agree to the last bit, no step is replayed so. Models that need torch between their kernels are recorded for
each batch size by itself: its first step is computed once more for that. Later steps write their numbers to
where the recording reads them and replay it.

Tensor ranks record alike: each takes its own calls down, sums and gathers over the ranks among them. They
agree on every recording before any of them replays it.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN, StepItem
from engine.execution.decode_inputs import DecodeInputs, table_blocks_max
from engine.execution.graphs import (
    CapturableModel,
    DecodeGraphs,
    is_capturable,
    make_graphs,
    recorded_sequences,
)
from engine.execution.ranks import Ranks
from engine.execution.rope_rows import RopeRows
from engine.execution.step_buffers import LargestStepBuffers, StepBuffers
from engine.execution.tracing import SizedTrace, StepTrace, TraceOfRows, same_bits, trace, trace_sizes
from engine.kernels.interface import BatchLayout, Span
from engine.kernels.native import NativeKernels
from engine.kv.pool import KVPool
from engine.loading.load import LoadedModel
from engine.models.linear import StepContext
from engine.native.library import library
from engine.native.recording import NotRecordable
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.sampling.choose import Draw, choose
from engine.sampling.state import needs_state

log = logging.getLogger(__name__)

_BYTES_MAX = 64 * 2**20
"""Memory of all recordings together, results between kernels included."""
_SIZES_MIN = 4
"""Recordings of different sizes need so many sequences."""


def make_recorder(
    loaded: LoadedModel, engine: EngineConfig, ranks: Ranks | None = None
) -> "DecodeGraphs | DecodeReplay | None":
    """What records decode steps on this device; None: nothing does, for this model, these kernels or this
    shape. Ranks of one worker have recorders, or none of them has."""
    model, kernels, pool = loaded.model, loaded.kernels, loaded.kv
    group: SharedMemoryGroup | None = None
    if ranks is not None and not ranks.is_staged and isinstance(ranks.tensor, SharedMemoryGroup):
        group = ranks.tensor if ranks.context is None else None
    if loaded.has_remote_experts or not (group or (ranks is None and loaded.division.is_whole)):
        # Rows go to other processes, tokens are divided, or collectives are not the library's.
        return None
    # Each rank finds by itself whether it streams weights, and ranks agree later.
    sequences_max = recorded_sequences(engine, loaded.floor_s if group is None else 0.0)
    if pool.device.type != "cpu":
        return make_graphs(model, kernels, pool, sequences_max=sequences_max)
    if not sequences_max or not isinstance(model, CapturableModel) or not isinstance(kernels, NativeKernels):
        return None
    return DecodeReplay(
        *(model, kernels, pool),
        sequences_max=sequences_max,
        positions_max=loaded.context_tokens,
        vocab_size=loaded.spec.vocab_size,
        group=group,
        may_record=not loaded.floor_s,
    )


@cache
def _argmax() -> Any:
    function = library().raw("baton_argmax")
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    return function


_Trace = StepTrace | TraceOfRows


@dataclass(frozen=True, slots=True)
class _RecordedSize:
    forward: _Trace
    """Its result is the final hidden states, [n, hidden]."""
    head: _Trace
    """Its result is their logits, float32 [n, vocab]."""

    @property
    def memory_bytes(self) -> int:
        return self.forward.memory_bytes + self.head.memory_bytes

    @property
    def torch_calls(self) -> int:
        return self.forward.torch_calls + self.head.torch_calls


@dataclass(frozen=True, slots=True)
class _AllSizes:
    """Recordings of all batch sizes up to the largest."""

    forward: SizedTrace
    head: SizedTrace
    sequences_max: int

    @property
    def memory_bytes(self) -> int:
        return self.forward.memory_bytes + self.head.memory_bytes

    def of(self, count: int) -> _RecordedSize:
        return _RecordedSize(TraceOfRows(self.forward, count), TraceOfRows(self.head, count))


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
        vocab_size: int,
        group: SharedMemoryGroup | None = None,
        may_record: bool = True,
    ) -> None:
        """positions_max: of the longest sequence. group: the tensor ranks, if there are others. may_record:
        False where weights are streamed, so that no rank of the group replays."""
        self._model, self._kernels, self._group = model, kernels, group
        self._may_record = may_record
        self._sequences_max, self._block_tokens = sequences_max, pool.geometry.block_tokens
        self._vocab_size = vocab_size
        self.ropes = RopeRows(model.ropes, positions_max)
        self._inputs = DecodeInputs(
            sequences_max=sequences_max,
            blocks_max=table_blocks_max(pool.block_count),
            block_tokens=pool.geometry.block_tokens,
            pool_blocks=pool.block_count,
            ropes=self.ropes,
        )
        self._buffers = StepBuffers(_BYTES_MAX)
        self._recorded: dict[int, _RecordedSize | None] = {}
        """Recordings by batch size; None: it could not be recorded."""
        self._tries_all_sizes = may_record
        self._sizes: _AllSizes | None = None
        """All sizes that there is memory for, until one of them has been compared."""
        self._trace_bytes = 0
        self._chosen = torch.zeros(sequences_max, dtype=torch.int64)
        self._params: dict[SeqKey, tuple[SamplingParams, bool]] = {}
        """Sampling of the sequences of the step before, and whether it is plain."""
        self.replayed_count = 0
        """Steps since the start that were replayed."""

    @property
    def is_alone(self) -> bool:
        """Whether one process has the model and its weights stay in memory."""
        return self._group is None and self._may_record

    @property
    def recorded(self) -> dict[int, tuple[int, int]]:
        """Calls of kernels and of torch that a step makes, by batch size."""
        return {
            size: (made.forward.native_calls + made.head.native_calls, made.torch_calls)
            for size, made in self._recorded.items()
            if made is not None
        }

    def run(self, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
        """Final hidden states of every sequence, [n, hidden], valid until the next call; None: this step
        is none that is replayed. tokens: int64 [n] that the model has. Raises IndexError, see
        `DecodeInputs.fill`."""
        count = len(layout.spans)
        if not 0 < count <= self._sequences_max or not is_capturable(layout):
            return None
        if count not in self._recorded:
            return self._first(tokens, layout)
        made, numbers = self._recorded[count], tokens.tolist()
        if made is None or not self._has(numbers) or not self._inputs.fill(numbers, layout.spans):
            return None
        self._replay(count, made.forward)
        return made.forward.result

    def sample(
        self,
        items: Sequence[StepItem],
        last_sampled: Callable[[SeqKey], int],
        clear: Callable[[StepItem], None],
        *,
        chooses: bool = True,
    ) -> list[int] | None:
        """The next token of every item, if all are decodes that sample by temperature and filters alone and
        their batch size is recorded; else None, and nothing has changed. clear: is told every item before
        its KV is written. chooses: False at a rank that has only its part of the logits; it gets no tokens.
        Raises IndexError, see `DecodeInputs.fill`, and GroupBroken."""
        made = self._recorded.get(len(items))
        if made is None or not all(self._is_plain(item) for item in items):
            return None
        tokens = [last_sampled(i.key) if i.tokens[0] == PENDING_TOKEN else i.tokens[0] for i in items]
        if not self._has(tokens):
            return None
        if not self._inputs.fill(tokens, [self._span(item) for item in items]):
            return None
        for item in items:
            clear(item)
        self._params = {item.key: (item.sampling, True) for item in items}
        self._replay(len(items), made.forward, made.head)
        return self._choose(items, made.head.result) if chooses else []

    def _has(self, tokens: Sequence[int]) -> bool:
        """Whether the model has these tokens. The steps of others say what is wrong with them."""
        return min(tokens) >= 0 and max(tokens) < self._vocab_size

    def _is_plain(self, item: StepItem) -> bool:
        if len(item.tokens) != 1 or item.sample_index is None or item.adapter or item.wants_embedding:
            return False
        known = self._params.get(item.key)
        if known is not None and known[0] is item.sampling:
            return known[1]
        params = item.sampling
        return params.logprobs is None and params.prompt_logprobs is None and not needs_state(params)

    def _span(self, item: StepItem) -> Span:
        needed = item.first_position // self._block_tokens + 1
        ids = item.block_ids
        return Span(item.first_position, 1, ids if len(ids) == needed else ids[:needed])

    def _choose(self, items: Sequence[StepItem], logits: Tensor) -> list[int]:
        if all(item.sampling.is_greedy for item in items):
            _argmax()(logits.data_ptr(), len(items), logits.shape[1], self._chosen.data_ptr())
            return self._chosen[: len(items)].tolist()
        with torch.inference_mode():
            return choose(logits, [Draw(item.sampling, item.sample_index or 0) for item in items])

    def _replay(self, count: int, *parts: _Trace) -> None:
        try:
            self._play(*parts)
        except NotRecordable:
            self._recorded[count] = None
            log.exception("a recorded step of %d sequences failed", count)
            raise
        self.replayed_count += 1

    def _play(self, *parts: _Trace, with_effects: bool = True) -> None:
        def play() -> None:
            for part in parts:
                part.replay(with_effects=with_effects)

        if self._group is None:
            play()
        else:
            self._group.replay(play)

    def _all(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        if self._group is None:
            return holds
        return not self._group.all_reduce_(torch.tensor([float(not holds)])).item()

    def _first(self, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
        """Record the batch size, and return the step's result as it is without a recording."""
        count = len(layout.spans)
        self._recorded[count] = None
        expected = self._model.forward(tokens, layout, torch.arange(count))
        if not self._inputs.fill(tokens.tolist(), layout.spans):
            del self._recorded[count]  # a smaller one may come
            return expected
        sizes = self._find_all_sizes()
        if sizes is not None and count <= sizes.sequences_max:
            found = {n: sizes.of(n) for n in range(1, sizes.sequences_max + 1)}
            self._sizes = None
        else:
            found = {count: self._recordable(count)}
        made, is_same = found[count], False
        if self._all(made is not None):
            assert made is not None
            is_same = self._gives(made, expected, count)
        if not self._all(is_same):
            # A rank that records sums nothing, so what it has written is of no use.
            return expected if self._group is None else self._again(tokens, layout)
        assert made is not None
        self._trace_bytes += made.memory_bytes
        self._recorded.update(found)
        kernels, others = self.recorded[count]
        log.info(
            "recorded decode steps of %s sequences: %d kernels, %d calls of torch",
            *(f"1 to {len(found)}" if len(found) > 1 else count, kernels, others),
        )
        return expected

    def _find_all_sizes(self) -> _AllSizes | None:
        """Recordings of all sizes, where steps of a few tell those of all others."""
        most, why_not = self._sequences_max, ""
        while self._tries_all_sizes and self._sizes is None and most >= _SIZES_MIN:
            try:
                made = self._record_all_sizes(most)
            except NotRecordable as reason:
                made, why_not = None, str(reason)
            if self._all(made is not None):
                self._sizes = made
            most //= 2  # there was no memory for results of so many
        if why_not and self._sizes is None:
            log.info("decode steps are recorded one batch size at a time: %s", why_not)
        self._tries_all_sizes = False
        return self._sizes

    def _record_all_sizes(self, most: int) -> _AllSizes:
        """Raises NotRecordable."""
        sizes = ((most,), (most // 2,), (1,))
        buffers, more = LargestStepBuffers(_BYTES_MAX), LargestStepBuffers(_BYTES_MAX)
        forward = trace_sizes(self._compute, sizes, buffers)

        def logits(count: int) -> Tensor:
            return self._model.logits(forward.result[:count])

        head = trace_sizes(logits, sizes, more)
        made = _AllSizes(forward, head, most)
        self._check_memory(made.memory_bytes)
        return made

    def _check_memory(self, more_bytes: int) -> None:
        """Raises NotRecordable: it is too much."""
        waiting_bytes = 0 if self._sizes is None else self._sizes.memory_bytes
        if self._trace_bytes + waiting_bytes + more_bytes + self._buffers.memory_bytes > _BYTES_MAX:
            raise NotRecordable(f"recordings take more than {_BYTES_MAX} bytes")

    def _again(self, tokens: Tensor, layout: BatchLayout) -> Tensor:
        """Compute a step once more, without counting its experts again."""
        counts = self._model.expert_counts
        counted = counts.take() if counts is not None else None
        hidden = self._model.forward(tokens, layout, torch.arange(len(layout.spans)))
        if counts is not None and counted is not None:
            counts.reset()
            counts.put(counted)
        return hidden

    def _gives(self, made: _RecordedSize, expected: Tensor, count: int) -> bool:
        """Whether a recording gives these hidden states and their logits, to the last bit."""
        try:
            self._play(made.forward, made.head, with_effects=False)
        except NotRecordable as reason:
            if self._group is not None:
                raise  # other ranks wait in the midst of it
            log.info("decode steps of %d sequences are not recorded: %s", count, reason)
            return False
        logits = self._model.logits(expected)
        if same_bits(made.forward.result, expected) and same_bits(made.head.result, logits):
            return True
        log.error("a replay of %d sequences gives another result: they are not replayed", count)
        return False

    def _recordable(self, count: int) -> _RecordedSize | None:
        """Record a batch size, or say in the log why not."""
        if not self._may_record:
            return None
        try:
            forward = trace(lambda: self._compute(count), self._buffers)
            made = _RecordedSize(forward, trace(lambda: self._model.logits(forward.result), self._buffers))
            self._check_memory(made.memory_bytes)
        except NotRecordable as reason:
            log.info("decode steps of %d sequences are not recorded: %s", count, reason)
            return None
        return made

    def _compute(self, count: int) -> Tensor:
        inputs = self._inputs
        plan: Any = self._kernels.plan_of(inputs.spans, inputs.tables, inputs.ropes(count), count, count)
        return self._model.compute(inputs.tokens[:count], StepContext(plan), None)
