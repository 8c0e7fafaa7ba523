"""Events, actions and times of one group of expert ranks. Pure values."""

from dataclasses import dataclass

from baton.core.experts import (
    ExpertCallerReport,
    ExpertMapUpdate,
    ExpertRankOrder,
    ExpertRankReport,
)
from baton.core.ids import ExpertRankId
from control_plane.reconcile_events import RestartPolicy


@dataclass(frozen=True, slots=True)
class ExpertGroupPolicy:
    """Times are in seconds."""

    restart: RestartPolicy
    replicas: float
    """Replicas that experts have on average, which says how many slots a rank uses."""
    rebalance_s: float
    gain_min: float
    half_life_s: float
    bytes_per_s: float
    first_wait_s: float = 30.0
    """The time from the first rank's hello for which a first placement waits for the other ranks."""
    rebuild_s: float = 3.0
    """The same where ranks of an earlier control plane were adopted, which say hello again."""
    adopt_s: float = 10.0
    """An adopted rank that has not said hello after this time is killed."""
    overcommit_max: float = 4.0
    """Ranks hold so many times their slots, where the others are lost, without waiting for successors."""
    silence_s: float = 3.0
    """A rank whose beats are missing for this long is lost."""
    suspect_silence_s: float = 0.3
    """The same for a rank that a caller suspects."""
    suspect_again_s: float = 0.45
    """A caller that suspects a rank again after this time is believed."""
    suspect_forget_s: float = 1.5
    """What a caller said counts for so long."""
    kill_again_s: float = 2.0
    """A killed process whose end is not confirmed is killed again after this time."""
    kills_max: int = 5
    """A process that was killed so often without an end counts as ended."""
    retire_s: float = 10.0
    """The time that a rank has to end when it is in no map any more."""
    caller_gone_s: float = 5.0
    """A caller whose stream ended counts as gone after this time."""
    caller_behind_s: float = 180.0
    """A caller that still uses an old epoch after this time is not waited for. Its step has ended by then."""
    slow_factor: float = 4.0
    """A rank that needs so many times as long for a row as the others' median gives up its experts."""
    slow_rows_min: int = 64
    """Rows that a rank must have computed since the last look to be judged."""
    slow_s: float = 60.0
    """The time until a slow rank is tried again. It doubles each time, up to `slow_max_s`."""
    slow_max_s: float = 600.0
    load_failures_max: int = 8
    """A rank that fails so often in a row to load experts that no rank holds is started anew."""


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertRanksWanted:
    """There shall be so many ranks."""

    count: int


@dataclass(frozen=True, slots=True)
class ExpertNodesAvoided:
    """All nodes that ranks must leave."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ExpertRankAdopted:
    """A live rank of an earlier control plane was found. Adoptions come before the first ExpertRanksWanted.
    The rank says hello again by itself."""

    rank_id: ExpertRankId


@dataclass(frozen=True, slots=True)
class ExpertRankSaid:
    rank_id: ExpertRankId
    stream: int
    """The number of the rank's stream, which rises with every one of any rank or caller."""
    report: ExpertRankReport


@dataclass(frozen=True, slots=True)
class ExpertRankHungUp:
    """The rank's stream ended."""

    rank_id: ExpertRankId
    stream: int


@dataclass(frozen=True, slots=True)
class ExpertRankExited:
    """The rank's process is dead, or could not be started."""

    rank_id: ExpertRankId
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertCallerSaid:
    caller: str
    stream: int
    report: ExpertCallerReport


@dataclass(frozen=True, slots=True)
class ExpertCallerHungUp:
    """The caller's stream ended."""

    caller: str
    stream: int


@dataclass(frozen=True, slots=True)
class ExpertsRebalanced:
    """Experts shall be placed anew now, however small the gain."""


@dataclass(frozen=True, slots=True)
class ExpertRankDrained:
    """Others shall take over what the rank holds, and its process shall end. Another rank is started as far
    as there are fewer than are wanted."""

    name: str
    wanted: int | None = None
    """So many ranks are wanted from now on; None: as many as before."""


@dataclass(frozen=True, slots=True)
class ExpertGroupPaused:
    """The control plane could not receive anything for this long."""

    for_s: float


@dataclass(frozen=True, slots=True)
class ExpertGroupTick:
    """The time that `next_tick_s` named has come."""


ExpertGroupEvent = (
    ExpertRanksWanted
    | ExpertNodesAvoided
    | ExpertRankAdopted
    | ExpertRankSaid
    | ExpertRankHungUp
    | ExpertRankExited
    | ExpertCallerSaid
    | ExpertCallerHungUp
    | ExpertsRebalanced
    | ExpertRankDrained
    | ExpertGroupPaused
    | ExpertGroupTick
)

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartExpertRank:
    """Start a process. It says hello, or ExpertRankExited follows."""

    rank_id: ExpertRankId
    ranks: int
    """Ranks that the group shall have, which divide the experts."""
    reason: str
    avoid: tuple[str, ...] = ()
    """Nodes on which it must not run."""


@dataclass(frozen=True, slots=True)
class KillExpertRank:
    """Kill a process at once. ExpertRankExited answers it, and it is repeated until then."""

    rank_id: ExpertRankId
    reason: str


@dataclass(frozen=True, slots=True)
class TellExpertRank:
    rank_id: ExpertRankId
    order: ExpertRankOrder


@dataclass(frozen=True, slots=True)
class TellExpertCallers:
    """Send a map to callers."""

    update: ExpertMapUpdate
    caller: str | None = None
    """The only caller that gets it; None: all do."""


ExpertGroupAction = StartExpertRank | KillExpertRank | TellExpertRank | TellExpertCallers
