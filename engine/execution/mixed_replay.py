"""Steps with prompts or drafts on the CPU without the Python of the layers.

`replay` records a step for each number of sequences that decode. Steps that hold prompts come in too many
sizes for that. Their calls are taken down for a few sizes, without being made, which tells them for all
others (`engine.native.sized_replay`). The first step of each kind is computed as it is and then replayed; if
the results do not agree to the last bit, that kind is never replayed.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.config import EngineConfig
from engine.execution.graphs import CapturableModel, recorded_sequences
from engine.execution.ranks import Ranks
from engine.execution.rope_rows import RopeRows
from engine.execution.step_buffers import LargestStepBuffers
from engine.execution.tracing import same_bits, take_down
from engine.kernels.interface import BatchLayout
from engine.kernels.native import NativeKernels
from engine.kv.pool import KVPool
from engine.loading.load import LoadedModel
from engine.models.linear import StepContext
from engine.native.library import library
from engine.native.recording import NotRecordable, Tape
from engine.native.sized_replay import SizedReplay

log = logging.getLogger(__name__)

_BYTES_MAX = 64 * 2**20
"""Memory of the results between kernels, of each kind of step. A model for which this is too little computes
so long that Python between its kernels does not matter."""
_SHARING_MAX, _BLOCKS_MAX = 4, 2**20
"""Block ids that a step has room for, see `replay`."""
_TOKENS_MIN = 8
"""Recordings of different sizes need so many tokens."""


def make_mixed_replay(
    loaded: LoadedModel, engine: EngineConfig, ranks: Ranks | None = None
) -> "MixedReplay | None":
    """What replays steps with prompts, for this model, these kernels and this shape; None: nothing does."""
    model, kernels, pool = loaded.model, loaded.kernels, loaded.kv
    if ranks is not None or loaded.has_remote_experts or not loaded.division.is_whole:
        return None
    if (
        loaded.floor_s
        or not recorded_sequences(engine, loaded.floor_s)
        or engine.step_tokens_max < _TOKENS_MIN
    ):
        return None
    if not isinstance(model, CapturableModel) or not isinstance(kernels, NativeKernels):
        return None
    return MixedReplay(
        *(model, kernels, pool),
        tokens_max=engine.step_tokens_max,
        sequences_max=min(engine.step_tokens_max, engine.batch_sequences_max),
        positions_max=loaded.context_tokens,
        vocab_size=loaded.spec.vocab_size,
    )


class _Inputs:
    """The numbers of a step, where its kernels read them."""

    def __init__(self, tokens_max: int, sequences_max: int, blocks_max: int, ropes: RopeRows) -> None:
        self.tokens_max = tokens_max
        self.tokens = torch.zeros(tokens_max, dtype=torch.int64)
        self.rows = torch.zeros(tokens_max, dtype=torch.int64)
        self.spans = np.zeros((sequences_max, 4), dtype=np.int32)
        self.tables = np.zeros(blocks_max, dtype=np.int32)
        self._ropes = ropes
        self._rope_rows = {
            rope: (
                np.zeros((tokens_max, half), dtype=np.float32),
                np.zeros((tokens_max, half), dtype=np.float32),
            )
            for rope, half in ropes.halves.items()
        }

    def ropes(self, tokens: int) -> dict[int, tuple[Tensor, Tensor]]:
        return {
            rope: (torch.from_numpy(cos[:tokens]), torch.from_numpy(sin[:tokens]))
            for rope, (cos, sin) in self._rope_rows.items()
        }

    def fill(
        self, kernels: NativeKernels, tokens: Sequence[int], layout: BatchLayout, rows: Sequence[int]
    ) -> bool:
        """False: there is no room. Raises IndexError, see `NativeKernels.numbers`."""
        if (
            len(tokens) > self.tokens_max
            or len(rows) > self.tokens_max
            or len(layout.spans) > len(self.spans)
        ):
            return False
        spans, tables = kernels.numbers(layout)
        if len(tables) > len(self.tables):
            return False
        self.spans[: len(spans)] = spans
        self.tables[: len(tables)] = tables
        self.tokens.numpy()[: len(tokens)] = tokens
        self.rows.numpy()[: len(rows)] = rows
        ranges = [range(span.first_position, span.context_tokens) for span in layout.spans]
        self._ropes.copy_ranges(ranges, self._rope_rows)
        return True


class _Kind:
    """Steps of which rows are wanted, or those of which none is."""

    def __init__(self, replay: SizedReplay, result: Tensor, *, has_rows: bool) -> None:
        """result: the largest step's."""
        self._replay, self._result, self._has_rows = replay, result, has_rows

    def run(self, tokens: int, sequences: int, rows: int) -> Tensor:
        """Raises NotRecordable: a kernel failed."""
        sizes = (tokens, sequences, rows) if self._has_rows else (tokens, sequences)
        self._replay(*sizes)
        return self._result[:rows]


