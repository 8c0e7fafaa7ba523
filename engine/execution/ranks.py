"""A rank's place among those of its worker, and its ways to the others."""

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.core.ids import SeqKey
from baton.core.shape import Position, Shape
from engine.execution.context import ContextStage
from engine.kernels.interface import BatchLayout
from engine.models.decoder import Decoder
from engine.models.expert_counts import ExpertCounts
from engine.models.model import LanguageModel
from engine.parallel.group import Group, GroupBroken

LEADER = 0
"""The rank that samples, and that the plans come from."""
OWED_MAX = 8
"""Steps whose tokens a follower has not taken."""
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of its worker."""

    shape: Shape
    rank: int
    world: Group
    """All ranks of the worker."""
    tensor: Group | None
    """The ranks that hold the other parts of this rank's matrices; None where one holds all."""
    context: Group | None
    """The ranks that compute the other tokens of this rank's steps; None where it computes all."""
    results: Group
    """All ranks again, for what the leader gets and tells while it computes the next step; the world where
    there is one stage. Its tensors are in host memory."""
    stages: Group | None = None
    """All ranks once more, for hidden states on the ranks' devices; None where there is one stage."""

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def is_staged(self) -> bool:
        return self.shape.pipeline > 1

    @property
    def leads_stages(self) -> bool:
        """True where other stages have what the steps of this rank end with."""
        return self.is_leader and self.is_staged

    @property
    def position(self) -> Position:
        return self.shape.position(self.rank)

    @property
    def has_pool(self) -> bool:
        """False where the KV pool is the first context rank's."""
        return self.position.context_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.position.stage == self.shape.pipeline - 1

    @property
    def last_rank(self) -> int:
        """The rank that has the logits: the first one of the last stage."""
        return self.shape.rank(Position(0, self.shape.pipeline - 1, 0))

    def neighbour(self, stages: int) -> int:
        """The rank so many stages further, with the same place in its stage."""
        here = self.position
        return self.shape.rank(Position(here.tensor_rank, here.stage + stages, here.context_rank))

    def floor_s(self, floors_s: Mapping[int, float]) -> float:
        """The least time of a step, given that of each rank: stages follow one another."""
        stages = [[0.0] for _ in range(self.shape.pipeline)]
        for rank, floor_s in floors_s.items():
            stages[self.shape.position(rank).stage].append(floor_s)
        return sum(max(stage) for stage in stages)

    def share(self, tokens: Sequence[int | None]) -> None:
        """Tell the followers what the leader sampled last for each sequence; None: nothing. They need not
        wait for it."""
        if not tokens:
            return
        numbers = torch.tensor([_NOTHING if token is None else token for token in tokens])
        for rank in range(1, self.shape.rank_count):
            self.results.send(numbers, rank)

    def wait_for_all(self) -> None:
        """Return at the leader when every rank has got here."""
        self.results.gather(torch.zeros(1), to=LEADER)

    def settle(self) -> None:
        """Return when what this rank's device has to do with other ranks has ended. Raises GroupBroken."""
        for group in {id(group): group for group in (self.tensor, self.stages) if group is not None}.values():
            group.settle()

    def be_strict(self) -> None:
        """All ranks serve from now on, so that their silence means something."""
        for group in self._groups:
            group.be_strict()

    def close(self) -> None:
        for group in self._groups:
            group.close()

    @property
    def _groups(self) -> Collection[Group]:
        groups = (self.tensor, self.context, self.stages, self.results, self.world)
        return {id(group): group for group in groups if group is not None}.values()


class SharedTokens:
    """The tokens that the leader shares, at a follower. They are taken when a plan names one that it could
    not know yet, so that a stage may go on with other work meanwhile."""

    def __init__(self, ranks: Ranks | None) -> None:
        """ranks: None where there is one, and nobody shares anything."""
        self._ranks = ranks
        self._owed: deque[list[SeqKey]] = deque()
        self._last: dict[SeqKey, int] = {}

    def expect(self, keys: list[SeqKey]) -> None:
        """The leader samples for these sequences."""
        if not keys:
            return
        self._owed.append(keys)
        if len(self._owed) > OWED_MAX:
            self._take()

    def last(self, key: SeqKey) -> int:
        """The token that the newest step with samples has sampled last for a sequence."""
        while self._owed:
            self._take()
        return self._last[key]

    def _take(self) -> None:
        assert self._ranks is not None
        keys = self._owed.popleft()
        tokens = self._ranks.results.recv((len(keys),), torch.int64, LEADER).tolist()
        self._last = {key: token for key, token in zip(keys, tokens, strict=True) if token != _NOTHING}


class UnfinishedSteps:
    """The steps that the leader has begun and not finished. Two threads use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count, self._is_closed = 0, False

    def begun(self) -> None:
        with self._changed:
            self._count += 1

    def finished(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until there is none. Whoever finishes has a deadline. Raises GroupBroken after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count or self._is_closed)
            if self._is_closed:
                raise GroupBroken("the worker ends")

    def close(self) -> None:
        """Nobody will finish what is begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def other_token_count(model: LanguageModel) -> int:
    """Tokens that context ranks beside the first have computed."""
    if isinstance(model, StagedModel):
        model = model.stage
    return model.other_token_count if isinstance(model, ContextStage) else 0


class StagedModel:
    """A pipeline stage that acts as the whole model: `engine.models.model.LanguageModel` for one rank.

    Hidden states pass from stage to stage. The last stage sends the rows that somebody wants to the leader,
    and their logits when the leader asks for them, which all ranks do alike. The leader asks in two parts, so
    that it may begin a step before the one before has come back.
    """

    def __init__(
        self,
        stage: Decoder[Any, Any, Any] | ContextStage,
        ranks: Ranks,
        *,
        hidden_size: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert ranks.stages is not None
        self.stage, self._ranks, self._hidden_states = stage, ranks, ranks.stages
        self._hidden_size, self._vocab, self._dtype, self._device = hidden_size, vocab, dtype, device
        self.expert_counts: ExpertCounts | None = stage.expert_counts
        self._returns = ranks.rank == ranks.last_rank
        """This rank sends what the leader wants."""

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor:
        """Compute the stage. Rows are of use at the last stage only; the leader gets them by `rows`."""
        ranks, hidden = self._ranks, None
        count = self.stage.own_token_count(layout)
        if ranks.position.stage and count:
            shape = (count, self._hidden_size)
            hidden = self._hidden_states.recv(shape, self._dtype, ranks.neighbour(-1))
        out = self.stage.forward(tokens, layout, rows, hidden=hidden)
        if not ranks.is_last_stage:
            if count:
                self._hidden_states.send(out, ranks.neighbour(1))
            return out.new_empty((len(rows), self._hidden_size))
        if self._returns:
            # Without rows it says that the KV of this step is written.
            ranks.results.send(out.cpu(), LEADER)
        return out

    def rows(self, count: int) -> Tensor:
        """The wanted rows of the oldest step that was begun, at the leader: [count, hidden]."""
        rows = self._ranks.results.recv((count, self._hidden_size), self._dtype, self._ranks.last_rank)
        return rows.to(self._device)

    def logits(self, hidden: Tensor) -> Tensor:
        ranks = self._ranks
        if ranks.is_last_stage:
            logits = self.stage.logits(hidden)
            if self._returns:
                ranks.results.send(logits.cpu(), LEADER)
            return logits
        if ranks.is_leader:
            shape = (len(hidden), self._vocab)
            return ranks.results.recv(shape, torch.float32, ranks.last_rank).to(self._device)
        return hidden.new_empty((len(hidden), 0))
