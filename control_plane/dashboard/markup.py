"""Parts of the overview as HTML. Pure; all text from elsewhere passes through `h`."""

from collections.abc import Iterable, Sequence
from math import isfinite

from baton.core.operate import Decision, Outcome
from control_plane.dashboard.checks import Check
from control_plane.dashboard.derive import AttainmentRow
from control_plane.dashboard.overview import Bar, TierUsage, TileValues
from control_plane.dashboard.problems import Trouble
from control_plane.dashboard.text import NOTHING, clock, h, number, rate, seconds, share, size
from control_plane.desired import describe

ROWS_MAX = 50

OUTCOME_TAGS = {
    Outcome.DONE: "good",
    Outcome.ACCEPTED: "warn",
    Outcome.ADVISED: "",
    Outcome.REFUSED: "bad",
    Outcome.FAILED: "bad",
}

PART_COLORS = {
    "route": "c-grey",
    "tokenize": "c-grey",
    "queue": "c-orange",
    "retries": "c-red",
    "wait": "c-yellow",
    "load": "c-sky",
    "prefill": "c-blue",
    "first_hop": "c-grey",
    "transfer": "c-green",
    "first_decode": "c-purple",
}
PART_NAMES = {"first_hop": "first hop", "first_decode": "first decode"}
CHECK_TAGS = {"on": "good", "idle": "", "off": "", "bad": "bad"}


def empty(text: str) -> str:
    return f'<div class="empty">{h(text)}</div>'


def tag(text: object, kind: str = "") -> str:
    return f'<span class="tag {kind}">{h(text)}</span>'


def tile(name: str, value: str, note: str, kind: str = "", *, beside: str = "") -> str:
    title = h(", ".join(part for part in (f"{name}: {value}", beside, note) if part))
    corner = f"<span class=beside>{h(beside)}</span>" if beside else ""
    parts = f"<span>{corner}{h(name)}</span><strong>{h(value)}</strong><span>{h(note)}</span>"
    return f'<div class="tile {kind}" title="{title}">{parts}</div>'


def _held(value: float | None, objective: float | None) -> str:
    if value is None or objective is None:
        return ""
    return "bad" if value > objective else "good"


def tiles(
    now: TileValues, ttft_slo_s: float | None, tpot_slo_s: float | None, *, window: str, attain: float
) -> str:
    """Return the tiles. `…_slo_s` is the strictest objective, None if there is none. `window` is a text like
    "last 15 min"."""
    rates = now.rates
    refused = "of offered" if rates.refused_share is None else f"{share(rates.refused_share)} of offered"
    missing = now.wanted - now.serving
    held = "" if now.attained is None else "bad" if now.attained < attain else "good"
    parts = [
        tile("Goodput", rate(rates.met), f"of {rate(rates.offered)} offered"),
        tile("SLO attainment", share(now.attained), window, held),
        tile("Refused", rate(rates.refused), refused, "bad" if rates.refused else ""),
        tile(
            "TTFT p99", seconds(now.ttft_p99_s), _objective(ttft_slo_s), _held(now.ttft_p99_s, ttft_slo_s),
            beside=f"p50 {seconds(now.ttft_p50_s, digits=2)}",
        ),
        tile(
            "TPOT p99", seconds(now.tpot_p99_s), _objective(tpot_slo_s), _held(now.tpot_p99_s, tpot_slo_s),
            beside=f"p50 {seconds(now.tpot_p50_s, digits=2)}",
        ),
        tile("Waiting", _whole(now.queued), f"{_whole(now.waiting)} at workers, {_whole(now.running)} run"),
        tile("Cache hits", share(now.hit_share), "of prompt tokens"),
        tile(
            "Workers serving", f"{now.serving} of {now.wanted}",
            f"{missing} missing" if missing > 0 else "all there", "bad" if missing > 0 else "",
        ),
    ]  # fmt: skip
    return f'<div class="tiles">{"".join(parts)}</div>'


def _objective(objective_s: float | None) -> str:
    return "no objective" if objective_s is None else f"objective {seconds(objective_s)}"


def _whole(count: float | None) -> str:
    return number(None if count is None or not isfinite(count) else round(count), digits=6)


def troubles(found: Iterable[Trouble]) -> str:
    return "".join(f'<div class="trouble {t.level}" role="status">{h(t.text)}</div>' for t in found)


def attainment(rows: Sequence[AttainmentRow], attain: float) -> str:
    if not rows:
        return empty("No request in this time.")
    has_several = len({row.model for row in rows}) > 1
    body = "".join(_attainment_row(row, attain, with_model=has_several) for row in rows[:ROWS_MAX])
    head = (
        f"<tr>{'<th>model</th>' if has_several else ''}<th>class</th><th>tenant</th><th></th>"
        "<th class=n>attained</th><th class=n>refused</th>"
        "<th class=n>requests</th></tr>"
    )
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _attainment_row(row: AttainmentRow, attain: float, *, with_model: bool) -> str:
    counts = row.counts
    attained = counts.attained or 0.0
    kind = "good" if attained >= attain else "bad"
    meter = f'<div class=meter><i class={kind} style="width:{attained * 100:.1f}%"></i></div>'
    offered = number(counts.offered, digits=4)
    model = f"<td class=nowrap>{h(row.model)}</td>" if with_model else ""
    return (
        f"<tr>{model}<td class=nowrap>{h(row.slo_class)}</td><td class=nowrap>{h(row.tenant)}</td>"
        f'<td style="width:40%">{meter}</td><td class=n>{share(attained)}</td>'
        f"<td class=n>{share(counts.refused_share)}</td><td class=n>{offered}</td></tr>"
    )


