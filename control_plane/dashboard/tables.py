"""Tables of workers, nodes and requests, and the events of one request, as HTML. Pure."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from baton.core.errors import SetupError
from baton.core.ids import WorkerId, replica_name
from baton.core.operate import AutoscaleState, ClusterState, NodeState, ReplicaState, ReplicaStatus
from baton.core.recent_requests import Moment, RecentRequest
from baton.core.shape import Shape
from baton.telemetry import catalogue as c
from control_plane.dashboard.derive import share_of
from control_plane.dashboard.markup import PART_COLORS, PART_NAMES, empty, tag
from control_plane.dashboard.overview import Bar
from control_plane.dashboard.samples import MetricsFrame, total
from control_plane.dashboard.text import NOTHING, clock, h, number, seconds, share, size, span

STATE_TAGS = {
    ReplicaState.RUNNING: "good",
    ReplicaState.SUSPECT: "bad",
    ReplicaState.WAITING: "bad",
    ReplicaState.KILLING: "bad",
}
OUTCOME_TAGS = {"completed": "good", "running": "", "cancelled": "", "invalid": "warn"}
VERDICT_TAGS = {"met": "good", "": "", "cancelled": ""}


def worker_path(name: str) -> str:
    return f"/workers/{quote(name, safe='')}"


def request_path(request_id: str) -> str:
    return f"/requests/{quote(request_id, safe='')}"


def of_worker(frame: MetricsFrame | None, name: str, worker_id: str | None) -> float | None:
    """Return a gauge of this worker, or None if the worker does not report it."""
    if frame is None or worker_id is None:
        return None
    label = ("worker", replica_name(WorkerId(worker_id)))
    values = {k: v for k, v in frame.levels.get(name, {}).items() if label in k}
    return total(values) if values else None


def held_share(frame: MetricsFrame | None, worker_id: str | None) -> float | None:
    held = of_worker(frame, c.HELD_BLOCKS.name, worker_id)
    free = of_worker(frame, c.FREE_BLOCKS.name, worker_id)
    return None if held is None or free is None else share_of(held, held + free)


def workers(state: ClusterState | None, now: MetricsFrame | None, *, may_operate: bool) -> str:
    if state is None:
        return empty("The control plane has not answered yet.")
    if not state.replicas:
        return empty("There are no workers, and none are wanted.")
    heads = (
        ("worker", ""), ("role", ""), ("shape", ""), ("state", ""), ("for", "n"), ("running", "n"),
        ("waiting", "n"), ("KV held", ""), ("node", ""), ("version", ""), ("deaths in a row", "n"), ("", ""),
    )  # fmt: skip
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    rows = "".join(_worker_row(r, now, may_operate=may_operate) for r in state.replicas)
    return f'<table aria-label="Workers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _worker_row(r: ReplicaStatus, now: MetricsFrame | None, *, may_operate: bool) -> str:
    path = worker_path(r.name)
    held = held_share(now, r.worker_id)
    meter = f'<div class=meter><i style="width:{(held or 0) * 100:.0f}%"></i></div>'
    links = f'<a href="{path}?ask=switch">Switch role…</a> &nbsp; <a href="{path}?ask=drain">Drain…</a>'
    title = f' title="{h(r.reason or r.last_exit)}"' if r.reason or r.last_exit else ""
    cells = (
        f'<td class=nowrap><a href="{path}">{h(r.name)}</a></td><td>{h(r.role)}</td>'
        f"<td{_ranks_title(r.shape)}>{h(r.shape or NOTHING)}</td>"
        f"<td{title}>{tag(r.state, STATE_TAGS.get(r.state, 'warn'))}</td><td class=n>{h(span(r.for_s))}</td>"
        f"<td class=n>{number(of_worker(now, c.RUNNING.name, r.worker_id))}</td>"
        f"<td class=n>{number(of_worker(now, c.WAITING.name, r.worker_id))}</td>"
        f'<td style="width:14%"><div title="{share(held)} of its blocks">{meter}</div></td>'
        f'<td class="mono nowrap">{h(r.node[:12] or NOTHING)}</td><td>{h(r.version)}</td>'
        f"<td class=n>{r.deaths_in_a_row}</td><td class='n nowrap'>{links if may_operate else ''}</td>"
    )
    return f"<tr>{cells}</tr>"


def ranks_text(shape: str) -> str:
    """Return what a worker's shape means, such as "4 ranks: 2 tensor × 2 pipeline"; empty if not known."""
    try:
        ranks = Shape.parse(shape)
    except SetupError:  # a worker that starts has said nothing yet; others may say anything
        return ""
    if ranks.is_single:
        return "1 rank"
    axes = (("tensor", ranks.tensor), ("pipeline", ranks.pipeline), ("context", ranks.context))
    return f"{ranks.rank_count} ranks: {' × '.join(f'{n} {name}' for name, n in axes if n > 1)}"


