"""The dashboard in a real browser, beside a real cluster."""

import os
import re
import signal
import threading
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from baton.core.operate import Outcome
from baton.files.token_places import new_token
from tests.certificates import SWITCH
from tests.integration.browser import LAPTOP, WALL, chromium, picture, sign_in
from tests.integration.cluster import Cluster, eventually
from tests.integration.dashboards import dashboard_url, settings_with_dashboard
from tests.integration.operating import Operator
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CLASSES = {
    "interactive": {"ttft_s": 2.5, "tpot_s": 0.4},
    "batch": {"ttft_s": 30.0},
    "hurried": {"ttft_s": 0.0001, "late": "refuse"},
}
TOKENS = {"ada": ("operate", new_token()), "vic": ("view", new_token())}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    model = make_model(folder / "tiny", "qwen3_moe", seed=3)
    settings = settings_with_dashboard(folder, TOKENS, own="ada", classes=CLASSES)
    with Cluster(model, prefill=1, decode=1, engine__kv_bytes=32 * 2**20, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def url(cluster):
    return dashboard_url(cluster)


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def ada(browser, url):
    with browser.person() as page:
        sign_in(page, url, TOKENS["ada"][1])
        yield page


class Load:
    """Requests one after the other until the block ends, distinguished by their prompts."""

    def __init__(self, cluster):
        self._cluster, self._done, self.count = cluster, threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while not self._done.is_set():
            self._cluster.complete(f"Once upon a time there were {self.count % 7} kings. " * 12, max_tokens=8)
            self.count += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join(60)


def tile(page, name):
    return page.locator(".tile", has_text=name).locator("strong")


def card(page, title):
    return page.get_by_role("region", name=title)


def test_data_advance_and_objectives_are_drawn(cluster, browser, ada):
    with Load(cluster) as load:
        expect(tile(ada, "Goodput")).not_to_have_text("0/s")
        expect(tile(ada, "TTFT p99")).to_have_text(re.compile(r"\d.* m?s"))
        expect(tile(ada, "TPOT p99")).to_have_text(re.compile(r"\d.* m?s"))
        rows = card(ada, "SLO attainment").locator("tbody tr")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("interactive")
        before = int(rows.locator("td").last.inner_text())
        count = load.count
        expect(rows.locator("td").last).not_to_have_text(str(before))
        assert load.count > count
        expect(card(ada, "Latency breakdown")).to_contain_text("prefill")
        expect(card(ada, "Features in use")).to_contain_text("Remote prefill")
        expect(card(ada, "KV tiers")).to_contain_text("host memory")
    for title, names in (
        ("Time to first token", ("interactive", "batch")),
        ("Time per output token", ("interactive",)),
    ):
        for name in names:
            label = card(ada, title).locator("svg text", has_text=re.compile(f"^{name}$"))
            expect(label).to_be_visible()
    bars = card(ada, "Expert balance").locator("svg.bars path[d*='v-']")
    expect(bars).not_to_have_count(0)
    expect(card(ada, "Expert balance")).to_contain_text(re.compile(r"#\d [\d.]+×"))
    curves = card(ada, "Load and goodput").locator("svg path[fill='var(--c-green)']")
    expect(curves).not_to_have_count(0)
    picture(ada, "load")
    assert browser.errors == []


def test_refusals_are_shown_beside_the_load_that_was_offered(cluster, ada):
    """A class has an objective that nothing can meet, so its requests are refused and count as offered."""
    asked = {"model": cluster.model, "prompt": "In no time at all. " * 40, "max_tokens": 4}
    hurried = {"x-baton-slo-class": "hurried"}
    answers = [cluster.http.post("/v1/completions", json=asked, headers=hurried) for _ in range(20)]
    assert 503 in [answer.status_code for answer in answers]
    expect(tile(ada, "Refused")).not_to_have_text("0/s")
    row = card(ada, "SLO attainment").locator("tbody tr", has_text="hurried")
    expect(row.locator("td").nth(4)).not_to_have_text("0 %")
    expect(row.locator("td").nth(3)).to_have_text("0 %")
    picture(ada, "refused")


def test_the_checks_see_what_is_in_use(cluster, ada):
    for _ in range(3):
        cluster.complete("Once upon a time there was a very old king. " * 20, max_tokens=4)
    checks = card(ada, "Features in use")
    for name in ("Remote prefill", "Prefix cache", "Cache events", "KV transport"):
        row = checks.locator(".check", has_text=name)
        expect(row.locator(".tag")).to_have_text("on")
    expect(checks.locator(".check", has_text="Mutual TLS").locator(".tag")).to_have_text(
        "on" if os.environ.get(SWITCH) else "off"
    )


def test_no_request_leaves_the_machine(browser, url, ada):
    host = urlsplit(url).netloc
    for path in ("/workers", "/requests", "/decisions", "/"):
        ada.goto(f"{url}{path}")
        ada.wait_for_selector(".page section")
    outside = [u for u in browser.requests if urlsplit(u).scheme != "data" and urlsplit(u).netloc != host]
    assert browser.requests
    assert outside == []


def test_a_stranger_gets_the_login_page_and_nothing_else(browser, url):
    with browser.person() as page:
        for path in ("/", "/workers", "/requests/x", "/decisions", "/nowhere"):
            page.goto(f"{url}{path}")
            assert urlsplit(page.url).path == "/login"
            assert page.locator("main").inner_text().startswith("Baton")
        page.get_by_label("Token").fill(new_token())
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("This token is not known")
        picture(page, "sign-in")
    with httpx.Client(base_url=url) as http:
        for path in (
            "/_nicegui_ws/socket.io/?EIO=4&transport=polling",
            "/assets/dashboard.css",
            "/openapi.json",
            "/docs",
        ):
            assert http.get(path).status_code == 401
        upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        key = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
        answer = http.get("/_nicegui_ws/socket.io/?EIO=4&transport=websocket", headers=upgrade | key)
        assert answer.status_code == 403


def test_a_drain_is_asked_about_tried_and_done(cluster, url, ada):
    operator = Operator(cluster)
    (before,) = [r for r in operator.state().replicas if r.name == "decode-0"]
    ada.goto(f"{url}/workers")
    ada.get_by_role("row", name="decode-0").get_by_role("link", name="Drain…").click()
    ask = ada.get_by_role("dialog")
    expect(ask).to_contain_text("Drain decode-0?")
    ask.get_by_role("button", name="Cancel").click()
    expect(ask).to_have_count(0)
    assert operator.state().decisions == (), "nothing happens without confirmation"
    ada.get_by_role("button", name="Drain…").click()
    ask.get_by_label("Reason").fill("a new fan")
    ask.get_by_role("checkbox", name="Dry run").click()
    ask.get_by_role("button", name="Drain", exact=True).click()
    expect(ask.get_by_role("status")).to_contain_text("advised")
    assert [d.outcome for d in operator.state().decisions] == [Outcome.ADVISED]
    ask.get_by_role("checkbox", name="Dry run").click()
    ask.get_by_role("button", name="Drain", exact=True).click()
    expect(ask.get_by_role("status")).to_contain_text("accepted")
    last = operator.state().decisions[-1]
    assert (last.who, last.reason) == ("dashboard ada", "a new fan")

    def replaced():
        found = [r for r in operator.state().replicas if r.name == "decode-0" and r.state == "running"]
        return found and found[0].worker_id != before.worker_id

    eventually("another process took its place", replaced, timeout_s=120)
    ada.goto(f"{url}/decisions")
    expect(ada.get_by_role("region", name="Decisions", exact=True)).to_contain_text("a new fan")
    expect(ada.get_by_role("region", name="Decisions", exact=True)).to_contain_text("done")


def test_who_may_only_look_is_offered_no_action(browser, url):
    with browser.person() as page:
        sign_in(page, url, TOKENS["vic"][1])
        page.goto(f"{url}/workers?ask=drain")
        expect(page.get_by_role("row", name="decode-0")).to_be_visible()
        assert page.get_by_text("Drain…").count() == 0
        assert page.get_by_role("button", name="Scale…").count() == 0
        page.goto(f"{url}/workers/decode-0?ask=drain")
        expect(page.get_by_role("dialog")).to_contain_text("allows viewing only")
        expect(page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True)).to_be_disabled()


