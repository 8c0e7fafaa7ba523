"""How the outputs of one engine step travel: as columns, since nearly all of them are tokens and no more.

There is one such message per worker, router and step, with a row per sequence; a row of columns costs its
reader a fraction of what a message costs.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import msgspec

from baton.core.ids import SequenceId
from baton.core.messages import SequenceOutput, StepOutput
from baton.core.wire_types import OneFor
from baton.wire.decoding import WireError


class PlainOutputs(msgspec.Struct, frozen=True):
    """Outputs that are tokens and nothing else; element i of each column but the last belongs to output i."""

    seq_ids: Sequence[SequenceId]
    epochs: Annotated[Sequence[int], OneFor("seq_ids")]
    first_indices: Annotated[Sequence[int], OneFor("seq_ids")]
    token_counts: Annotated[Sequence[int], OneFor("seq_ids")]
    tokens: Sequence[int]
    """Tokens of all outputs, one after the other."""


class StepColumns(msgspec.Struct, frozen=True):
    """All tokens of one engine step for one router."""

    outputs: tuple[SequenceOutput, ...]
    """Those with more than tokens."""
    plain: PlainOutputs


def pack(step: StepOutput) -> StepColumns:
    plain: list[SequenceOutput] = []
    others: list[SequenceOutput] = []
    for o in step.outputs:
        (plain if o.is_plain else others).append(o)
    columns = PlainOutputs(
        [o.seq_id for o in plain],
        [o.epoch for o in plain],
        [o.first_index for o in plain],
        [len(o.tokens) for o in plain],
        [token for o in plain for token in o.tokens],
    )
    return StepColumns(tuple(others), columns)


def unpack(step: StepColumns) -> StepOutput:
    """The plain ones come first: of a sequence that has both, the other one may be its end."""
    plain = step.plain
    counts, tokens = plain.token_counts, plain.tokens
    if sum(counts) != len(tokens):
        raise WireError(f"a step's outputs have {sum(counts)} tokens, and {len(tokens)} came")
    rows = zip(plain.seq_ids, plain.epochs, plain.first_indices, counts, accumulate(counts), strict=True)
    outputs = [
        SequenceOutput(seq_id, epoch, first_index, tuple(tokens[end - count : end]))
        for seq_id, epoch, first_index, count, end in rows
    ]
    return StepOutput((*outputs, *step.outputs))