def _ranks_title(shape: str) -> str:
    return f' title="{h(text)}"' if (text := ranks_text(shape)) else ""


def nodes(found: Sequence[NodeState], *, may_operate: bool) -> str:
    if not found:
        return empty("Ray has not listed its nodes yet.")
    head = (
        "<tr><th>node</th><th>host</th><th>state</th><th class=n>cores</th><th class=n>GPUs</th>"
        "<th></th></tr>"
    )
    rows = "".join(_node_row(node, may_operate=may_operate) for node in found)
    return f'<table aria-label="Nodes"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _node_row(node: NodeState, *, may_operate: bool) -> str:
    state = "lost" if not node.is_alive else "drained" if node.is_drained else "in use"
    kind = {"lost": "bad", "drained": "warn", "in use": "good"}[state]
    word = "Use again…" if node.is_drained else "Drain…"
    link = f'<a href="/workers?node={quote(node.node, safe="")}">{word}</a>' if may_operate else ""
    return (
        f'<tr><td class="mono nowrap">{h(node.node[:12])}</td><td>{h(node.host)}</td>'
        f"<td>{tag(state, kind)}</td><td class=n>{number(node.cpus)}</td><td class=n>{number(node.gpus)}</td>"
        f'<td class="n nowrap">{link if node.is_alive else ""}</td></tr>'
    )


def autoscaler(found: AutoscaleState | None) -> str:
    """Show the autoscaler's present demand, forecast and sizes."""
    if found is None:
        return empty("The autoscaler is off (autoscale.mode): only operators scale this cluster.")
    mode = "carries out its decisions" if found.mode == "on" else "gives advice only, and changes nothing"
    times = f"start {span(found.start_s)}, drain {span(found.drain_s)}, role switch {span(found.switch_s)}"
    kind = "good" if found.mode == "on" else "warn"
    said = f'<p style="margin:0 0 6px">{tag(found.mode, kind)} The autoscaler {mode}. '
    if found.model:
        said = f"<h3>{h(found.model)}</h3>{said}"
    said += f'<span class="dim">Assumed times: {h(times)}.</span> {h(found.text)}</p>'
    if not found.roles:
        return said
    head = (
        "<tr><th>role</th><th class=n>demand</th><th class=n>forecast</th><th>unit</th>"
        "<th class=n>correction</th><th class=n>needed</th><th class=n>wanted</th></tr>"
    )
    rows = "".join(
        f"<tr><td>{h(r.role)}</td><td class=n>{number(r.demand)}</td><td class=n>{number(r.forecast)}</td>"
        f"<td>{h(r.unit)}</td><td class=n>{number(r.correction)}</td><td class=n>{r.needed}</td>"
        f"<td class=n>{r.wanted}</td></tr>"
        for r in found.roles
    )
    return f'{said}<table aria-label="Autoscaler"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def requests(recent_requests: Sequence[RecentRequest]) -> str:
    if not recent_requests:
        return empty(
            "No request to show. Routers keep the latest 256 requests, and 256 of those that failed."
        )
    heads = (
        ("arrived", ""), ("request", ""), ("outcome", ""), ("verdict", ""), ("class", ""), ("tenant", ""),
        ("prompt", "n"), ("cached", "n"), ("answer", "n"), ("TTFT", "n"), ("TPOT", "n"), ("took", "n"),
        ("attempts", "n"),
    )  # fmt: skip
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    rows = "".join(_request_row(record) for record in recent_requests)
    return f'<table aria-label="Requests"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _request_row(s: RecentRequest) -> str:
    is_late = s.ttft_s is not None and 0 < s.ttft_slo_s < s.ttft_s
    is_slow = s.tpot_s is not None and 0 < s.tpot_slo_s < s.tpot_s
    return (
        f'<tr><td class=nowrap>{clock(s.arrived_s)}</td><td class="mono nowrap">'
        f'<a href="{request_path(s.request_id)}">{h(_short(s.request_id))}</a></td>'
        f"<td>{tag(s.outcome, OUTCOME_TAGS.get(s.outcome, 'bad'))}</td>"
        f"<td>{_verdict(s)}</td><td>{h(s.slo_class or 'none')}</td><td>{h(s.tenant or NOTHING)}</td>"
        f"<td class=n>{_count(s.prompt_tokens)}</td><td class=n>{_count(s.cached_tokens)}</td>"
        f"<td class=n>{_count(s.completion_tokens)}</td><td class=n>{_measured(s.ttft_s, is_late)}</td>"
        f"<td class=n>{_measured(s.tpot_s, is_slow)}</td><td class=n>{h(seconds(s.took_s))}</td>"
        f"<td class=n>{s.attempts}</td></tr>"
    )


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= 22 else f"{request_id[:21]}…"


