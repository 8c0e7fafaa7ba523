"""A rank's place among those of its worker, and its ways to the others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.core.shape import Position, Shape
from engine.kernels.interface import BatchLayout
from engine.models.decoder import Decoder
from engine.models.expert_counts import ExpertCounts
from engine.parallel.group import Group

LEADER = 0
"""The rank that samples, and that the plans come from."""
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of its worker."""

    shape: Shape
    rank: int
    world: Group
    """All ranks of the worker."""
    tensor: Group
    """The tensor ranks of this rank's stage; the world where there is one stage."""

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def position(self) -> Position:
        return self.shape.position(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.position.stage == self.shape.pipeline - 1

    @property
    def last_rank(self) -> int:
        """The rank that has the logits: tensor rank 0 of the last stage."""
        return self.shape.rank(Position(0, self.shape.pipeline - 1, 0))

    def neighbour(self, stages: int) -> int:
        """The rank so many stages further, with the same place in its stage."""
        here = self.position
        return self.shape.rank(Position(here.tensor_rank, here.stage + stages, here.context_rank))

    def share_tokens(self, tokens: list[int | None]) -> None:
        """Tell the followers what the leader sampled last for each sequence; None: nothing."""
        if tokens:
            numbers = [_NOTHING if token is None else token for token in tokens]
            self.world.broadcast_(torch.tensor(numbers, dtype=torch.int64), source=LEADER)

    def take_tokens(self, count: int) -> list[int | None]:
        """What the leader shares of `count` sequences."""
        if not count:
            return []
        tokens = self.world.broadcast_(torch.empty(count, dtype=torch.int64), source=LEADER)
        return [None if token == _NOTHING else token for token in tokens.tolist()]

    def close(self) -> None:
        if self.tensor is not self.world:
            self.tensor.close()
        self.world.close()


class StagedModel:
    """A pipeline stage that acts as the whole model: `engine.models.model.LanguageModel` for one rank.

    Hidden states pass from stage to stage. The last stage sends the rows that somebody wants to the leader,
    and their logits when the leader asks for them, which all ranks do alike.
    """

    def __init__(
        self, stage: Decoder[Any, Any, Any], ranks: Ranks, *, hidden_size: int, vocab: int, dtype: torch.dtype
    ) -> None:
        self._stage, self._ranks = stage, ranks
        self._hidden_size, self._vocab, self._dtype = hidden_size, vocab, dtype
        self.expert_counts: ExpertCounts | None = stage.expert_counts
        self._returns = ranks.rank == ranks.last_rank
        """This rank sends what the leader wants."""

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor:
        ranks, hidden = self._ranks, None
        if ranks.position.stage:
            shape = (len(tokens), self._hidden_size)
            hidden = ranks.world.recv(shape, self._dtype, ranks.neighbour(-1))
        out = self._stage.forward(tokens, layout, rows, hidden=hidden)
        if not ranks.is_last_stage:
            ranks.world.send(out, ranks.neighbour(1))
            out = out.new_empty((len(rows), self._hidden_size))
        elif self._returns:
            # Without rows it says that the KV of this step is written.
            ranks.world.send(out, LEADER)
        if ranks.is_leader:
            return ranks.world.recv((len(rows), self._hidden_size), self._dtype, ranks.last_rank)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        ranks = self._ranks
        if ranks.is_last_stage:
            logits = self._stage.logits(hidden)
            if self._returns:
                ranks.world.send(logits, LEADER)
            return logits
        if ranks.is_leader:
            return ranks.world.recv((len(hidden), self._vocab), torch.float32, ranks.last_rank)
        return hidden.new_empty((len(hidden), 0))