class MixedReplay:
    """Owned by the thread that computes. Weights stay where they are while it lives."""

    def __init__(
        self,
        model: CapturableModel,
        kernels: NativeKernels,
        pool: KVPool,
        *,
        tokens_max: int,
        sequences_max: int,
        positions_max: int,
        vocab_size: int,
    ) -> None:
        """tokens_max, sequences_max: of a step. positions_max: of the longest sequence."""
        self._model, self._kernels, self._vocab_size = model, kernels, vocab_size
        blocks_max = min(_BLOCKS_MAX, _SHARING_MAX * pool.block_count)
        ropes = RopeRows(model.ropes, positions_max)
        self._inputs = _Inputs(tokens_max, sequences_max, blocks_max, ropes)
        self._buffers = {has_rows: LargestStepBuffers(_BYTES_MAX) for has_rows in (True, False)}
        self._kinds: dict[bool, _Kind | None] = {}
        """Keyed by whether rows are wanted; None: such steps are not replayed."""
        self.replayed_count = 0
        """Steps since the start that were replayed."""

    def run(self, tokens: Sequence[int], layout: BatchLayout, rows: Sequence[int]) -> Tensor | None:
        """Final hidden states of the rows, [len(rows), hidden], valid until the next call; None: this step is
        not replayed. Raises IndexError: a position or block that there is not."""
        has_rows = bool(rows)
        if has_rows in self._kinds and self._kinds[has_rows] is None:
            return None
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return None  # the kernels say what is wrong
        if any(span.adapter_slot >= 0 for span in layout.spans):
            return None
        if has_rows and not 0 <= min(rows) <= max(rows) < len(tokens):
            return None
        if not self._inputs.fill(self._kernels, tokens, layout, rows):
            return None
        sizes = (len(tokens), len(layout.spans), len(rows))
        kind = self._kinds.get(has_rows)
        if kind is None:
            return self._first(tokens, layout, rows)
        try:
            hidden = kind.run(*sizes)
        except NotRecordable:
            self._kinds[has_rows] = None
            log.exception("a replayed step of %d tokens failed", len(tokens))
            raise
        self.replayed_count += 1
        return hidden

    def _first(self, tokens: Sequence[int], layout: BatchLayout, rows: Sequence[int]) -> Tensor:
        """The result as it is without a recording; then record."""
        has_rows = bool(rows)
        self._kinds[has_rows] = None
        expected = self._model.forward(
            torch.tensor(tokens, dtype=torch.int64), layout, torch.tensor(rows, dtype=torch.int64)
        )
        try:
            kind = self._recorded(has_rows)
            found = kind.run(len(tokens), len(layout.spans), len(rows))
        except NotRecordable as reason:
            log.info("steps with prompts are not recorded: %s", reason)
            return expected
        if not same_bits(found, expected):
            log.error("a replay of %d tokens gives another result: such steps are not replayed", len(tokens))
            return expected
        self._kinds[has_rows] = kind
        return expected

    def _recorded(self, has_rows: bool) -> _Kind:
        tokens, sequences = self._inputs.tokens_max, len(self._inputs.spans)
        # The largest first: it says how much memory every result takes.
        all_sizes = [
            (tokens, sequences, tokens),
            (tokens // 2, sequences, tokens),
            (tokens, sequences // 2 + 1, tokens),
            (tokens, sequences, tokens // 2),
            (tokens // 3, sequences // 3 + 1, tokens // 3),
        ]
        if not has_rows:
            all_sizes = [(t, s, 0) for t, s, r in all_sizes if r != tokens // 2]
        made = [self._taken_down(*sizes) for sizes in all_sizes]
        kept = [sizes if has_rows else sizes[:2] for sizes in all_sizes]
        replay = SizedReplay(library(), made, kept)
        _, result = self._take_down(*all_sizes[0])
        return _Kind(replay, result, has_rows=has_rows)

    def _taken_down(self, tokens: int, sequences: int, rows: int) -> Tape:
        return self._take_down(tokens, sequences, rows)[0]

    def _take_down(self, tokens: int, sequences: int, rows: int) -> tuple[Tape, Tensor]:
        inputs, buffers = self._inputs, self._buffers[rows > 0]
        plan = self._kernels.plan_of(inputs.spans, inputs.tables, inputs.ropes(tokens), sequences, tokens)
        buffers.begin()
        return take_down(
            lambda: self._model.compute(inputs.tokens[:tokens], StepContext(plan), inputs.rows[:rows]),
            buffers,
        )
