"""Events, actions and limits of a rollout of expert maps."""

from dataclasses import dataclass
from typing import NewType

from control_plane.experts.values import ExpertKey, ExpertMap, ExpertRank, Loads, RankId

LoadId = NewType("LoadId", int)
"""One attempt of one rank to load one expert."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    bytes_per_s: float
    """Bytes that a rank sends to others, and bytes that it receives, in a second. Experts that no rank holds
    are loaded without this limit."""
    spare_slots: int = 2
    """Experts that a rank has memory for beside its slots of all layers. One is kept for ranks that exchange
    experts none of which has another replica."""
    load_timeout_s: float = 60.0
    """A load that has been neither announced nor refused for so long counts as failed. Once loads have ended,
    the time that they took says how long another one may take at most."""
    load_timeout_min_s: float = 2.0
    """The shortest such time."""
    retry_s: float = 1.0
    """The time before a failed load is tried again. It doubles with every failure of the same load."""
    retry_max_s: float = 60.0
    missing_retry_s: float = 0.2
    """The longest time before a failed load of an expert that no rank holds is tried again."""
    full_retry_s: float = 5.0
    """The shortest time before a rank without memory is asked again for the same expert."""
    loads_max: int = 8
    """Loads that a rank has under way at once."""
    announce_s: float = 0.0
    """The shortest time between two maps. A lost rank is taken out of the map at once nevertheless."""
    old_maps_max: int = 16
    """Maps of earlier epochs that are told apart while they are in use."""

    def __post_init__(self) -> None:
        assert self.bytes_per_s > 0
        assert self.loads_max > 0
        assert self.old_maps_max > 0
        assert self.spare_slots >= 2


@dataclass(frozen=True, slots=True, eq=False)
class TargetSet:
    """Reach this map. It replaces the target before."""

    target: ExpertMap
    ranks: tuple[ExpertRank, ...]
    loads: Loads
    """Decayed counts as [L, E]: the most used expert is loaded first."""
    is_first: bool = False
    """Nobody is served before it is reached, so that no bytes are limited."""


@dataclass(frozen=True, slots=True)
class ExpertAnnounced:
    """A rank has loaded an expert and can compute with it."""

    load_id: LoadId


@dataclass(frozen=True, slots=True)
class ExpertNotLoaded:
    """A rank could not load an expert and has no memory in use for it."""

    load_id: LoadId
    reason: str
    is_full: bool = False
    """The rank has no memory for it."""


@dataclass(frozen=True, slots=True)
class ExpertRankJoined:
    """A rank is there that holds experts from an earlier time. Ranks that hold nothing come with a target."""

    rank: ExpertRank
    held: tuple[ExpertKey, ...]


@dataclass(frozen=True, slots=True)
class ExpertRankLost:
    rank_id: RankId


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """Somebody knows maps up to this epoch, or shall take up again what the present map names: announce it
    once more with a higher epoch."""

    above: int = 0


@dataclass(frozen=True, slots=True)
class EpochUnused:
    """Nobody uses this epoch of the map or an earlier one any more, nor will."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RolloutTick:
    pass


RolloutEvent = (
    TargetSet
    | ExpertAnnounced
    | ExpertNotLoaded
    | ExpertRankJoined
    | ExpertRankLost
    | EpochRaised
    | EpochUnused
    | RolloutTick
)


@dataclass(frozen=True, slots=True)
class LoadExpert:
    """The rank shall load an expert beside its work, and announce it. A rank that has it announces it."""

    load_id: LoadId
    rank_id: RankId
    key: ExpertKey
    source: RankId | None
    """The rank to read it from; None: the model's files."""
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class AnnounceMap:
    """A new epoch begins. The epoch before is in use until EpochUnused."""

    map: ExpertMap


@dataclass(frozen=True, slots=True)
class DropExpert:
    """The rank shall give up the memory of an expert, whether it is loaded or being loaded. The actions of a
    rank are carried out in order."""

    rank_id: RankId
    key: ExpertKey


RolloutAction = LoadExpert | AnnounceMap | DropExpert
