"""Pages of workers, requests and decisions, and of a single worker or request."""

from collections.abc import Sequence

from fastapi import Request
from nicegui import background_tasks, ui

from baton.core.operate import ClusterState, ReplicaStatus
from baton.core.recent_requests import RecentRequest
from control_plane.dashboard import expert_strips, markup, tables
from control_plane.dashboard.actions import ask_drain, ask_node, ask_scale, ask_switch
from control_plane.dashboard.samples import MetricsFrame
from control_plane.dashboard.shell import Card, Shell, button, draw
from control_plane.dashboard.text import NOTHING, h, span
from control_plane.dashboard.view import DashboardModel

REQUESTS_EVERY = 2
"""Number of ticks between two queries of the routers."""


class PagePanel:
    """A full-width frame with a heading, room for buttons, and content."""

    def __init__(self, title: str, note: str = "") -> None:
        self.section = ui.element("section").classes("panel")
        self.section.props["aria-label"] = title
        with self.section:
            with ui.element("header"):
                text = f'<h2>{h(title)}</h2><span class="dim">{h(note)}</span>'
                ui.html(text, sanitize=False).style("display: contents")
                self.buttons = ui.element("span").classes("push")
            self.body = ui.element("div").classes("scroll")

    def html(self) -> ui.html:
        with self.body:
            return ui.html("", sanitize=False)


FLEET_CHARTS = {"running": "Running sequences", "steps": "Engine steps, p99", "blocks": "KV blocks held"}


class WorkersPage:
    def __init__(self, dash: DashboardModel, request: Request) -> None:
        self._dash = dash
        self._shell = shell = Shell(dash, request, tab="Workers", has_window=True)
        self._drawn: tuple[str, int] | None = None
        with shell.page:
            panel = PagePanel("Workers")
            if shell.may_operate:
                with panel.buttons:
                    button("Scale…", self._scale, kind="primary")
            self._workers = panel.html()
            with ui.element("div").classes("charts3"):
                self._cards = {name: Card(title) for name, title in FLEET_CHARTS.items()}
                self._charts = {name: card.chart() for name, card in self._cards.items()}
            self._nodes = PagePanel("Nodes").html()
        shell.on_tick(self._refresh)
        self._ask(request.query_params.get("node", ""))

    def _ask(self, node_id: str) -> None:
        state = self._dash.collector.state
        found = [n for n in state.nodes if n.node == node_id] if state is not None and node_id else []
        with self._shell.page:
            for node in found:
                ask_node(self._shell, node)

    def _scale(self) -> None:
        state = self._dash.collector.state
        if state is not None:
            with self._shell.page:
                ask_scale(self._shell, state)

    def _refresh(self) -> None:
        shell, collector = self._shell, self._dash.collector
        state, now = collector.state, collector.history.latest
        may = shell.may_operate
        shell.put(self._workers, tables.workers(state, now, may_operate=may))
        shell.put(self._nodes, tables.nodes(state.nodes if state else (), may_operate=may))
        step = (shell.window.key, self._dash.step(shell.window))
        if step != self._drawn:
            self._drawn = step
            drawn, keys = self._dash.fleet_charts(shell.window)
            for name, options in drawn.items():
                draw(self._charts[name], options)
                shell.put(self._cards[name].keys, markup.keys(keys))


