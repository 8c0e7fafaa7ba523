"""How the ranks of one worker are arranged. A worker of one process has the shape 1 x 1 x 1.

Ranks are numbered with the tensor rank running fastest, then the context rank, then the stage, so that the
ranks of one tensor group, which talk most, are neighbours.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.core.errors import SetupError

RANKS_MAX = 64
_PARTS = re.compile(r"(tp|pp|cp)([0-9]{1,3})")
_NEGATIVE = re.compile(r"-\s*[0-9]")
_COUNTED = re.compile(r"([0-9]{1,9})(?:\s*[xX×]\s*(\w+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """The place of one rank."""

    tensor_rank: int
    stage: int
    """The pipeline rank: stage 0 holds the first layers."""
    context_rank: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of ranks along each axis."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} parallel over {getattr(self, name)} ranks: it must be at least 1")
        if self.rank_count > RANKS_MAX:
            raise SetupError(f"{self} has {self.rank_count} ranks; a worker has at most {RANKS_MAX}")

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read "tp2", "pp2", "tp2pp2cp2" (in any order and case) or "1". Raises SetupError."""
        plain = text.strip().lower()
        if plain == "1":
            return cls()
        parts = _PARTS.findall(plain)
        counts = {axis: int(count) for axis, count in parts}
        if not parts or "".join(axis + count for axis, count in parts) != plain:
            raise SetupError(f'shape "{text}" is not understood: write "1", "tp2", "pp2" or "tp2pp2cp2"')
        if len(counts) < len(parts):
            raise SetupError(f'shape "{text}" names one axis twice')
        return cls(counts.get("tp", 1), counts.get("pp", 1), counts.get("cp", 1))

    def __str__(self) -> str:
        axes = (("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context))
        return "".join(f"{axis}{count}" for axis, count in axes if count > 1) or "1"

    @property
    def rank_count(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def is_single(self) -> bool:
        return self.rank_count == 1

    def position(self, rank: int) -> Position:
        self._check(rank)
        rest, tensor_rank = divmod(rank, self.tensor)
        stage, context_rank = divmod(rest, self.context)
        return Position(tensor_rank, stage, context_rank)

    def rank(self, position: Position) -> int:
        rank = (position.stage * self.context + position.context_rank) * self.tensor + position.tensor_rank
        if not 0 <= rank < self.rank_count or self.position(rank) != position:
            raise ValueError(f"{position} is not in {self}")
        return rank

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other parts of this rank's matrices, by tensor rank."""
        here = self.position(rank)
        return tuple(self.rank(Position(i, here.stage, here.context_rank)) for i in range(self.tensor))

    def context_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other tokens of this rank's prompts, by context rank."""
        here = self.position(rank)
        return tuple(self.rank(Position(here.tensor_rank, here.stage, i)) for i in range(self.context))

    def pool_ranks(self, stages: Collection[int]) -> tuple[int, ...]:
        """The ranks of some stages that have a KV pool: context ranks share the first one's."""
        positions = [(rank, self.position(rank)) for rank in range(self.rank_count)]
        return tuple(rank for rank, here in positions if here.stage in stages and not here.context_rank)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.rank_count:
            raise ValueError(f"rank {rank} of a worker of {self.rank_count}")


@dataclass(frozen=True, slots=True)
class CountedShape:
    """Workers of one role as people write them."""

    count: int
    shape: Shape | None
    """None: no shape is named, so the configured one holds."""

    @classmethod
    def parse(cls, text: str) -> "CountedShape":
        """Read "2", "2xtp2", "2 x tp2", or "tp2" for one worker. Raises SetupError."""
        if _NEGATIVE.match(text.strip()):
            raise SetupError(f"{text.strip()} is below 0: a number of workers is at least 0")
        found = _COUNTED.fullmatch(text.strip())
        try:
            if found is None:
                return cls(1, Shape.parse(text))
            return cls(int(found[1]), Shape.parse(found[2]) if found[2] else None)
        except SetupError as error:
            raise SetupError(f'{error}; a number of workers is "2", "2xtp2" or "tp2"') from None


def cores_of_rank(cores: Sequence[int], rank: int, rank_count: int) -> tuple[int, ...]:
    """Return the cores of one of several ranks. The range is contiguous, so that two ranks do not take each
    other's caches and time. With more ranks than cores nobody is pinned: each gets all cores."""
    assert 0 <= rank < rank_count
    if rank_count > len(cores):
        return tuple(cores)
    return tuple(cores[rank * len(cores) // rank_count : (rank + 1) * len(cores) // rank_count])
