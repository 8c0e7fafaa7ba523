"""The frame of every page: the bar with tabs, theme, time window and connection, and the present problems."""

from collections.abc import Callable, Sequence
from typing import Literal

from fastapi import Request
from nicegui import ui
from nicegui.events import KeyEventArguments

from baton.core.operate import Pool
from control_plane.dashboard import markup
from control_plane.dashboard.authentication import SESSION_KEY
from control_plane.dashboard.history import DEFAULT_WINDOW, WINDOWS, TimeWindow
from control_plane.dashboard.sessions import Session
from control_plane.dashboard.text import h, span
from control_plane.dashboard.view import DashboardModel

TABS = (
    *(("Overview", "/"), ("Workers", "/workers"), ("Requests", "/requests"), ("Decisions", "/decisions")),
    ("Experts", "/experts"),
)
REFRESH_S = 1.0
THEMES: dict[str, bool | None] = {"auto": None, "light": False, "dark": True}
YEAR_S = 365 * 24 * 3600

HELP = "1 to 5: pages. W: time window. T: theme. ?: this help. Tab and Enter reach everything else."


class Shell:
    """The frame of one open page, which arrives with its content: what would appear only with the first tick
    would move what is below it, away from under a click.
    """

    def __init__(self, dash: DashboardModel, request: Request, *, tab: str, has_window: bool = False) -> None:
        self.dash = dash
        self.session: Session = request.scope[SESSION_KEY]
        self.window = _chosen_window(request)
        theme = request.cookies.get("baton_theme", "auto")
        self._theme = theme if theme in THEMES else "auto"
        self._dark = ui.dark_mode(THEMES[self._theme])
        self._ticks: list[Callable[[], None]] = []
        self._html: dict[int, str] = {}
        ui.page_title(f"Baton: {tab.lower()}")
        with ui.element("header").classes("bar"):
            ui.html(_tabs(tab), sanitize=False).style("display: contents")
            self._model = ui.html("", sanitize=False).classes("model")
            ui.element("span").classes("push")
            self._live = ui.html("", sanitize=False).classes("live")
            if has_window:
                self._windows()
            theme_button = button(self._theme_text, self._next_theme, title="Theme (T)")
            self._theme_button = theme_button
            ui.html(_who(self.session), sanitize=False).style("display: contents")
        self.page = ui.element("main").classes("page")
        with self.page:
            self._troubles = ui.html("", sanitize=False).classes("troubles")
        self._put_frame()
        ui.keyboard(on_key=self._key, repeating=False)
        ui.timer(REFRESH_S, self.tick, immediate=False)

    @property
    def may_operate(self) -> bool:
        """True while this session may operate: a token may be revoked, or a session end, while a page is
        open."""
        return self.dash.sessions.counts(self.session) and self.session.may_operate

    def on_tick(self, call: Callable[[], None]) -> None:
        """Call `call` now, and about once a second while the page is open."""
        call()
        self._ticks.append(call)

    def put(self, element: ui.html, content: str) -> None:
        """Send the content if it has changed."""
        if self._html.get(element.id) != content:
            self._html[element.id] = content
            element.set_content(content)

    def tick(self) -> None:
        if not self.dash.sessions.counts(self.session):
            ui.navigate.to("/login")
            return
        self._put_frame()
        for call in self._ticks:
            call()

    def _put_frame(self) -> None:
        """Show models, connection and problems."""
        collector = self.dash.collector
        state = collector.state
        self.put(self._model, _models(state.pools if state is not None else ()))
        if collector.is_lost:
            live = f'<span class="dot lost"></span>control plane silent for {h(span(collector.silent_s))}'
        else:
            settled = "live" if state is not None and state.is_settled else "live, converging"
            live = f'<span class="dot"></span>{settled}'
        self.put(self._live, live)
        self.put(self._troubles, markup.troubles(self.dash.troubles()))

    # --- window, theme, keys ----------------------------------------------------------------------

    def _windows(self) -> None:
        self._window_buttons: list[tuple[TimeWindow, ui.element]] = []
        with ui.element("div").classes("switch").props('role=group aria-label="Time window (W)"'):
            for window in WINDOWS:
                element = button(window.text, lambda window=window: self._choose(window))
                self._window_buttons.append((window, element))
        self._show_window()

    def _show_window(self) -> None:
        for window, element in self._window_buttons:
            element.props["aria-pressed"] = "true" if window is self.window else "false"
            element.update()

    def _choose(self, window: TimeWindow) -> None:
        self.window = window
        self._show_window()
        _remember("baton_window", window.key)
        self.tick()

    @property
    def _theme_text(self) -> str:
        return f"Theme: {self._theme}"

    def _next_theme(self) -> None:
        names = list(THEMES)
        self._theme = names[(names.index(self._theme) + 1) % len(names)]
        self._dark.set_value(THEMES[self._theme])
        set_text(self._theme_button, self._theme_text)
        _remember("baton_theme", self._theme)

    def _key(self, event: KeyEventArguments) -> None:
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.alt or event.modifiers.meta:
            return
        key = event.key.name
        if key in ("1", "2", "3", "4", "5"):
            ui.navigate.to(TABS[int(key) - 1][1])
        elif key in ("t", "T"):
            self._next_theme()
        elif key in ("w", "W") and hasattr(self, "_window_buttons"):
            self._choose(WINDOWS[(WINDOWS.index(self.window) + 1) % len(WINDOWS)])
        elif key == "?":
            ui.notify(HELP, timeout=8000)