class WorkerPage:
    """The page of one replica across its lives."""

    def __init__(self, dash: DashboardModel, request: Request, name: str) -> None:
        self._dash, self._name = dash, name
        self._shell = shell = Shell(dash, request, tab="Workers", has_window=True)
        self._drawn: tuple[str, int, str] | None = None
        self._asking = False
        replica = self._replica()
        with shell.page:
            panel = PagePanel(f"Worker {name}")
            if shell.may_operate and replica is not None:
                with panel.buttons:
                    button("Switch role…", lambda: self._ask("switch"))
                    button("Drain…", lambda: self._ask("drain"), kind="danger")
            self._facts = panel.html()
            with ui.element("div").classes("charts3"):
                self._charts = self._cards()
            experts = PagePanel("Experts", "tokens by expert, all layers, last 5 min")
            self._expert_panel, self._experts = experts.section, experts.html()
            self._expert_panel.set_visibility(False)
            self._accounts = PagePanel(
                "Status of the worker", "its own counters, without those that are zero"
            ).html()
        shell.on_tick(self._refresh)
        self._ask(request.query_params.get("ask", ""))

    def _cards(self) -> dict[str, ui.echart]:
        sequences, steps, blocks = Card("Sequences"), Card("Engine steps"), Card("KV blocks held")
        keys = [("running", "c-blue", "line"), ("waiting", "c-orange", "line")]
        sequences.keys.set_content(markup.keys(keys))
        steps.keys.set_content(markup.keys([("p50", "c-sky", "line"), ("p99", "c-purple", "line")]))
        return {"sequences": sequences.chart(), "steps": steps.chart(), "blocks": blocks.chart()}

    def _replica(self) -> ReplicaStatus | None:
        state = self._dash.collector.state
        return state.replica(self._name) if state is not None else None

    def _ask(self, what: str) -> None:
        replica = self._replica()
        questions = {"switch": ask_switch, "drain": ask_drain}
        if replica is not None and what in questions:
            with self._shell.page:
                questions[what](self._shell, replica)

    async def _ask_worker(self, address: str) -> None:
        try:
            status = await self._dash.collector.worker(address)
        finally:
            self._asking = False
        if status is None:
            self._shell.put(self._accounts, markup.empty("The worker does not answer."))
        else:
            self._shell.put(self._accounts, tables.accounts(status.accounts, status.notes))

    def _refresh(self) -> None:
        replica, shell = self._replica(), self._shell
        if replica is None:
            gone = "There is no worker of this name; it may have been scaled away. See the list of workers."
            shell.put(self._facts, markup.empty(gone))
            return
        now = self._dash.collector.history.latest
        shell.put(self._facts, worker_facts(replica, now))
        self._draw(replica)
        if replica.address and not self._asking:
            self._asking = True
            background_tasks.create(self._ask_worker(replica.address))

    def _draw(self, replica: ReplicaStatus) -> None:
        window, worker_id = self._shell.window, replica.worker_id or ""
        drawn = (window.key, self._dash.step(window), worker_id)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        for name, options in self._dash.worker_charts(window, worker_id).items():
            draw(self._charts[name], options)
        experts = self._dash.worker_experts(replica)
        self._expert_panel.set_visibility(experts is not None)
        self._shell.put(self._experts, "" if experts is None else expert_strips.worker_experts(experts))


def worker_facts(r: ReplicaStatus, now: MetricsFrame | None) -> str:
    held = tables.held_share(now, r.worker_id)
    state = markup.tag(r.state, tables.STATE_TAGS.get(r.state, "warn"))
    items = [
        ("state", f"{state} for {h(span(r.for_s))}"),
        ("role", h(r.role)),
        ("shape", f"{h(r.shape or NOTHING)} <span class=dim>{h(tables.ranks_text(r.shape))}</span>"),
        ("model and version", f"{h(r.model)}, version {h(r.version)}"),
        ("process", f'<span class="mono">{h(r.worker_id or NOTHING)}</span>'),
        ("node", f'<span class="mono" title="{h(r.node)}">{h(r.node[:12] or NOTHING)}</span>'),
        ("gRPC", f'<span class="mono">{h(r.address or NOTHING)}</span>'),
        ("metrics", f'<span class="mono">{h(r.metrics_address or NOTHING)}</span>'),
        ("KV blocks held", markup.share(held)),
        ("deaths in a row", str(r.deaths_in_a_row)),
        ("last exit", h(r.last_exit or NOTHING)),
        ("reason", h(r.reason or NOTHING)),
    ]
    return tables.facts(items)


FILTERS = {"all": "All", "trouble": "In trouble", "running": "Running"}


class RequestsPage:
    def __init__(self, dash: DashboardModel, request: Request) -> None:
        self._dash = dash
        self._shell = shell = Shell(dash, request, tab="Requests")
        self._filter, self._ticks, self._recent_requests = "all", 0, list[RecentRequest]()
        self._asking = False
        with shell.page:
            panel = PagePanel("Requests", "the latest of every router, without prompts and answers")
            with panel.buttons:
                self._find = ui.input(placeholder="Request id").props("outlined dense clearable")
                self._find.on("keydown.enter", self._go)
                self._buttons = {
                    key: button(text, lambda key=key: self._choose(key)) for key, text in FILTERS.items()
                }
            self._trouble, self._table = panel.html(), panel.html()
        self._show_filter()
        shell.on_tick(self._refresh)

    def _go(self) -> None:
        if wanted := str(self._find.value or "").strip():
            ui.navigate.to(tables.request_path(wanted))

    def _choose(self, key: str) -> None:
        self._filter = key
        self._show_filter()
        self._show()

    def _show_filter(self) -> None:
        for key, element in self._buttons.items():
            element.props["aria-pressed"] = "true" if key == self._filter else "false"
            element.classes(
                add="primary" if key == self._filter else "", remove="" if key == self._filter else "primary"
            )
            element.update()

    def _refresh(self) -> None:
        if self._ticks % REQUESTS_EVERY == 0 and not self._asking:
            self._asking = True
            background_tasks.create(self._look())
        self._ticks += 1

    async def _look(self) -> None:
        try:
            self._recent_requests, troubles = await self._dash.collector.recent_requests()
        finally:
            self._asking = False
        self._shell.put(self._trouble, "".join(f'<div class="trouble">{h(text)}</div>' for text in troubles))
        self._show()

    def _show(self) -> None:
        self._shell.put(self._table, tables.requests(chosen(self._recent_requests, self._filter)))


