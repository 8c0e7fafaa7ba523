"""The interface of models that the executor uses."""

from typing import Protocol

from torch import Tensor

from engine.kernels.interface import BatchLayout
from engine.models.expert_counts import ExpertCounts


class LanguageModel(Protocol):
    """A loaded model, bound to one KV pool."""

    expert_counts: ExpertCounts | None
    """None: it has no experts, or they are not counted."""

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor:
        """Write the KV of all tokens; return the final hidden states (after the last norm) of some.

        tokens: int64 [T] in the layout's order. rows: int64 [R], may be empty. Returns [R, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab] of what `forward` returned."""
        ...
