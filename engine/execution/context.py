"""Context ranks: the ranks of a worker that divide the tokens of each step among them.

They share one KV pool, in which each writes the KV of its own tokens and from which each reads what the
others wrote. So no KV moves between them. They only wait for each other: once in each layer in which a
sequence is computed by several ranks, and before and after the step.
"""

from typing import Any

import torch
from torch import Tensor

from engine.execution.context_division import StepDivision, divide_step, wanted_rows
from engine.kernels.interface import BatchLayout
from engine.models.decoder import Decoder
from engine.models.expert_counts import ExpertCounts
from engine.parallel.group import Group


class ContextStage:
    """A model, or a pipeline stage of it, as one context rank computes it. It is called as a `Decoder` is.

    Every rank is called with the whole step, computes its own tokens, and the first rank returns the rows
    that are wanted of all of them.
    """

    def __init__(
        self,
        stage: Decoder[Any, Any, Any],
        group: Group,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        block_tokens: int,
        pair_cost: float,
    ) -> None:
        """group: the context ranks. pair_cost: see `divide_step`."""
        self._stage, self._group = stage, group
        self._hidden_size, self._dtype = hidden_size, dtype
        self._block_tokens, self._pair_cost = block_tokens, pair_cost
        self.expert_counts: ExpertCounts | None = stage.expert_counts
        """The first rank's has the tokens of all ranks."""
        self._divided: tuple[BatchLayout, StepDivision] | None = None
        self._here = torch.zeros(1)
        self.is_last = stage.is_last
        self.other_token_count = 0
        """Tokens that others than the first rank have computed."""

    def own_token_count(self, layout: BatchLayout) -> int:
        """Number of the step's tokens that this rank computes."""
        return len(self._division(layout).batches[self._group.rank].places)

    def forward(
        self, tokens: Tensor, layout: BatchLayout, rows: Tensor, *, hidden: Tensor | None = None
    ) -> Tensor:
        """hidden: what the stage before returned for this rank's own tokens; None for the first.

        Returns the rows on the first rank, and as many rows without columns on the others. A stage that is
        not the last returns the rows of its own tokens.
        """
        division = self._division(layout)
        self.other_token_count += division.other_token_count
        if not division.is_divided:
            if self._group.rank == 0:
                return self._stage.forward(tokens, layout, rows, hidden=hidden)
            return self._nothing(rows)
        self._meet()  # now blocks are moved, and what this step reads of earlier ones is written
        wanted = wanted_rows(division, rows.numpy())
        own_rows = wanted.by_rank[self._group.rank]
        out = self._compute(division, tokens, torch.from_numpy(own_rows), hidden)
        self._collect_expert_counts()
        if not self.is_last:
            self._meet()
            return out
        if not len(rows):
            self._meet()
            return self._nothing(rows)
        sizes = [len(places) for places in wanted.by_rank]
        gathered = self._group.gather(out, 0, sizes=sizes, to=0)
        if gathered is None:
            return self._nothing(rows)
        found = torch.empty_like(gathered)
        found[torch.from_numpy(wanted.order)] = gathered
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """A rank without the rows has no logits."""
        if not hidden.shape[1]:
            return hidden.new_empty((len(hidden), 0))
        return self._stage.logits(hidden)

    def _compute(
        self, division: StepDivision, tokens: Tensor, own_rows: Tensor, hidden: Tensor | None
    ) -> Tensor:
        own = division.batches[self._group.rank]
        on_written = self._meet if division.has_cuts else None
        if len(own.places):
            own_tokens = tokens[torch.from_numpy(own.places)]
            return self._stage.forward(own_tokens, own.layout, own_rows, hidden=hidden, on_written=on_written)
        if on_written is not None:
            for _ in range(self._stage.layer_count):
                on_written()
        return torch.empty((0, self._hidden_size), dtype=self._dtype)

    def _division(self, layout: BatchLayout) -> StepDivision:
        if self._divided is None or self._divided[0] is not layout:
            division = divide_step(
                layout, self._group.size, block_tokens=self._block_tokens, pair_cost=self._pair_cost
            )
            self._divided = (layout, division)
        return self._divided[1]

    def _meet(self) -> None:
        """Return when all ranks have come here. What they wrote before is seen by all afterwards."""
        self._group.all_reduce_(self._here)

    def _collect_expert_counts(self) -> None:
        """Give the first rank what all have counted since the step before."""
        counts = self.expert_counts
        if counts is None:
            return
        found = self._group.gather(counts.take(), 0, to=0)
        if found is not None:
            counts.put(found.unflatten(0, (self._group.size, -1)).sum(0))

    def _nothing(self, rows: Tensor) -> Tensor:
        return torch.empty((len(rows), 0), dtype=self._dtype)