def latency_breakdown(bars: Sequence[Bar]) -> str:
    """Draw the parts of the time until the first token, and from there to the second one."""
    if not bars:
        return empty("No request has reported its latency parts yet.")
    whole_s = max(bar.begins_s + bar.length_s for bar in bars) or 1.0
    rows = "".join(_bar_row(bar, whole_s) for bar in bars)
    return f'<div class="fall">{rows}</div>'


def _bar_row(bar: Bar, whole_s: float) -> str:
    left, width = 100 * bar.begins_s / whole_s, 100 * bar.length_s / whole_s
    color = PART_COLORS[bar.name]
    style = f"left:{min(left, 99.5):.2f}%;width:{width:.2f}%;background:var(--{color})"
    name = h(PART_NAMES.get(bar.name, bar.name))
    dim = " class=dim" if not bar.length_s else ""
    length = h(seconds(bar.length_s))
    track = f'<span class=track><i style="{style}"></i></span>'
    return f"<span{dim}>{name}</span>{track}<span class=n>{length}</span>"


def tiers(found: Sequence[TierUsage]) -> str:
    if not found:
        return empty("No worker has reported its blocks yet.")
    body = "".join(_tier_row(tier) for tier in found)
    head = "<tr><th>tier</th><th></th><th class=n>used</th><th class=n>of</th><th class=n>hits</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _tier_row(tier: TierUsage) -> str:
    part = 0.0
    if tier.used_bytes is not None and tier.limit_bytes:
        part = min(1.0, tier.used_bytes / tier.limit_bytes)
    meter = f'<div class=meter><i style="width:{part * 100:.1f}%"></i></div>'
    return (
        f'<tr><td class=nowrap title="{h(tier.note)}">{h(tier.name)}</td><td style="width:34%">{meter}</td>'
        f"<td class=n>{h(size(tier.used_bytes))}</td><td class=n>{h(size(tier.limit_bytes))}</td>"
        f"<td class=n>{share(tier.hit_share)}</td></tr>"
    )


def checks(found: Sequence[Check]) -> str:
    if not found:
        return empty("No metrics were collected yet.")
    order = {"bad": 0, "on": 1, "idle": 2, "off": 3}
    rows = sorted(found, key=lambda check: order[check.verdict])
    return "".join(
        f'<div class=check title="{h(check.text)}">{tag(check.verdict, CHECK_TAGS[check.verdict])}'
        f"<span>{h(check.name)}</span><span>{h(check.text)}</span></div>"
        for check in rows
    )


def decision_log(decisions: Sequence[Decision], count: int) -> str:
    """Return the latest decisions, newest first, in short form."""
    if not decisions:
        return empty("No decision yet: there were no orders.")
    rows = "".join(_short_decision(d) for d in list(reversed(decisions))[:count])
    return f"<table class=log>{rows}</table>"


def _short_decision(d: Decision) -> str:
    what = describe(d.action)
    title = h(f"{d.who}: {what}. {d.reason} {d.text}")
    return (
        f'<tr title="{title}"><td class="num dim">#{d.number}</td><td class="when dim">{clock(d.at_s)}</td>'
        f"<td>{h(d.who)}: {h(what)}</td><td class=end>{tag(d.outcome, OUTCOME_TAGS[d.outcome])}</td></tr>"
    )


def decisions(found: Sequence[Decision]) -> str:
    """Return all decisions with all fields."""
    if not found:
        return empty("No decision yet: operators and autoscaler have given no orders.")
    head = (
        "<tr><th>#</th><th>when</th><th>who</th><th>what</th><th>outcome</th><th class=n>took</th>"
        "<th>reason</th><th>result</th></tr>"
    )
    rows = "".join(_decision_row(d) for d in reversed(found))
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _decision_row(d: Decision) -> str:
    took = NOTHING if d.done_after_s is None else seconds(d.done_after_s)
    who = f"<td class=nowrap>{h(d.who)}</td>"
    return (
        f"<tr><td class=dim>{d.number}</td><td class=nowrap>{clock(d.at_s)}</td>{who}"
        f"<td class=nowrap>{h(describe(d.action))}</td><td>{tag(d.outcome, OUTCOME_TAGS[d.outcome])}</td>"
        f"<td class=n>{h(took)}</td><td>{h(d.reason or NOTHING)}</td><td>{h(d.text)}</td></tr>"
    )


def keys(items: Iterable[tuple[str, str, str]]) -> str:
    """Return a legend of (name, colour, shape), where the shape is area, line or objective."""
    fills = {"objective": ""}
    return "".join(
        f'<span class="key {shape}"><i style="{fills.get(shape, f"background:var(--{color})")}"></i>'
        f"{h(name)}</span>"
        for name, color, shape in items
    )
