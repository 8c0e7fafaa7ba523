"""A group of expert ranks as HTML: its figures, its ranks, and a heat map of its experts. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus
from baton.core.ids import ExpertRankId
from control_plane.dashboard import expert_strips, tables
from control_plane.dashboard.expert_groups import RankRate
from control_plane.dashboard.markup import empty, tag
from control_plane.dashboard.text import NOTHING, h, number, plural, rate, share, size, span
from control_plane.expert_summary import (
    busiest,
    has_experts_listed,
    layer_shares,
    listed,
    ready_count,
)

RANKS_SHOWN = 24
"""Most ranks of a group in its table: those that are not ready, then the busiest."""

PHASE_TAGS = {
    ExpertRankPhase.READY: "good",
    ExpertRankPhase.STARTING: "warn",
    ExpertRankPhase.DRAINING: "warn",
    ExpertRankPhase.LOST: "bad",
}

REPLICA_COLORS = ("bad", "e3", "e2", "e1", "e0")
"""Colours by number of replicas; the last one is for as many or more."""

REPLICA_KEYS = [
    (name, color, "area")
    for name, color in zip(("0", "1", "2", "3", "4 or more"), REPLICA_COLORS, strict=True)
]

Rates = Mapping[ExpertRankId, RankRate]


# --- figures ----------------------------------------------------------------------------------------


def summaries(groups: Sequence[ExpertGroupState]) -> str:
    """Return a table with a line for each group."""
    if not groups:
        return ""
    heads = (
        *(("expert ranks", ""), ("ready", "n"), ("fewest replicas", "n"), ("missing experts", "n")),
        *(("balance", "n"), ("worst layer", "n"), ("migrated", "n"), ("losses", "n")),
    )
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    rows = "".join(_summary(group) for group in groups)
    return f'<table aria-label="Expert ranks"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _summary(group: ExpertGroupState) -> str:
    missing = tag(f"{group.missing:,}", "bad") if group.missing else "0"
    cells = (
        f'<td class=nowrap><a href="/experts">{h(group.group)}</a></td>'
        f"<td class=n>{ready_count(group)} of {group.wanted_ranks}</td><td class=n>{group.replicas_min}</td>"
        f"<td class=n>{missing}</td><td class=n>{h(share(group.balance))}</td>"
        f"<td class=n>{h(share(group.balance_worst))}</td><td class=n>{h(size(group.migrated_bytes))}</td>"
        f"<td class=n>{group.losses:,}</td>"
    )
    return f"<tr>{cells}</tr>"


def figures(group: ExpertGroupState) -> str:
    total = group.layer_count * group.expert_count
    ready = ready_count(group)
    missing = tag(f"{group.missing:,}", "bad") if group.missing else tag("none", "good")
    items = [
        ("ranks ready", tag(f"{ready} of {group.wanted_ranks}", _strength(group, ready))),
        ("experts", f"{group.layer_count} layers of {group.expert_count}"),
        ("experts without a replica", missing),
        ("experts with one replica", f"{group.single:,} of {total:,}"),
        ("replicas", f"at least {group.replicas_min}, {h(number(group.replicas_mean))} on average"),
        ("balance of ranks", h(share(group.balance))),
        ("worst layer", f"{h(share(group.balance_worst))} in layer {group.balance_worst_layer}"),
        ("map", f"epoch {group.epoch}, used by {plural(group.callers, 'caller')}"),
        ("loading now", plural(group.loads_running, "expert")),
        ("migrated", f"{plural(group.migrations, 'expert')}, {h(size(group.migrated_bytes))}"),
        ("placements decided", f"{group.rebalances:,}"),
        ("ranks lost", f"{group.losses:,}"),
    ]
    return tables.facts(items)


def _strength(group: ExpertGroupState, ready: int) -> str:
    if group.missing or not ready:
        return "bad"
    return "good" if ready >= group.wanted_ranks else "warn"


# --- ranks ------------------------------------------------------------------------------------------


def ranks(group: ExpertGroupState, rates: Rates, *, may_operate: bool) -> str:
    """Return the load of all ranks as bars, and a table of ranks."""
    if not group.ranks:
        return empty("No rank of this group has started yet.")
    shown = listed(group, RANKS_SHOWN)
    heads = (
        *(("rank", ""), ("phase", ""), ("for", "n"), ("load", ""), ("of an even share", "n"), ("held", "n")),
        *(("of slots", "n"), ("rows", "n"), ("busy", "n"), ("node", ""), ("", "")),
    )
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    rows = "".join(_rank_row(group, rank, rates, may_operate=may_operate) for rank in shown)
    table = (
        f'<table aria-label="Ranks of {h(group.group)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    return f"{_rank_bars(group)}{table}{_left_out(group, shown, rates)}"


def _rank_bars(group: ExpertGroupState) -> str:
    even = [rank.load * len(group.ranks) for rank in group.ranks]
    label = f"load of {len(even)} ranks of {group.group} in multiples of an even share"
    first, last = group.ranks[0].name, group.ranks[-1].name
    ends = f"<span class=ends><i>{h(first)}</i><i>load of ranks</i><i>{h(last)}</i></span>"
    return f'<div class="heat">{ends}{expert_strips.bars(even, label)}</div>'


def _memory(group: ExpertGroupState, rank: ExpertRankStatus) -> str:
    if not rank.slots_max:
        return "its memory is not known"
    return f"it has memory for {rank.slots_max * group.layer_count:,} at most"


def _rank_row(group: ExpertGroupState, rank: ExpertRankStatus, rates: Rates, *, may_operate: bool) -> str:
    found = rates.get(rank.rank_id)
    times = rank.load * len(group.ranks)
    meter = f'<div class=meter><i style="width:{min(1.0, times / 4) * 100:.0f}%"></i></div>'
    ask = f"/experts?ask=drain&rank={quote(rank.name, safe='')}"
    link = f'<a href="{h(ask)}">Drain…</a>' if may_operate and rank.phase is ExpertRankPhase.READY else ""
    loading = f" + {rank.loading:,}" if rank.loading else ""
    where = " ".join(part for part in (rank.node[:12], rank.host) if part)
    cells = (
        f'<td class=nowrap title="{h(rank.rank_id)}">{h(rank.name)}</td>'
        f"<td>{tag(rank.phase, PHASE_TAGS[rank.phase])}</td><td class=n>{h(span(rank.for_s))}</td>"
        f'<td style="width:14%">{meter}</td><td class=n>{h(number(times, digits=2))}×</td>'
        f"<td class=n>{rank.held:,}{loading}</td>"
        f'<td class=n title="{h(_memory(group, rank))}">{rank.slots * group.layer_count:,}</td>'
        f"<td class=n>{h(rate(found and found.rows_per_s))}</td>"
        f"<td class=n>{h(share(found and found.busy))}</td>"
        f'<td class="mono nowrap">{h(where or NOTHING)}</td><td class="n nowrap">{link}</td>'
    )
    return f"<tr>{cells}</tr>"


def _left_out(group: ExpertGroupState, shown: Sequence[ExpertRankStatus], rates: Rates) -> str:
    names = {rank.name for rank in shown}
    others = [rank for rank in group.ranks if rank.name not in names]
    if not others:
        return ""
    not_ready = sum(rank.phase is not ExpertRankPhase.READY for rank in others)
    loads = [rank.load * len(group.ranks) for rank in others]
    rows = sum(rates[rank.rank_id].rows_per_s for rank in others if rank.rank_id in rates)
    state = f"{not_ready} of them not ready" if not_ready else "all ready"
    text = (
        f"{plural(len(others), 'rank')} less busy: {state}, {number(min(loads), digits=2)} to "
        f"{number(max(loads), digits=2)}× an even share, {rate(rows)} rows together"
    )
    return f'<p class="dim">{h(text)}</p>'


# --- experts ----------------------------------------------------------------------------------------


def experts(group: ExpertGroupState) -> str:
    """Return two heat maps, layers by experts: replicas and load. Larger groups are described in words."""
    if not has_experts_listed(group):
        return _in_words(group)
    width = group.expert_count
    replicas = [
        group.expert_replicas[layer * width : (layer + 1) * width] for layer in range(group.layer_count)
    ]
    few = f"{group.missing} experts have no replica, {group.single} have one"
    named = ", ".join(
        f"layer {one.layer} expert {one.expert} {number(one.times, digits=2)}×" for one in busiest(group)
    )
    load = f"the busiest: {named}" if named else "no token was routed lately"
    return (
        f"<div class=two>{_map(group, 'replicas', replicas, _replica_color, few)}"
        f"{_map(group, 'load', layer_shares(group), _load_color, load)}</div>"
    )


def _in_words(group: ExpertGroupState) -> str:
    total = group.layer_count * group.expert_count
    if not total:
        return empty("No rank has said yet how many experts the model has.")
    several = max(0, total - group.missing - group.single)
    return (
        f'<p class="dim">{group.layer_count} layers of {group.expert_count} experts are too many to draw. '
        f"{group.missing:,} of {total:,} experts have no replica, {group.single:,} have one and "
        f"{several:,} have several.</p>"
    )


def _replica_color(count: float) -> str:
    return REPLICA_COLORS[min(len(REPLICA_COLORS) - 1, max(0, int(count)))]


def _load_color(times: float) -> str:
    return f"e{bisect_right(expert_strips.BOUNDS, times)}"


def _map(
    group: ExpertGroupState,
    what: str,
    layers: Sequence[Sequence[float]],
    color: Callable[[float], str],
    said: str,
) -> str:
    """Draw a row for each layer and a cell for each expert."""
    paths: dict[str, str] = {}
    for layer, values in enumerate(layers):
        for name, begin, count in expert_strips.runs([color(value) for value in values]):
            paths[name] = paths.get(name, "") + f"M{begin} {layer}h{count}v0.9h-{count}z"
    drawn = "".join(f'<path style="fill:var(--{name})" d="{d}"/>' for name, d in sorted(paths.items()))
    label = h(f"{what} of {group.group}, {len(layers)} layers by {group.expert_count} experts; {said}")
    high = max(16, min(320, 10 * len(layers)))
    ends = f"<span class=ends><i>0</i><i>{what} by expert</i><i>{group.expert_count - 1}</i></span>"
    box = f"0 0 {group.expert_count} {len(layers)}"
    return (
        f'<div class="heat">{ends}<svg style="height:{high}px" viewBox="{box}" '
        f'preserveAspectRatio="none" role="img" aria-label="{label}">{drawn}</svg>'
        f'<p class="dim">{len(layers)} layers from above to below; {h(said)}.</p></div>'
    )
