"""Pages are built and refreshed, without a browser, in every state of a cluster."""

import contextlib
import re
import time

import pytest
from nicegui import Client, background_tasks, ui
from nicegui.page import page
from starlette.requests import Request

from baton.config import Config, TlsConfig
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Decision,
    DrainNode,
    DrainWorker,
    NodeState,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    RouterState,
    Scale,
    SwitchRole,
)
from baton.core.recent_requests import Moment, RecentRequest
from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of
from baton.files.token_places import new_token
from baton.telemetry import catalogue as c
from baton.telemetry.metrics import Meter
from baton.wire.link import LinkBroken
from baton.wire.transport import secure
from control_plane.dashboard.actions import ask_drain, ask_node, ask_scale, ask_switch
from control_plane.dashboard.authentication import SESSION_KEY
from control_plane.dashboard.collector import ClusterCollector
from control_plane.dashboard.detail_pages import (
    DecisionsPage,
    RequestPage,
    RequestsPage,
    WorkerPage,
    WorkersPage,
)
from control_plane.dashboard.experts_page import ExpertsPage
from control_plane.dashboard.pages import OverviewPage
from control_plane.dashboard.samples import MetricsReader, frame_of
from control_plane.dashboard.sessions import SessionStore
from control_plane.dashboard.view import DashboardModel

CONFIG = Config.model_validate(
    {"slo": {"classes": {"chat": {"ttft_s": 1.0, "tpot_s": 0.1}}, "default": "chat"}}
)
RECORD = RecentRequest(
    "cmpl-1", 0.0, 1.0, "completed", "met", prompt_tokens=9, ttft_s=0.2, parts={"prefill": 0.1},
    moments=(Moment(0.1, "placed", "best chance", "0", (WorkerId("prefill-0.a"),)),),
)  # fmt: skip


def cluster(*phases):
    replicas = tuple(
        ReplicaStatus(f"decode-{i}", "m", Role.DECODE, state, 5.0, "1", WorkerId(f"decode-{i}.a"))
        for i, state in enumerate(phases)
    )
    return ClusterState(
        "life",
        (Pool("m", {Role.DECODE: 2}),),
        replicas,
        nodes=(NodeState("n1", "host-1"), NodeState("n2", "host-2", is_drained=True)),
        decisions=(Decision(7, time.time(), "ada", "a fan", Scale(Role.DECODE, 2), Outcome.DONE, "there"),),
        routers=(RouterState(RouterId("r"), "h:1", "h:2"),),
        autoscale=(AutoscaleState("advise"),),
    )


def frames(count=20):
    reader, meter = MetricsReader(m.name for m in c.CATALOGUE), Meter()
    before, now_s = {}, time.time()
    for at_s in range(count):
        meter.inc(c.SLO_REQUESTS, model="m", slo_class="chat", tenant="acme", outcome="met")
        meter.observe(c.TTFT, 0.2, model="m")
        meter.observe(c.TPOT, 0.01, model="m")
        meter.observe(c.TTFT_PART, 0.1, model="m", part="prefill")
        meter.inc(c.TRANSFER_BYTES, 1000, worker="decode-0.a", backend="cma")
        meter.set(c.HELD_BLOCKS, 5, worker="decode-0.a")
        meter.set(c.FREE_BLOCKS, 15, worker="decode-0.a")
        meter.observe(c.STEP, 0.01, worker="decode-0.a")
        table = reader.read(meter.render().decode())
        yield frame_of(now_s - count + at_s, 1.0, [(before, table)])
        before = table