def test_the_record_of_one_request(cluster, url, ada):
    answer = cluster.complete("The story of one request. " * 20, max_tokens=4)
    ada.goto(f"{url}/requests")
    table = ada.get_by_role("table", name="Requests")
    table.get_by_role("link", name=answer["id"][:21]).click()
    expect(ada.get_by_role("table", name="Events")).to_contain_text("placed")
    expect(ada.get_by_role("region", name="Events")).to_contain_text("completed")
    expect(ada.get_by_role("region", name=f"Request {answer['id']}")).to_contain_text("prefill-0")
    assert "The story of one request" not in ada.content(), "no prompt is shown"
    picture(ada, "request")
    ada.goto(f"{url}/requests/no-such-request")
    expect(ada.locator(".empty")).to_contain_text("No router remembers this request")


def test_keys_and_both_themes(browser, url):
    for dark, size in ((False, LAPTOP), (True, WALL)):
        with browser.person(size=size, dark=dark) as page:
            sign_in(page, url, TOKENS["ada"][1])
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness = sum(map(int, re.findall(r"\d+", paper)[:3]))
            assert (brightness < 200) is dark
            page.keyboard.press("3")
            page.wait_for_url("**/requests")
            page.wait_for_selector("table, .empty")
            page.keyboard.press("1")
            page.wait_for_selector(".tile")
            page.keyboard.press("t")
            expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
            page.keyboard.press("w")
            expect(page.get_by_role("button", name="1 h", exact=True)).to_have_attribute(
                "aria-pressed", "true"
            )
            wide = page.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            assert wide, "nothing is wider than the page"


def test_a_lost_worker_is_said(cluster, ada):
    worker = cluster.worker("decode")
    psutil.Process(worker.pid).send_signal(signal.SIGKILL)
    expect(ada.locator(".trouble", has_text="decode-0").first).to_be_visible()
    picture(ada, "lost-worker")
    cluster.await_workers(prefill=1, decode=1)
    expect(ada.locator(".trouble", has_text="decode-0")).to_have_count(0)


def processes(cluster, word):
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    return [p for p in family if word in p.cmdline()]


def test_a_lost_control_plane_and_a_lost_dashboard_are_said_and_come_back(cluster, ada):
    """People who were signed in stay signed in."""
    (control,) = [p for p in processes(cluster, "control") if "--only" in p.cmdline()]
    control.suspend()
    try:
        expect(ada.locator(".trouble", has_text="The control plane does not answer")).to_be_visible()
        picture(ada, "lost-control")
    finally:
        control.resume()
    expect(ada.locator(".trouble", has_text="The control plane does not answer")).to_have_count(0)
    (dashboard,) = processes(cluster, "dashboard")
    dashboard.suspend()
    dashboard.kill()
    expect(ada.locator("#popup")).to_be_visible()
    expect(ada.locator("#popup")).to_contain_text("Connection lost")
    picture(ada, "lost-connection")
    expect(ada.locator("#popup")).to_be_hidden()
    expect(tile(ada, "Workers serving")).to_have_text("2 of 2")