def _verdict(s: RecentRequest) -> str:
    if not s.verdict:
        return NOTHING
    return tag(s.verdict.replace("_", " "), VERDICT_TAGS.get(s.verdict, "bad"))


def _count(value: int) -> str:
    return number(value, digits=6) if value else NOTHING


def _measured(value: float | None, is_over: bool) -> str:
    text = h(seconds(value))
    return f'<strong title="above its objective">{text} ▲</strong>' if is_over else text


def facts(items: Sequence[tuple[str, str]]) -> str:
    """Show pairs of name and HTML."""
    parts = "".join(f"<div><span>{h(name)}</span>{value}</div>" for name, value in items)
    return f'<div class="facts">{parts}</div>'


def record_facts(s: RecentRequest) -> str:
    ttft, tpot = h(seconds(s.ttft_s)), h(seconds(s.tpot_s))
    items = [
        (
            "outcome",
            f"{tag(s.outcome, OUTCOME_TAGS.get(s.outcome, 'bad'))} {_verdict(s) if s.verdict else ''}",
        ),
        ("arrived", f"{clock(s.arrived_s)}, took {h(seconds(s.took_s))}"),
        ("model", h(s.model or NOTHING)),
        ("class and tenant", f"{h(s.slo_class or 'none')}, {h(s.tenant or NOTHING)}"),
        ("tokens", f"{s.prompt_tokens} prompt ({s.cached_tokens} cached), {s.completion_tokens} answer"),
        ("TTFT", f"{ttft}, predicted {h(seconds(s.predicted_ttft_s))}{_objective(s.ttft_slo_s)}"),
        ("TPOT", f"{tpot}, predicted {h(seconds(s.predicted_tpot_s))}{_objective(s.tpot_slo_s)}"),
        ("prefill", _worker_link(s.prefill_worker)),
        ("decode", _worker_link(s.decode_worker)),
        ("attempts", str(s.attempts)),
        ("x-request-id", h(s.client_request_id or NOTHING)),
    ]
    if s.error:
        items.append(("error", h(s.error)))
    return facts(items)


def _objective(value: float) -> str:
    return f", objective {h(seconds(value))}" if value else ", no objective"


def _worker_link(worker_id: str) -> str:
    """Link a worker id, which is the replica's name and a suffix for its life, to the replica's page."""
    if not worker_id:
        return NOTHING
    return f'<a href="{worker_path(worker_id.rsplit(".", 1)[0])}">{h(worker_id)}</a>'


def record_bars(s: RecentRequest) -> list[Bar]:
    bars: list[Bar] = []
    at_s = 0.0
    for part, length_s in s.parts.items():
        if part in PART_COLORS:
            bars.append(Bar(part, at_s, length_s, is_after=part in ("transfer", "first_decode")))
            at_s += length_s
    return bars


def moments(s: RecentRequest) -> str:
    if not s.moments:
        return empty("There are no events: the request ended before it was placed.")
    head = "<tr><th class=n>after</th><th>event</th><th>workers</th><th>details</th></tr>"
    rows = "".join(_moment_row(moment) for moment in s.moments)
    end = "" if s.outcome == "running" else _end_row(s)
    return f'<table class="story" aria-label="Events"><thead>{head}</thead><tbody>{rows}{end}</tbody></table>'


def _moment_row(m: Moment) -> str:
    where = ", ".join(_worker_link(worker) for worker in m.workers)
    details = [m.reason] if m.reason else []
    details += [f"took {seconds(m.seconds)}"] if m.seconds else []
    details += [size(m.bytes)] if m.bytes else []
    what = PART_NAMES.get(m.what, m.what.replace("_", " "))
    return (
        f"<tr><td class=n>{h(seconds(m.after_s))}</td><td class=nowrap>{h(what)}</td>"
        f"<td>{where or NOTHING}</td><td>{h('; '.join(details))}</td></tr>"
    )


def _end_row(s: RecentRequest) -> str:
    return (
        f"<tr><td class=n>{h(seconds(s.took_s))}</td><td class=nowrap>{h(s.outcome)}</td><td></td>"
        f"<td>{h(s.error)}</td></tr>"
    )


def accounts(values: Mapping[str, float], notes: Sequence[str]) -> str:
    """Show the status that a worker reports."""
    said = "".join(f"<p style='margin:0 0 6px'>{h(note)}</p>" for note in notes)
    items = [(name, number(value, digits=6)) for name, value in sorted(values.items()) if value]
    return said + facts(items)
