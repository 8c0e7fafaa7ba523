"""One load of a waiting sequence's prefix, and what is counted of loads."""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum, auto

from baton.core.ids import BlockHash
from baton.core.store import FoundSpan, Tier
from engine.scheduling.incoming import Incoming
from engine.scheduling.sequence import Sequence


class LoadState(StrEnum):
    FINDING = auto()
    """The store was asked where its blocks are."""
    PARKED = auto()
    """The blocks to load are known, and not asked for."""
    LOADING = auto()
    """The blocks were asked for."""


@dataclass(slots=True, eq=False)
class StoreLoad:
    """The load of one sequence. Positions are in blocks of the sequence's chain."""

    seq: Sequence
    incoming: Incoming
    hashes: list[BlockHash]
    """The hashes of all blocks that could be used."""
    held_count: int
    load_id: int
    """The id of the look-up, then of the load."""
    asked_s: float
    """The time at which the look-up was sent."""
    state: LoadState = LoadState.FINDING
    spans: tuple[FoundSpan, ...] = ()
    first: int = 0
    end: int = 0
    """The position up to which blocks will be in place at best. It shrinks when blocks fail."""
    loading_s: float = 0.0
    """The time at which the blocks were asked for."""
    predicted_s: float = 0.0
    """The predicted duration, from `loading_s` on."""
    slots: list[int] = field(default_factory=list[int])
    checksums: list[int] = field(default_factory=list[int])
    tiers: list[Tier] = field(default_factory=list[Tier])
    copy_next: int | None = None
    """The next block to copy; None until the sequence is admitted."""
    give_up_s: float = math.inf
    was_prefetched: bool = False
    is_cut: bool = False
    """The session of the load is gone."""
    copying_count: int = 0
    """The number of copies under way."""
    copied: set[int] = field(default_factory=set[int])
    """Blocks in place that are not counted in `incoming.ready` yet."""
    corrupt: list[BlockHash] = field(default_factory=list[BlockHash])

    @property
    def is_wanted(self) -> bool:
        return self.seq.incoming is self.incoming

    @property
    def is_admitted(self) -> bool:
        return bool(self.seq.block_ids)

    @property
    def ready_end(self) -> int:
        """Blocks before this one are in the arena."""
        return self.first + len(self.slots)


@dataclass(frozen=True, slots=True)
class LoadCopy:
    """A copy of blocks [first, end) of a load."""

    load: StoreLoad
    first: int
    end: int


class ComputeReason(StrEnum):
    """Why blocks that could have been found are computed."""

    ABSENT = auto()
    """The store does not have them."""
    FASTER = auto()
    """Computing them is predicted to take no longer."""
    LATE = auto()
    """The load took too long."""
    FAILED = auto()
    """The store could not bring them, or was lost."""
    CORRUPT = auto()


class LoadCounts:
    """Counts since the start of the worker."""

    def __init__(self) -> None:
        self.started_count = 0
        """Loads that were asked for."""
        self.loaded: Counter[Tier] = Counter()
        """Blocks in place, by the tier that held them."""
        self.recomputed: Counter[ComputeReason] = Counter()
        """Blocks that were computed instead, by reason."""
