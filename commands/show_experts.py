"""The tables of `baton experts show`."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.ids import ExpertRankId
from baton.files.terminal import new_console
from commands.show_cluster import expert_summary, span
from commands.show_store import size
from control_plane.expert_summary import busiest, listed

RANKS_SHOWN = 16
"""Ranks that are listed of a larger group: those that are not ready, then the busiest."""

_STYLES = {ExpertRankPhase.READY: "green", ExpertRankPhase.LOST: "red"}

RowRates = Mapping[ExpertRankId, float]
"""Rows per second by rank."""


def rows_between(
    before: Sequence[ExpertGroupState], after: Sequence[ExpertGroupState], seconds: float
) -> dict[ExpertRankId, float]:
    """Return the rows per second of each rank that was there at both times."""
    known = {rank.rank_id: rank.rows for group in before for rank in group.ranks}
    return {
        rank.rank_id: max(0, rank.rows - known[rank.rank_id]) / seconds
        for group in after
        for rank in group.ranks
        if rank.rank_id in known
    }


def show(
    groups: Sequence[ExpertGroupState],
    rates: RowRates,
    *,
    shows_all: bool = False,
    console: Console | None = None,
) -> None:
    """Print the groups. `rates` has the rows per second of ranks, empty if they were not measured."""
    console = console or new_console()
    for group in groups:
        console.print(expert_summary(group))
        for line in _lines(group):
            console.print(f"  {line}")
        shown = group.ranks if shows_all else listed(group, RANKS_SHOWN)
        console.print(_ranks(shown, rates))
        if left_out := len(group.ranks) - len(shown):
            console.print(f"  {left_out} ranks that are ready and less busy are not listed: --all")


def _lines(group: ExpertGroupState) -> list[str]:
    total = group.layer_count * group.expert_count
    if not total:
        return ["no rank has said yet how many experts the model has"]
    lines = [
        f"{group.layer_count} layers of {group.expert_count} experts; replicas: at least "
        f"{group.replicas_min}, {group.replicas_mean:.3g} on average; "
        f"{group.single:,} of {total:,} experts have only one",
        f"worst layer {group.balance_worst_layer} {group.balance_worst:.0%}; epoch {group.epoch} used by "
        f"{_plural(group.callers, 'caller')}; {_plural(group.loads_running, 'expert')} loading",
        f"since the control plane started: {_plural(group.rebalances, 'placement')}, "
        f"{_plural(group.migrations, 'expert')} migrated ({size(group.migrated_bytes)}), "
        f"{_plural(group.losses, 'rank')} lost, {_plural(group.copied, 'expert')} copied from other ranks",
    ]
    lines.append(memory_text(group))
    if found := busiest(group):
        named = ", ".join(
            f"layer {one.layer} expert {one.expert} {one.times:.2g}× an even share "
            f"on {_plural(one.replicas, 'rank')}"
            for one in found
        )
        lines.append(f"busiest: {named}")
    return lines


def memory_text(group: ExpertGroupState) -> str:
    """What the ranks' memory allows if others are lost."""
    most = [rank.slots_max for rank in group.ranks if rank.slots_max]
    if group.lacks_memory:
        return (
            f"the ranks that are there have memory for {sum(most)} of {group.expert_count} experts of each "
            "layer: what is missing is loaded when another rank has come, and workers that need it are parked"
        )
    if not most:
        return "memory: no rank has said yet for how many experts"
    span = f"{min(most)}" if min(most) == max(most) else f"{min(most)} to {max(most)}"
    return f"memory of each rank: {span} experts of each layer at most"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _ranks(ranks: Sequence[ExpertRankStatus], rates: RowRates) -> Table:
    table = Table()
    for name in ("rank", "phase", "since", "load", "experts", "rows", "node"):
        table.add_column(name, no_wrap=True, overflow="fold")
    table.columns[3].justify = table.columns[4].justify = table.columns[5].justify = "right"
    for rank in ranks:
        style = _STYLES.get(rank.phase, "yellow")
        loading = f" + {rank.loading}" if rank.loading else ""
        rate = rates.get(rank.rank_id)
        table.add_row(
            escape(rank.rank_id),
            f"[{style}]{rank.phase}[/{style}]",
            span(rank.for_s),
            f"{rank.load:.1%}",
            f"{rank.held:,}{loading}",
            f"{rank.rows:,}" if rate is None else f"{rate:,.0f}/s",
            escape(f"{rank.node[:12]} {rank.host}".strip()),
        )
    return table
