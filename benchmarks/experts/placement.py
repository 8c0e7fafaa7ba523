"""Placement compared with the baseline, in balance, in migrations and in the time of a decision."""

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.ids import NodeId
from benchmarks.experts.eplb import Integers, place_as_eplb
from control_plane.experts.place import balance_of, place
from control_plane.experts.values import EMPTY, ExpertMap, ExpertRank, Loads, RankId, Slots

BALANCE_LOSS_MAX, MIGRATION_PART_MAX, DECISION_MS_MAX = 0.01, 0.5, 50.0


class ExpertCase(msgspec.Struct, frozen=True):
    """One kind of counts on one cluster. All but the first placement start from the one before."""

    counts: str
    layers: int
    experts: int
    ranks: int
    redundancy: float
    """Part of the experts that could have a second slot."""
    groups: int
    balance: list[float]
    """Mean over layers of mean load over busiest rank's, for each placement but the first."""
    eplb_balance: list[float]
    worst_layer: float
    """The least difference of a layer's balance to the baseline's."""
    migrations: list[int]
    """Experts that ranks had to load, for each placement but the first."""
    eplb_migrations: list[int]
    decision_ms: list[float]
    """Processor time of each placement but the first, of the thread that decides."""
    wall_ms: list[float]
    """The same, as clocks on the wall see it."""
    first_decision_ms: float

    @property
    def balance_difference(self) -> float:
        """The least of all placements."""
        return min(a - b for a, b in zip(self.balance, self.eplb_balance, strict=True))

    @property
    def migration_part(self) -> float:
        """Migrations over the baseline's, the most of all placements."""
        pairs = zip(self.migrations, self.eplb_migrations, strict=True)
        return max((a / b if b else float(a > 0) for a, b in pairs), default=0.0)

    @property
    def is_within_bounds(self) -> bool:
        """Whether balance and migrations are. The time depends on the machine."""
        return self.balance_difference >= -BALANCE_LOSS_MAX and self.migration_part <= MIGRATION_PART_MAX


class ExpertReport(msgspec.Struct, frozen=True):
    cases: list[ExpertCase]
    load_before: float
    """The machine's load (one minute) when the run began."""
    load_after: float


def slots_of_ranks(experts: int, ranks: int, redundancy: float) -> Integers:
    """Slots of each rank as [R]: together those of all experts and of the redundant ones, or fewer by less
    than one. Ranks differ by one slot at most."""
    total = int(experts * (1 + redundancy))
    return np.array([total // ranks + (rank < total % ranks) for rank in range(ranks)], dtype=np.int64)


def compare(
    counts: Sequence[Loads], *, name: str, ranks: int, redundancy: float, node_ranks: int, groups: int
) -> ExpertCase:
    """Place experts for one after the other of `counts`, each [L, E]."""
    layers, experts = counts[0].shape
    sizes = slots_of_ranks(experts, ranks, redundancy)
    node_count = -(-ranks // node_ranks)
    members = [
        ExpertRank(RankId(f"rank-{number}"), NodeId(f"node-{number // node_ranks:04}"), int(size))
        for number, size in enumerate(sizes)
    ]
    current: ExpertMap | None = None
    baseline: Slots | None = None
    found: dict[str, list[float]] = {key: [] for key in ("ours", "eplb", "moved", "eplb moved", "ms", "wall")}
    first_ms, worst_layer = 0.0, 1.0
    for loads in counts:
        start_s, wall_s = time.thread_time(), time.perf_counter()
        placed = place(loads, members, current=current, group_count=groups)
        decision_ms, wall_ms = (time.thread_time() - start_s) * 1e3, (time.perf_counter() - wall_s) * 1e3
        other = place_as_eplb(loads, sizes, group_count=groups, node_count=node_count)
        other_balance = balance_of(loads, other)
        if current is None or baseline is None:
            first_ms = decision_ms
        else:
            found["ms"].append(decision_ms)
            found["wall"].append(wall_ms)
            found["ours"].append(float(placed.balance.mean()))
            found["eplb"].append(float(other_balance.mean()))
            found["moved"].append(migration_count(current.slots, placed.map.slots, experts))
            found["eplb moved"].append(migration_count(baseline, other, experts))
            worst_layer = min(worst_layer, float((placed.balance - other_balance).min()))
        current, baseline = placed.map, other
    return ExpertCase(
        counts=name,
        layers=layers,
        experts=experts,
        ranks=ranks,
        redundancy=redundancy,
        groups=groups,
        balance=found["ours"],
        eplb_balance=found["eplb"],
        worst_layer=worst_layer,
        migrations=[int(number) for number in found["moved"]],
        eplb_migrations=[int(number) for number in found["eplb moved"]],
        decision_ms=found["ms"],
        wall_ms=found["wall"],
        first_decision_ms=first_ms,
    )


def migration_count(old: Slots, new: Slots, experts: int) -> int:
    """Experts that ranks have in `new` and not in `old`, both [L, R, S]."""
    return int((_holds(new, experts) & ~_holds(old, experts)).sum())


def _holds(slots: Slots, experts: int) -> npt.NDArray[np.bool_]:
    layers, ranks, _ = slots.shape
    found = np.zeros((layers, ranks, experts + 1), dtype=np.bool_)
    found[np.arange(layers)[:, None, None], np.arange(ranks)[:, None], slots] = True
    return found[:, :, :EMPTY]


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