def _tabs(current: str) -> str:
    links = "".join(
        f'<a href="{path}"{" aria-current=page" * (name == current)} title="{name} ({number})">{name}</a>'
        for number, (name, path) in enumerate(TABS, 1)
    )
    return f'<a class="brand" href="/">Baton</a><nav class="tabs" aria-label="Pages">{links}</nav>'


def _models(pools: Sequence[Pool]) -> str:
    """Return the models; a tooltip has the text that does not fit."""
    whole = ", ".join(f"{pool.model}, version {pool.version.name}" for pool in pools)
    return f'<span title="{h(whole)}">{h(", ".join(pool.model for pool in pools))}</span>'


def _who(session: Session) -> str:
    scope = "operate" if session.may_operate else "view only"
    return (
        f'<span class="who">{h(session.name)} ({scope})</span>'
        '<form class="inline" method="post" action="/logout"><button>Sign out</button></form>'
    )


def _chosen_window(request: Request) -> TimeWindow:
    key = request.cookies.get("baton_window", "")
    return next((window for window in WINDOWS if window.key == key), DEFAULT_WINDOW)


def _remember(name: str, value: str) -> None:
    """Set a cookie in the browser. `value` must be one of our own."""
    ui.run_javascript(f'document.cookie = "{name}={value}; path=/; max-age={YEAR_S}; samesite=strict"')


def button(text: str, on_click: Callable[[], object], *, kind: str = "", title: str = "") -> ui.element:
    element = ui.element("button").classes(kind).props("type=button").on("click", lambda: on_click())
    if title:
        element.props["title"] = title
    set_text(element, text)
    return element


def set_text(element: ui.element, text: str) -> None:
    element.clear()
    with element:
        ui.html(h(text), sanitize=False, tag="span")


Kind = Literal["area", "line", "objective"]


class Card:
    """A frame with a heading, a legend and a place for its content."""

    def __init__(self, title: str, sub: str = "", *, scrolls: bool = False) -> None:
        self.section = ui.element("section").classes("card")
        self.section.props["aria-label"] = title
        with self.section:
            with ui.element("header"):
                note = f'<span class="sub">{h(sub)}</span>' if sub else ""
                ui.html(f"<h2>{h(title)}</h2>{note}", sanitize=False).style("display: contents")
                self.keys = ui.html("", sanitize=False).classes("keys")
            self.body = ui.element("div").classes("body") if scrolls else None

    def html(self) -> ui.html:
        assert self.body is not None
        with self.body:
            return ui.html("", sanitize=False)

    def chart(self) -> ui.echart:
        with self.section:
            return ui.echart({}, renderer="svg").classes("chart")


def draw(chart: ui.echart, options: dict[str, object]) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()
