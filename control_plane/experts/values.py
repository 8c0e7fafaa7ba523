"""Values of expert placement. Arrays are read-only.

Shapes: L layers that have experts, E experts of a layer, R ranks, S slots of the rank that has most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.core.errors import BatonError
from baton.core.ids import ExpertRankId, NodeId

RankId = ExpertRankId
"""One process that holds experts. A process that starts anew has a new id."""

Loads = npt.NDArray[np.float64]
"""Decayed counts of tokens as [L, E]."""

Slots = npt.NDArray[np.int32]
"""Experts as [L, R, S]; EMPTY where a slot has none."""

EMPTY = -1


class ExpertsDoNotFit(BatonError):
    """The ranks that may hold experts have fewer slots than a layer has experts."""

    def __init__(self, *, missing_slots: int, expert_count: int, rank_count: int) -> None:
        super().__init__(
            f"{expert_count} experts of a layer do not fit on {rank_count} ranks: {missing_slots} slots of"
            " each layer are missing; add ranks, or give ranks more memory"
        )
        self.missing_slots = missing_slots


class ExpertRankState(StrEnum):
    READY = auto()
    """The rank holds experts and may be given more."""
    DRAINING = auto()
    """The rank serves what it holds until other ranks have it, and is given nothing."""
    LOST = auto()
    """The rank and what it held are gone."""


@dataclass(frozen=True, slots=True)
class ExpertRank:
    rank_id: RankId
    node_id: NodeId
    slots: int
    """Experts of each layer that the rank has memory for, without the memory in which it loads new ones."""
    state: ExpertRankState = ExpertRankState.READY
    speed: float = 1.0
    """Load that the rank computes in the time in which the others compute 1. A slower rank is given less."""


class ExpertKey(NamedTuple):
    """One expert of one layer, both counted from 0 among those that have experts."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """The ranks that hold each expert. Whoever sends rows of tokens to experts names the epoch it used."""

    epoch: int
    expert_count: int
    ranks: tuple[RankId, ...]
    slots: Slots
    """[L, R, S] with R in the order of `ranks`. No rank holds an expert twice."""

    @property
    def layer_count(self) -> int:
        return self.slots.shape[0]

    def replicas(self) -> dict[ExpertKey, tuple[RankId, ...]]:
        """The ranks of every expert, in the order of `ranks`. Experts without a replica are left out."""
        found: dict[ExpertKey, list[RankId]] = {}
        layers, ranks, places = np.nonzero(self.slots != EMPTY)
        experts = self.slots[layers, ranks, places]
        for layer, rank, expert in zip(layers.tolist(), ranks.tolist(), experts.tolist(), strict=True):
            found.setdefault(ExpertKey(layer, expert), []).append(self.ranks[rank])
        return {key: tuple(names) for key, names in found.items()}

    @staticmethod
    def of(
        replicas: Mapping[ExpertKey, Sequence[RankId]],
        *,
        epoch: int,
        layer_count: int,
        expert_count: int,
        ranks: tuple[RankId, ...],
    ) -> "ExpertMap":
        """Make a map of the ranks of every expert."""
        index = {rank: number for number, rank in enumerate(ranks)}
        held: list[list[list[int]]] = [[[] for _ in ranks] for _ in range(layer_count)]
        for (layer, expert), names in sorted(replicas.items()):
            for name in names:
                held[layer][index[name]].append(expert)
        most = max((len(experts) for of_layer in held for experts in of_layer), default=0)
        slots = np.full((layer_count, len(ranks), most), EMPTY, dtype=np.int32)
        for layer, of_layer in enumerate(held):
            for rank, experts in enumerate(of_layer):
                slots[layer, rank, : len(experts)] = experts
        return ExpertMap(epoch, expert_count, ranks, read_only(slots))


@dataclass(frozen=True, slots=True)
class ExpertMigration:
    """One expert that a rank has to load."""

    layer: int
    expert: int
    source: RankId | None
    """A rank that holds it; None if no rank does, so that it is read from the model's files."""
    target: RankId
    size_bytes: int

    @property
    def key(self) -> ExpertKey:
        return ExpertKey(self.layer, self.expert)


def read_only(slots: Slots) -> Slots:
    slots.flags.writeable = False
    return slots
