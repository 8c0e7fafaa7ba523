"""The metrics of groups of expert ranks."""

from collections.abc import Iterable

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.ids import ExpertRankId
from baton.telemetry import catalogue
from baton.telemetry.metric import Metric
from baton.telemetry.metrics import Meter
from control_plane.expert_summary import phase_counts

GAUGES = (
    catalogue.EXPERT_WANTED_RANKS,
    catalogue.EXPERT_REPLICAS_MIN,
    catalogue.MISSING_EXPERTS,
    catalogue.SINGLE_EXPERTS,
    catalogue.EXPERT_EPOCH,
    catalogue.EXPERT_CALLERS,
)
"""Gauges with one series per group."""

TOTALS = (
    catalogue.EXPERT_MIGRATIONS,
    catalogue.EXPERT_MIGRATED_BYTES,
    catalogue.EXPERT_RANK_LOSSES,
    catalogue.EXPERT_REBALANCES,
)
"""Counters with one series per group."""

BALANCES = ("mean", "worst")


def group_gauges(group: ExpertGroupState) -> dict[Metric, float]:
    """Return the gauges with one series per group."""
    values = (
        *(group.wanted_ranks, group.replicas_min, group.missing, group.single),
        *(group.epoch, group.callers),
    )
    return dict(zip(GAUGES, map(float, values), strict=True))


def group_totals(group: ExpertGroupState) -> dict[Metric, float]:
    """Return the counters with one series per group, as totals since the control plane started."""
    values = group.migrations, group.migrated_bytes, group.losses, group.rebalances
    return dict(zip(TOTALS, map(float, values), strict=True))


class ExpertMetrics:
    """The series of all groups. Those of groups and ranks that are gone end."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._groups: frozenset[str] = frozenset()
        self._ranks: frozenset[tuple[str, str]] = frozenset()
        """Group and name of every rank that is counted."""
        self._seen: dict[ExpertRankId, tuple[float, float]] = {}
        """Rows and busy seconds of each present rank at the last count. A successor starts from zero."""

    def count(self, groups: Iterable[ExpertGroupState]) -> None:
        """Set all series to the present state of the groups."""
        groups = tuple(groups)
        seen: dict[ExpertRankId, tuple[float, float]] = {}
        for group in groups:
            self._group(group)
            for rank in group.ranks:
                self._rank(group.group, rank)
                seen[rank.rank_id] = (float(rank.rows), rank.busy_s)
        self._forget(groups)
        self._seen = seen

    def _group(self, group: ExpertGroupState) -> None:
        meter, name = self._meter, group.group
        for phase, count in phase_counts(group).items():
            meter.set(catalogue.EXPERT_RANKS, count, group=name, phase=phase)
        for metric, value in group_gauges(group).items():
            meter.set(metric, value, group=name)
        for layers, balance in zip(BALANCES, (group.balance, group.balance_worst), strict=True):
            meter.set(catalogue.EXPERT_RANK_BALANCE, balance, group=name, layers=layers)
        for metric, total in group_totals(group).items():
            meter.inc(metric, max(0.0, total - meter.value(metric, group=name)), group=name)

    def _rank(self, group: str, rank: ExpertRankStatus) -> None:
        rows, busy_s = self._seen.get(rank.rank_id, (0.0, 0.0))
        labels = {"group": group, "rank": rank.name}
        self._meter.inc(catalogue.EXPERT_RANK_ROWS, max(0.0, rank.rows - rows), **labels)
        self._meter.inc(catalogue.EXPERT_RANK_BUSY, max(0.0, rank.busy_s - busy_s), **labels)

    def _forget(self, groups: tuple[ExpertGroupState, ...]) -> None:
        names = frozenset(group.group for group in groups)
        ranks = frozenset((group.group, rank.name) for group in groups for rank in group.ranks)
        for name in self._groups - names:
            for metric in (*GAUGES, *TOTALS):
                self._meter.forget(metric, group=name)
            for phase in ExpertRankPhase:
                self._meter.forget(catalogue.EXPERT_RANKS, group=name, phase=phase)
            for layers in BALANCES:
                self._meter.forget(catalogue.EXPERT_RANK_BALANCE, group=name, layers=layers)
        for name, rank in self._ranks - ranks:
            for metric in (catalogue.EXPERT_RANK_ROWS, catalogue.EXPERT_RANK_BUSY):
                self._meter.forget(metric, group=name, rank=rank)
        self._groups, self._ranks = names, ranks