class DashboardSetup:
    def __init__(self, scope):
        secure(TlsConfig())
        self.token = new_token()
        record = TokenRecord("ada", scope, digest_of(self.token))
        self.sessions = SessionStore(lambda: TokenBook([record]), now_s=time.time)
        self.collector = ClusterCollector(CONFIG, "127.0.0.1:1", now_s=lambda: 0.0)
        now_s = time.time()  # the clock stands still, since drawings change with it
        self.dash = DashboardModel(self.collector, self.sessions, unix_s=lambda: now_s)
        self.session = self.sessions.of(self.sessions.sign_in(self.token))
        self.ordered = []

    def show(self, state, *, seen=True):
        self.collector.state, self.collector.trouble = state, ""
        for frame in frames() if seen else ():
            self.collector.history.add(frame)

    def request(self, query="", **cookies):
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items()).encode()
        scope = {
            "type": "http",
            "path": "/",
            "query_string": query.encode(),
            "headers": [(b"cookie", cookie)],
        }
        return Request({**scope, SESSION_KEY: self.session})

    async def order(self, order):
        self.ordered.append(order)
        return Decision(8, 0.0, order.who, order.reason, order.action, Outcome.ACCEPTED, "on its way")


@pytest.fixture
async def setup():
    setup = DashboardSetup(Scope.OPERATE)
    yield setup
    await setup.collector._control.close()


@pytest.fixture
async def onlooker():
    setup = DashboardSetup(Scope.VIEW)
    yield setup
    await setup.collector._control.close()


@pytest.fixture(autouse=True)
def nothing_runs_by_itself(monkeypatch):
    """No server runs here, so tests themselves do the work that pages start in the background."""
    monkeypatch.setattr(background_tasks, "create", lambda coroutine: coroutine.close())


@contextlib.contextmanager
def opened():
    """Open a page as the server keeps it for one browser."""
    client = Client(page("/test"))
    try:
        with client:
            yield client
    finally:
        client.delete()


def shown(client):
    """Return all the text that a browser would have received."""
    parts = []
    for element in client.elements.values():
        parts += [str(element.props.get("innerHTML", "")), str(element.props.get("label", ""))]
    return "\n".join(parts)


def all_pages(setup):
    return [
        OverviewPage(setup.dash, setup.request()),
        WorkersPage(setup.dash, setup.request()),
        WorkerPage(setup.dash, setup.request(), "decode-0"),
        RequestsPage(setup.dash, setup.request()),
        RequestPage(setup.dash, setup.request(), "cmpl-1"),
        DecisionsPage(setup.dash, setup.request()),
        ExpertsPage(setup.dash, setup.request()),
    ]