def chosen(recent_requests: Sequence[RecentRequest], filter_key: str) -> list[RecentRequest]:
    match filter_key:
        case "trouble":
            return [record for record in recent_requests if record.is_trouble]
        case "running":
            return [record for record in recent_requests if record.outcome == "running"]
        case _:
            return list(recent_requests)


class RequestPage:
    """The page of one request and its events."""

    def __init__(self, dash: DashboardModel, request: Request, request_id: str) -> None:
        self._dash, self._request_id = dash, request_id
        self._shell = shell = Shell(dash, request, tab="Requests")
        self._is_over = self._asking = False
        with shell.page:
            self._facts = PagePanel(f"Request {request_id}").html()
            with ui.element("div").classes("two"):
                self._bars = PagePanel("Latency breakdown").html()
                self._moments = PagePanel("Events").html()
        shell.on_tick(self._refresh)

    def _refresh(self) -> None:
        if not self._is_over and not self._asking:
            self._asking = True
            background_tasks.create(self._look())

    async def _look(self) -> None:
        try:
            recent_requests, troubles = await self._dash.collector.recent_requests(self._request_id)
        finally:
            self._asking = False
        shell = self._shell
        if not recent_requests:
            said = (
                "; ".join(troubles)
                or "No router remembers this request: it is too old, or its router has ended."
            )
            shell.put(self._facts, markup.empty(said))
            return
        record = recent_requests[0]
        self._is_over = record.outcome != "running"
        shell.put(self._facts, tables.record_facts(record))
        shell.put(
            self._bars,
            f'<div style="height:230px">{markup.latency_breakdown(tables.record_bars(record))}</div>',
        )
        shell.put(self._moments, tables.moments(record))


class DecisionsPage:
    def __init__(self, dash: DashboardModel, request: Request) -> None:
        self._dash = dash
        self._shell = shell = Shell(dash, request, tab="Decisions", has_window=True)
        with shell.page:
            panel = PagePanel("Decisions", "by operators and the autoscaler, the latest first")
            if shell.may_operate:
                with panel.buttons:
                    button("Scale…", self._scale, kind="primary")
            self._table = panel.html()
            with ui.element("div").classes("two"):
                self._pools = PagePanel("Desired workers").html()
                self._autoscaler = PagePanel("Autoscaler").html()
            with PagePanel("Workers and decisions").body.classes("tall"):
                self._chart = ui.echart({}, renderer="svg").classes("chart")
        self._drawn: tuple[str, int] | None = None
        shell.on_tick(self._refresh)

    def _scale(self) -> None:
        state = self._dash.collector.state
        if state is not None:
            with self._shell.page:
                ask_scale(self._shell, state)

    def _refresh(self) -> None:
        state, window = self._dash.collector.state, self._shell.window
        if (step := (window.key, self._dash.step(window))) != self._drawn:
            self._drawn = step
            draw(self._chart, self._dash.view(window).charts["replicas"])
        self._shell.put(self._table, markup.decisions(state.decisions if state else ()))
        self._shell.put(self._pools, pools(state))
        scaled = state.autoscale if state else ()
        shown = "".join(tables.autoscaler(one) for one in scaled) or tables.autoscaler(None)
        self._shell.put(self._autoscaler, shown)


def pools(state: ClusterState | None) -> str:
    if state is None:
        return markup.empty("The control plane has not answered yet.")
    items = [
        (
            pool.model,
            ", ".join(f"{count} {role}" for role, count in pool.counts.items() if count) or "no workers",
        )
        for pool in state.pools
    ]
    return tables.facts([(name, f"{h(text)}") for name, text in items])
