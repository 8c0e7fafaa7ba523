"""The pages. Each page object belongs to one browser and reads data that all pages share."""

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from nicegui import app as nicegui_app
from nicegui import ui

from control_plane.dashboard import expert_panels, expert_strips, markup, overview
from control_plane.dashboard.collector import ClusterCollector
from control_plane.dashboard.detail_pages import (
    DecisionsPage,
    RequestPage,
    RequestsPage,
    WorkerPage,
    WorkersPage,
)
from control_plane.dashboard.experts_page import ExpertsPage
from control_plane.dashboard.sessions import SessionStore
from control_plane.dashboard.shell import Card, Shell, draw
from control_plane.dashboard.view import DashboardModel

ASSETS = "/assets"
DECISIONS_SHOWN = 20
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="7" fill="#0b62a4"/>'
    '<path d="M8 24 24 8" stroke="#fff" stroke-width="6" stroke-linecap="round"/></svg>'
)


def mount(app: FastAPI, collector: ClusterCollector, sessions: SessionStore) -> DashboardModel:
    """Add the pages to the application, once per process, since NiceGUI has one application."""
    dash = DashboardModel(collector, sessions)
    nicegui_app.add_static_files(ASSETS, Path(str(files("control_plane.dashboard").joinpath("assets"))))
    ui.add_head_html(f'<link rel="stylesheet" href="{ASSETS}/dashboard.css">', shared=True)

    @ui.page("/")
    def overview_page(request: Request) -> None:
        OverviewPage(dash, request)

    @ui.page("/workers")
    def workers_page(request: Request) -> None:
        WorkersPage(dash, request)

    @ui.page("/workers/{name}")
    def worker_page(request: Request, name: str) -> None:
        WorkerPage(dash, request, name)

    @ui.page("/requests")
    def requests_page(request: Request) -> None:
        RequestsPage(dash, request)

    @ui.page("/requests/{request_id}")
    def request_page(request: Request, request_id: str) -> None:
        RequestPage(dash, request, request_id)

    @ui.page("/decisions")
    def decisions_page(request: Request) -> None:
        DecisionsPage(dash, request)

    @ui.page("/experts")
    def experts_page(request: Request) -> None:
        ExpertsPage(dash, request)

    ui.run_with(
        app,
        title="Baton",
        favicon=FAVICON,
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=10.0,
        message_history_length=100,
        binding_refresh_interval=None,
    )
    return dash


class OverviewPage:
    def __init__(self, dash: DashboardModel, request: Request) -> None:
        self._dash = dash
        self._shell = shell = Shell(dash, request, tab="Overview", has_window=True)
        self._drawn: tuple[str, int] | None = None
        with shell.page:
            self._tiles = ui.html("", sanitize=False)
            with ui.element("div").classes("cards"):
                self._build()
        shell.on_tick(self._refresh)

    def _build(self) -> None:
        config = self._dash.config
        load = Card("Load and goodput")
        self._load = load.chart()
        _keys(load, [(name, color, "area") for name, color in overview.OUTCOME_COLORS.items()])
        self._ttft = self._latency(
            "Time to first token", has_objectives=any(overview.objectives(config, "ttft_s"))
        )
        self._tpot = self._latency(
            "Time per output token", has_objectives=any(overview.objectives(config, "tpot_s"))
        )
        self._attainment = Card("SLO attainment", "by class and tenant", scrolls=True).html()
        self._latency_breakdown = Card("Latency breakdown", "mean", scrolls=True).html()
        self._build_replicas()
        queues = Card("Sequences")
        self._queues = queues.chart()
        _keys(
            queues,
            [("queued", "c-red", "line"), ("waiting", "c-orange", "line"), ("running", "c-blue", "line")],
        )
        transfer = Card("KV transfer")
        self._transfer = transfer.chart()
        self._transfer_keys = transfer
        self._build_tiers()
        tokens = Card("Tokens")
        self._tokens = tokens.chart()
        _keys(tokens, [(name, color, "line") for name, color in overview.TOKEN_COLORS.items()])
        self._checks = Card("Features in use", scrolls=True).html()
        self._build_experts()

    def _latency(self, title: str, *, has_objectives: bool) -> ui.echart:
        card = Card(title)
        names = [f"p{share * 100:g}" for share in overview.PERCENTILES]
        keys = [(name, color, "line") for name, color in zip(names, overview.PERCENTILE_COLORS, strict=True)]
        _keys(card, [*keys, ("objective", "", "objective")] if has_objectives else keys)
        return card.chart()

    def _build_tiers(self) -> None:
        card = Card("KV tiers")
        with card.section, ui.element("div").classes("split"):
            self._tiers = ui.html("", sanitize=False).classes("top")
            ui.html("Prompt tokens from caches", sanitize=False).classes("name")
            self._hits = ui.echart({}, renderer="svg").classes("chart")

    def _build_experts(self) -> None:
        card = Card("Expert balance", "tokens by expert, all layers, last 5 min", scrolls=True)
        _keys(card, expert_strips.legend())
        self._expert_card = card.section.classes("wide")
        self._expert_card.set_visibility(False)
        self._experts = card.html()

    def _build_replicas(self) -> None:
        self._replica_card = Card("Workers and decisions")
        self._replicas = self._replica_card.chart()
        self._log = Card("Latest decisions", scrolls=True).html()

    def _refresh(self) -> None:
        dash, shell = self._dash, self._shell
        window = shell.window
        now = dash.now(window)
        ttft, tpot = dash.strictest("ttft_s"), dash.strictest("tpot_s")
        shell.put(
            self._tiles, markup.tiles(now, ttft, tpot, window=dash.looked_at(window), attain=dash.attain)
        )
        state = dash.collector.state
        shell.put(self._log, markup.decision_log(state.decisions if state else (), DECISIONS_SHOWN))
        step = (window.key, dash.step(window))
        if step == self._drawn:
            return
        self._drawn = step
        view = dash.view(window)
        drawn = {
            "load": self._load,
            "ttft": self._ttft,
            "tpot": self._tpot,
            "replicas": self._replicas,
            "queues": self._queues,
            "transfer": self._transfer,
            "hits": self._hits,
            "tokens": self._tokens,
        }
        for name, chart in drawn.items():
            draw(chart, view.charts[name])
        shell.put(self._transfer_keys.keys, markup.keys(_transfer_keys(view.charts["transfer"]["series"])))
        shell.put(self._replica_card.keys, markup.keys(_role_keys(view.charts["replicas"]["series"])))
        shell.put(self._attainment, markup.attainment(view.attainment, dash.attain))
        shell.put(self._latency_breakdown, markup.latency_breakdown(view.latency_breakdown))
        shell.put(self._tiers, markup.tiers(view.tiers))
        shell.put(self._checks, markup.checks(dash.checks()))
        groups = dash.experts()
        ranks = state.experts if state else ()
        self._expert_card.set_visibility(bool(groups or ranks))
        shell.put(self._experts, expert_panels.summaries(ranks) + expert_strips.expert_balance(groups))


def _keys(card: Card, items: list[tuple[str, str, str]]) -> None:
    card.keys.set_content(markup.keys(items))


def _role_keys(series: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    drawn = {s["name"] for s in series}
    return [
        (role.value, color, "line") for role, color in overview.ROLE_COLORS.items() if role.value in drawn
    ]


def _transfer_keys(series: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    colors = {**overview.BACKEND_COLORS, "from the store": "c-sky"}
    return [(s["name"], colors[s["name"]], "line") for s in series if s["name"] in colors]
