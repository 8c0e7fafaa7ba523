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
from engine.execution.decode_inputs import table_blocks_max
from engine.execution.graphs import CapturableModel, DecodeGraphs
from engine.execution.replay import DecodeReplay
from engine.execution.rope_rows import RopeRows, tables_of
from engine.execution.step_buffers import LargestStepBuffers
from engine.execution.tracing import SizedTrace, same_bits, trace_sizes
from engine.kernels.interface import BatchLayout, RopeTables
from engine.kernels.native import NativeKernels
from engine.loading.load import LoadedModel
from engine.models.linear import StepContext
from engine.native.recording import NotRecordable

log = logging.getLogger(__name__)

_BYTES_MAX = 64 * 2**20
"""Memory of the results between kernels, of each kind of step. A model for which this is too little computes
so long that Python between its kernels does not matter."""
_TOKENS_MIN = 8
"""Recordings of different sizes need so many tokens."""


def make_mixed_replay(
    loaded: LoadedModel, engine: EngineConfig, recorder: DecodeGraphs | DecodeReplay | None
) -> "MixedReplay | None":
    """What replays steps with prompts, where those of decodes are replayed; None: nothing does."""
    if not isinstance(recorder, DecodeReplay) or not recorder.is_alone:
        return None
    model, kernels = loaded.model, loaded.kernels
    if not isinstance(model, CapturableModel) or not isinstance(kernels, NativeKernels):
        return None
    if engine.step_tokens_max < _TOKENS_MIN:
        return None
    return MixedReplay(
        *(model, kernels),
        tokens_max=engine.step_tokens_max,
        sequences_max=min(engine.step_tokens_max, engine.batch_sequences_max),
        blocks_max=table_blocks_max(loaded.kv.block_count),
        ropes=recorder.ropes,
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
        self._rope_rows = ropes.room(tokens_max)

    def ropes(self, tokens: int) -> RopeTables:
        return tables_of(self._rope_rows, tokens)

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


class MixedReplay:
    """Owned by the thread that computes. Weights stay where they are while it lives."""

    def __init__(
        self,
        model: CapturableModel,
        kernels: NativeKernels,
        *,
        tokens_max: int,
        sequences_max: int,
        blocks_max: int,
        ropes: RopeRows,
        vocab_size: int,
    ) -> None:
        """tokens_max, sequences_max, blocks_max: of a step."""
        self._model, self._kernels, self._vocab_size = model, kernels, vocab_size
        self._inputs = _Inputs(tokens_max, sequences_max, blocks_max, ropes)
        self._kinds: dict[bool, SizedTrace | None] = {}
        """Keyed by whether rows are wanted; None: such steps are not replayed."""
        self.replayed_count = 0
        """Steps since the start that were replayed."""

    def run(self, tokens: Sequence[int], layout: BatchLayout, rows: Sequence[int]) -> Tensor | None:
        """Final hidden states of the rows, [len(rows), hidden], valid until the next call; None: this step is
        not replayed. Raises IndexError: a position or block that there is not."""
        has_rows = bool(rows)
        kind = self._kinds.get(has_rows)
        if kind is None and has_rows in self._kinds:
            return None
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return None  # the kernels say what is wrong
        if any(span.adapter_slot >= 0 for span in layout.spans):
            return None
        if has_rows and not 0 <= min(rows) <= max(rows) < len(tokens):
            return None
        if not self._inputs.fill(self._kernels, tokens, layout, rows):
            return None
        if kind is None:
            return self._first(tokens, layout, rows)
        try:
            hidden = _replayed(kind, len(tokens), len(layout.spans), len(rows))
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
            found = _replayed(kind, len(tokens), len(layout.spans), len(rows))
        except NotRecordable as reason:
            log.info("steps with prompts are not recorded: %s", reason)
            return expected
        if not same_bits(found, expected):
            log.error("a replay of %d tokens gives another result: such steps are not replayed", len(tokens))
            return expected
        self._kinds[has_rows] = kind
        return expected

    def _recorded(self, has_rows: bool) -> SizedTrace:
        most, many = self._inputs.tokens_max, len(self._inputs.spans)
        # The largest first: it says how much memory every result takes. Then one size differs, last all.
        few = (most // 3, many // 3 + 1, most // 3)
        sizes = [(most, many, most), (most // 2, many, most), (most, many // 2 + 1, most)]
        sizes += [(most, many, most // 2), few] if has_rows else [few]
        if not has_rows:
            sizes = [(tokens, sequences) for tokens, sequences, _ in sizes]
        return trace_sizes(self._compute, sizes, LargestStepBuffers(_BYTES_MAX))

    def _compute(self, tokens: int, sequences: int, rows: int = 0) -> Tensor:
        inputs = self._inputs
        plan = self._kernels.plan_of(inputs.spans, inputs.tables, inputs.ropes(tokens), sequences, tokens)
        return self._model.compute(inputs.tokens[:tokens], StepContext(plan), inputs.rows[:rows])


def _replayed(kind: SizedTrace, tokens: int, sequences: int, rows: int) -> Tensor:
    """Hidden states of the rows. Raises NotRecordable: a kernel failed."""
    kind.replay(*((tokens, sequences, rows) if rows else (tokens, sequences)))
    return kind.result[:rows]
