"""The page of experts: the groups of expert ranks, and the load of experts by worker."""

from fastapi import Request
from nicegui import ui

from baton.core.experts import ExpertGroupState
from baton.core.ids import ExpertRankId
from control_plane.dashboard import expert_groups, expert_panels, expert_strips, markup
from control_plane.dashboard.actions import ask_drain_rank, ask_rebalance, ask_scale_experts
from control_plane.dashboard.detail_pages import PagePanel
from control_plane.dashboard.expert_groups import RankRate
from control_plane.dashboard.shell import Card, Shell, button, draw
from control_plane.dashboard.text import h
from control_plane.dashboard.view import DashboardModel

CHARTS = {
    "balance": ("Balance of ranks", expert_groups.BALANCE_KEYS),
    "ranks": ("Expert ranks", expert_groups.RANK_KEYS),
    "events": ("Placements and losses", expert_groups.EVENT_KEYS),
    "migrations": ("Migrations", expert_groups.MIGRATION_KEYS),
}
NO_RANKS = "There are no expert ranks: every worker holds all experts of its model."
NO_EXPERTS = "No served model has experts, or no token was computed yet."


class ExpertsPage:
    def __init__(self, dash: DashboardModel, request: Request) -> None:
        self._dash = dash
        self._shell = shell = Shell(dash, request, tab="Experts", has_window=True)
        self._panels: dict[str, ExpertGroupPanel] = {}
        self._drawn: tuple[str, int] | None = None
        with shell.page:
            self._none = ui.html(h(NO_RANKS), sanitize=False).classes("panel dim")
            self._groups = ui.element("div").classes("group")
            workers = PagePanel("Experts by worker", "tokens by expert, all layers, last 5 min")
            with workers.buttons:
                ui.html(markup.keys(expert_strips.legend()), sanitize=False).classes("keys")
            self._workers = workers.html()
        shell.on_tick(self._refresh)
        self._ask(request.query_params.get("ask", ""), request.query_params.get("rank", ""))

    def _ask(self, what: str, name: str) -> None:
        found = [rank for group in self._state() for rank in group.ranks if rank.name == name]
        if what == "drain" and found:
            with self._shell.page:
                ask_drain_rank(self._shell, found[0])

    def _state(self) -> tuple[ExpertGroupState, ...]:
        state = self._dash.collector.state
        return state.experts if state is not None else ()

    def _refresh(self) -> None:
        shell, groups = self._shell, self._state()
        names = [group.group for group in groups]
        if names != list(self._panels):
            self._groups.clear()
            self._drawn = None
            with self._groups:
                self._panels = {name: ExpertGroupPanel(shell, name) for name in names}
        self._none.set_visibility(not groups)
        step = (shell.window.key, self._dash.step(shell.window))
        is_new_step, self._drawn = step != self._drawn, step
        rates = self._dash.collector.rank_rates.rates()
        for group in groups:
            panel = self._panels[group.group]
            panel.show(group, rates)
            if is_new_step:
                panel.draw(group)
        if is_new_step:
            workers = expert_strips.expert_balance(self._dash.experts())
            shell.put(self._workers, workers or markup.empty(NO_EXPERTS))


class ExpertGroupPanel:
    """The part of the page about one group."""

    def __init__(self, shell: Shell, name: str) -> None:
        self._shell, self._name = shell, name
        panel = PagePanel(f"Group: {name}")
        if shell.may_operate:
            with panel.buttons:
                button("Rebalance…", self._rebalance)
                button("Scale…", self._scale, kind="primary")
        self._figures = panel.html()
        with ui.element("div").classes("charts4"):
            self._charts = {key: self._card(*CHARTS[key]) for key in CHARTS}
        experts = PagePanel(f"Experts: {name}", "replicas, and load lately")
        with experts.buttons:
            replicas, loads = markup.keys(expert_panels.REPLICA_KEYS), markup.keys(expert_strips.legend())
            keys = f"<span>replicas</span>{replicas}<span>&nbsp; load</span>{loads}"
            ui.html(keys, sanitize=False).classes("keys")
        self._experts = experts.html()
        self._ranks = PagePanel(f"Ranks: {name}").html()

    @staticmethod
    def _card(title: str, keys: list[tuple[str, str, str]]) -> ui.echart:
        card = Card(title)
        card.keys.set_content(markup.keys(keys))
        return card.chart()

    def show(self, group: ExpertGroupState, rates: dict[ExpertRankId, RankRate]) -> None:
        """Show the present figures and ranks."""
        shell = self._shell
        shell.put(self._figures, expert_panels.figures(group))
        shell.put(self._ranks, expert_panels.ranks(group, rates, may_operate=shell.may_operate))

    def draw(self, group: ExpertGroupState) -> None:
        """Draw what changes only with a step of the time window."""
        self._shell.put(self._experts, expert_panels.experts(group))
        for key, options in self._shell.dash.group_charts(self._shell.window, group.group).items():
            draw(self._charts[key], options)

    def _group(self) -> ExpertGroupState | None:
        state = self._shell.dash.collector.state
        groups = state.experts if state is not None else ()
        return next((group for group in groups if group.group == self._name), None)

    def _rebalance(self) -> None:
        if (group := self._group()) is not None:
            with self._shell.page:
                ask_rebalance(self._shell, group)

    def _scale(self) -> None:
        if (group := self._group()) is not None:
            with self._shell.page:
                ask_scale_experts(self._shell, group)