STATES = {
    "no report": None,
    "no workers": cluster(),
    "all well": cluster(ReplicaState.RUNNING, ReplicaState.RUNNING),
    "one lost": cluster(ReplicaState.RUNNING, ReplicaState.WAITING),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("seen", [True, False])
async def test_every_page_is_built_and_refreshed_in_every_state(setup, state, seen, monkeypatch):
    with opened() as client:

        async def recent_requests(request_id=""):
            return [RECORD], []

        monkeypatch.setattr(setup.collector, "recent_requests", recent_requests)
        if state is not None:
            setup.show(state, seen=seen)
        for built in all_pages(setup):
            built._shell.tick()
            if hasattr(built, "_look"):
                await built._look()
        text = shown(client)
        assert ("does not answer" in text) is (state is None)
        assert ("decode-1 has had no process" in text) is (state is STATES["one lost"])


async def test_the_overview_says_what_was_seen(setup):
    with opened() as client:
        setup.show(STATES["all well"])
        overview = OverviewPage(setup.dash, setup.request(baton_window="5m"))
        overview._shell.tick()
        text = shown(client)
        assert "<strong>2 of 2</strong>" in text
        assert "objective 1 s" in text
        assert ">acme<" in text
        assert "ada: scale decode to 2" in text
        labels = [line["name"] for line in overview._ttft.options["series"][0]["markLine"]["data"]]
        assert labels == ["chat"]


async def test_only_what_changed_is_sent_again(setup):
    with opened():
        setup.show(STATES["all well"])
        overview = OverviewPage(setup.dash, setup.request())
        overview._shell.tick()
        drawn = overview._load.options["series"]
        overview._shell.tick()
        assert overview._load.options["series"] is drawn


async def test_a_session_that_ended_leaves_the_page(setup, monkeypatch):
    with opened():
        setup.show(STATES["all well"])
        overview = OverviewPage(setup.dash, setup.request())
        gone = []
        monkeypatch.setattr(ui.navigate, "to", gone.append)
        setup.session.began_s -= 1e9
        overview._shell.tick()
        assert gone == ["/login"]


@pytest.mark.parametrize(
    ("ask", "action"),
    [
        (lambda shell, state: ask_drain(shell, state.replicas[0]), DrainWorker("decode-0")),
        (lambda shell, state: ask_switch(shell, state.replicas[0]), SwitchRole("decode-0", Role.PREFILL)),
        (lambda shell, state: ask_scale(shell, state), Scale(Role.DECODE, 2, "m")),
        (lambda shell, state: ask_node(shell, state.nodes[0]), DrainNode("n1")),
        (lambda shell, state: ask_node(shell, state.nodes[1]), DrainNode("n2", is_undone=True)),
    ],
    ids=["drain", "switch", "scale", "drain node", "use node"],
)
async def test_an_order_is_given_once_it_is_confirmed(setup, monkeypatch, ask, action):
    with opened() as client:
        state = STATES["all well"]
        setup.show(state)
        workers = WorkersPage(setup.dash, setup.request())
        monkeypatch.setattr(setup.collector, "order", setup.order)
        asked = ask(workers._shell, state)
        assert setup.ordered == []
        asked.dry.set_value(True)
        await asked.send()
        asked.dry.set_value(False)
        await asked.send()
        assert [(o.action, o.is_advice, o.who) for o in setup.ordered] == [
            (action, True, "dashboard ada"),
            (action, False, "dashboard ada"),
        ]
        assert "#8 accepted: on its way" in shown(client)


async def test_every_link_of_a_workers_row_opens_its_dialog(setup):
    setup.show(STATES["all well"])
    with opened() as client:
        WorkersPage(setup.dash, setup.request())._shell.tick()
        links = re.findall(r"/workers/decode-0\?(ask=\w+)", shown(client))
    assert len(links) == 2
    for link in links:
        with opened() as client:
            WorkerPage(setup.dash, setup.request(link), "decode-0")
            assert "Reason (kept in the log)" in shown(client), link


def numbers(client):
    return [element for element in client.elements.values() if isinstance(element, ui.number)]


async def test_what_an_order_would_cost_is_said_before_it_is_given(setup):
    with opened() as client:
        state = STATES["all well"]
        setup.show(state)
        workers = WorkersPage(setup.dash, setup.request())
        ask_scale(workers._shell, state)
        assert "worker left" not in shown(client)
        (count,) = numbers(client)
        count.set_value(0)
        assert "m will have no worker left" in shown(client)
        count.set_value(1)
        assert "worker left" not in shown(client)


async def test_who_may_only_look_orders_nothing(onlooker, monkeypatch):
    with opened() as client:
        setup = onlooker
        setup.show(STATES["all well"])
        workers = WorkersPage(setup.dash, setup.request())
        workers._shell.tick()
        assert "Scale…" not in shown(client)
        monkeypatch.setattr(setup.collector, "order", setup.order)
        asked = ask_drain(workers._shell, STATES["all well"].replicas[0])
        await asked.send()
        assert setup.ordered == []
        assert "allows viewing only" in shown(client)


async def test_an_order_that_does_not_arrive_is_said(setup, monkeypatch):
    with opened() as client:

        async def refuse(order):
            raise LinkBroken("127.0.0.1:1: connection refused")

        setup.show(STATES["all well"])
        workers = WorkersPage(setup.dash, setup.request())
        monkeypatch.setattr(setup.collector, "order", refuse)
        await ask_drain(workers._shell, STATES["all well"].replicas[0]).send()
        assert "try again: 127.0.0.1:1: connection refused" in shown(client)
