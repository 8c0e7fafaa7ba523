"""Decode steps as CUDA graphs: one launch instead of several hundred.

A step of a few sequences takes the device less time than the host needs to launch its kernels. Such a step is
recorded once per batch size of a ladder, and then replayed with new numbers in the same memory: tokens,
positions and the kernels' plan are copied into static buffers. A smaller batch is padded with sequences that
have no keys and write none.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.config import EngineConfig
from engine.kernels.interface import BatchLayout, RopeTables
from engine.kv.pool import KVPool
from engine.models.expert_counts import ExpertCounts
from engine.models.linear import StepContext

log = logging.getLogger(__name__)

_DENSE_UP_TO, _STEP = 8, 8
"""Rungs: powers of two up to the first, then every so many: padding wastes at most an eighth beyond 64, and
recording all takes seconds and little memory."""
_RUNGS_MAX = 48
_SHARING_MAX, _BLOCKS_MAX = 4, 2**21
"""Block ids that a recorded step has room for: so many times the pool's blocks, since sequences share
prefixes; at most 8 MiB."""

CapturedPlan = TypeVar("CapturedPlan", covariant=True)


class CapturableHostPlan(Protocol[CapturedPlan]):
    @property
    def ints(self) -> npt.NDArray[np.int32]:
        """All numbers of the plan."""
        ...

    def on_device(self, ints: Tensor, ropes: RopeTables) -> CapturedPlan: ...


@runtime_checkable
class CapturableKernels(Protocol):
    def host_plan(
        self, layout: BatchLayout, *, windows: frozenset[int], sequences: int = 0
    ) -> CapturableHostPlan[Any] | None:
        """sequences: the plan is of decodes and padded to so many. Such plans differ in numbers and in the
        length of their end only. None: not before a first step has run as it is."""
        ...


@runtime_checkable
class CapturableModel(Protocol):
    windows: frozenset[int]
    """Attention windows that occur in the model's layers."""
    expert_counts: ExpertCounts | None

    def ropes(self, positions: Tensor) -> RopeTables: ...

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor: ...

    def compute(self, tokens: Tensor, step: StepContext[Any], rows: Tensor | None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def ladder(sequences_max: int) -> tuple[int, ...]:
    """Batch sizes to record, ascending, at most `_RUNGS_MAX`; the last is `sequences_max` (0: none)."""
    if not sequences_max:
        return ()
    powers = [1 << i for i in range(_DENSE_UP_TO.bit_length()) if 1 << i < sequences_max]
    step = max(_STEP, -(-sequences_max // (_RUNGS_MAX - len(powers))))
    return (*powers, *range(_DENSE_UP_TO + step, sequences_max, step), sequences_max)


def rung_of(rungs: tuple[int, ...], count: int) -> int | None:
    """The smallest that holds `count` sequences."""
    return next((rung for rung in rungs if rung >= count), None)


def is_capturable(layout: BatchLayout) -> bool:
    """Only decodes, and none with an adapter: grouping tokens by adapter needs the host."""
    return all(span.token_count == 1 and span.adapter_slot < 0 for span in layout.spans)


@dataclass(frozen=True, slots=True)
class _Recorded:
    replay: Callable[[], None]
    hidden: Tensor
    """[rung, hidden], written by every replay."""


def recorded_sequences(engine: EngineConfig, floor_s: float) -> int:
    """The largest batch that is recorded. None is where weights are streamed, which `floor_s` tells: what a
    graph replays could not wait for copies that began in the step before."""
    return 0 if floor_s else min(engine.graph_sequences_max, engine.batch_sequences_max)


def make_graphs(model: object, kernels: object, pool: KVPool, *, sequences_max: int) -> "DecodeGraphs | None":
    """None: nothing is recorded on this device, with these kernels or for this model."""
    if pool.device.type != "cuda" or not sequences_max:
        return None
    if not isinstance(model, CapturableModel) or not isinstance(kernels, CapturableKernels):
        return None
    blocks_max = min(_BLOCKS_MAX, _SHARING_MAX * pool.block_count)
    return DecodeGraphs(
        model, kernels, sequences_max=sequences_max, blocks_max=blocks_max, device=pool.device
    )


class DecodeGraphs:
    """Owned by the thread that computes. The buffers are shared by all rungs: one graph runs at a time."""

    def __init__(
        self,
        model: CapturableModel,
        kernels: CapturableKernels,
        *,
        sequences_max: int,
        blocks_max: int,
        device: torch.device,
    ) -> None:
        """blocks_max: of all sequences of a captured step together; steps with more run as they are."""
        self._model, self._kernels, self._device = model, kernels, device
        self._rungs = ladder(sequences_max)
        self._blocks_max = blocks_max
        self._recorded: dict[int, _Recorded] = {}
        self._tokens = torch.zeros(sequences_max, dtype=torch.int64, device=device)
        self._positions = torch.zeros(sequences_max, dtype=torch.int64, device=device)
        self._is_token = torch.zeros(sequences_max, dtype=torch.int64, device=device)
        self._token_count = 0
        self._ints: Mapping[int, Tensor] = {}
        self._pool: Any = None
        self.replayed_count = 0
        """Steps since the start that were replayed."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of sequences for which steps are recorded, ascending."""
        return self._rungs

    def run(self, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
        """Final hidden states of every sequence, [n, hidden], valid until the next call; None: this step
        is none that can be replayed. tokens: int64 [n], on the device or in host memory."""
        rung = rung_of(self._rungs, len(layout.spans))
        if rung is None or not is_capturable(layout):
            return None
        if sum(len(span.block_ids) for span in layout.spans) > self._blocks_max:
            return None
        host = self._kernels.host_plan(layout, windows=self._model.windows, sequences=rung)
        if host is None:
            return None
        self._fill(rung, tokens, layout, host)
        recorded = self._recorded.get(rung)
        if recorded is None:
            try:
                recorded = self._recorded[rung] = self._record(rung, host)
            except RuntimeError:
                log.exception("decode steps cannot be recorded as CUDA graphs: they run as they are")
                self._rungs = ()
                return None
        self._tell_padding(len(layout.spans))
        recorded.replay()
        self.replayed_count += 1
        return recorded.hidden[: len(layout.spans)]

    def _fill(self, rung: int, tokens: Tensor, layout: BatchLayout, host: CapturableHostPlan[Any]) -> None:
        count = len(layout.spans)
        ints = self._ints.get(rung)
        if ints is None:
            # The block tables at a plan's end may grow to blocks_max.
            ints = torch.zeros(len(host.ints) + self._blocks_max, dtype=torch.int32, device=self._device)
            self._ints = {**self._ints, rung: ints}
        _copy(ints[: len(host.ints)], torch.from_numpy(host.ints))
        _copy(self._tokens[:count], tokens)
        _copy(self._positions[:count], torch.from_numpy(layout.positions()))

    def _tell_padding(self, token_count: int) -> None:
        """Rows from there on are none that anybody asked for."""
        if token_count != self._token_count:
            self._token_count = token_count
            self._is_token[:token_count].fill_(1)
            self._is_token[token_count:].zero_()

    def _record(self, rung: int, host: CapturableHostPlan[Any]) -> _Recorded:
        tokens, positions = self._tokens[:rung], self._positions[:rung]
        ints, is_token = self._ints[rung], self._is_token[:rung]

        def compute() -> Tensor:
            plan = host.on_device(ints, self._model.ropes(positions))
            # All rows: a tensor that named them would be freed when the recording ends, and the graph would
            # go on reading its memory.
            return self._model.compute(tokens, StepContext(plan, is_token=is_token), None)

        # Once as it is, on the side: kernels are compiled and libraries set up while that is still allowed.
        # It writes the same keys to the same places as the replay that follows, and counts nothing.
        self._tell_padding(0)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy blocks and read them for peers: what they call does not concern this stream.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = compute()
        # Rungs run one at a time, so they may use the same memory.
        self._pool = graph.pool()
        log.info("recorded decode steps of up to %d sequences", rung)
        return _Recorded(graph.replay, hidden)


def _copy(to: Tensor, values: Tensor) -> None:
    is_far = to.is_cuda and not values.is_cuda
    to.copy_(values.pin_memory() if is_far else values, non_blocking=True)
