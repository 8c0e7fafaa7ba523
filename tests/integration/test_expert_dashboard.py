"""The page of experts in a real browser. A control plane that is made up says what there is."""

import asyncio
import contextlib
import os
import re
import select
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import msgspec
import pytest
from playwright.sync_api import expect

from baton.core.experts import ExpertRankPhase
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    Decision,
    DrainExpertRank,
    Outcome,
    Pool,
    RebalanceExperts,
    ScaleExperts,
)
from baton.core.tokens import digest_of
from baton.files.token_places import new_token
from baton.wire.server import start_server
from tests.integration.browser import LAPTOP, WALL, chromium, picture, sign_in
from tests.integration.cluster import ROOT
from tests.unit.control_plane.expert_groups import group, large, rank

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOKENS = {"ada": ("operate", new_token()), "vic": ("view", new_token())}
READY = re.compile(r"ready (http://\S+)")
START_S = 120.0


class MadeUpControl:
    """A control plane of a cluster that does not exist. Rows, migrations and losses rise as time passes."""

    def __init__(self):
        self.groups, self.orders, self._began_s = (), [], time.monotonic()

    def order(self, order):
        self.orders.append(order)
        outcome = Outcome.ADVISED if order.is_advice else Outcome.ACCEPTED
        return Decision(
            len(self.orders), time.time(), order.who, order.reason, order.action, outcome, "as told"
        )

    def state(self):
        passed = int(10 * (time.monotonic() - self._began_s))
        return ClusterState(
            "life",
            (Pool("m", {Role.PREFILL: 1, Role.DECODE: 1}),),
            (),
            experts=tuple(_later(one, passed) for one in self.groups),
        )

    async def changes(self):
        while True:
            yield self.state()
            await asyncio.sleep(0.5)


def _later(made, passed):
    ranks = tuple(
        msgspec.structs.replace(r, rows=r.rows + passed * (50 + i), busy_s=r.busy_s + passed * 0.03)
        for i, r in enumerate(made.ranks)
    )
    more = {"migrations": made.migrations + passed, "migrated_bytes": made.migrated_bytes + passed * 2**20}
    return msgspec.structs.replace(made, ranks=ranks, losses=made.losses + passed // 50, **more)


@contextlib.contextmanager
def running_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@pytest.fixture(scope="module")
def control():
    made_up = MadeUpControl()
    with running_loop() as loop:
        start = start_server("127.0.0.1", 0, operate=made_up)
        server, made_up.port = asyncio.run_coroutine_threadsafe(start, loop).result(10)
        yield made_up
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)


@pytest.fixture(scope="module")
def url(control, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("dashboard") / "tokens.txt"
    tokens.write_text("".join(f"{n} {scope} {digest_of(token)}\n" for n, (scope, token) in TOKENS.items()))
    command = [
        *(sys.executable, "-m", "baton", "dashboard", "--control", f"127.0.0.1:{control.port}"),
        *("--port", "0", "--set", f"access.tokens={tokens}", "--set", "store.host_bytes=0"),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        yield _ready(process)
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _ready(process):
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        if select.select([process.stdout], [], [], 1.0)[0] and (
            found := READY.search(process.stdout.readline())
        ):
            return found[1]
        assert process.poll() is None, "the dashboard ended"
    raise AssertionError("the dashboard does not start")


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def looking(browser, url, who="ada", **look):
    with browser.person(**look) as page:
        sign_in(page, url, TOKENS[who][1])
        page.goto(f"{url}/experts")
        yield page


def region(page, name):
    return page.get_by_role("region", name=name, exact=True)


TWO = (group(), group(role=Role.PREFILL, balance=0.55, balance_worst=0.21))


def test_figures_and_history_of_each_group_are_drawn(control, url, browser):
    control.groups = TWO
    with looking(browser, url) as page:
        for name in ("decode of m", "prefill of m"):
            expect(region(page, f"Group: {name}")).to_contain_text("4 of 4")
            expect(region(page, f"Experts: {name}").locator("svg[role=img]")).to_have_count(2)
            rows = region(page, f"Ranks: {name}").locator("tbody tr")
            expect(rows).to_have_count(4)
            expect(rows.first.locator("td").nth(7)).to_have_text(re.compile(r"\d.*/s"))
        for title in ("Balance of ranks", "Expert ranks", "Placements and losses", "Migrations"):
            curves = region(page, title).first.locator("svg path[stroke^='var(--c-']")
            expect(curves).not_to_have_count(0)
        picture(page, "experts")
    assert browser.errors == []


def test_a_large_group_fits_and_both_themes_are_readable(control, url, browser):
    ranks = list(large().ranks)
    ranks[40] = msgspec.structs.replace(ranks[40], phase=ExpertRankPhase.STARTING)
    control.groups = (large(ranks=tuple(ranks)),)
    for dark, size in ((False, LAPTOP), (True, WALL)):
        with looking(browser, url, size=size, dark=dark) as page:
            expect(region(page, "Group: decode of m")).to_contain_text("71 of 72")
            expect(region(page, "Experts: decode of m")).to_contain_text("too many to draw")
            expect(region(page, "Ranks: decode of m").locator("tbody tr")).to_have_count(24)
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) is dark
            wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert page.evaluate(wide), "nothing is wider than the page"
            picture(page, f"experts-large-{'dark' if dark else 'light'}")
            control.groups = TWO
            expect(region(page, "Group: prefill of m")).to_be_visible()
            assert page.evaluate(wide), "nothing is wider than the page"
            picture(page, f"experts-{'dark' if dark else 'light'}")
            control.groups = (large(ranks=tuple(ranks)),)


def test_a_lost_rank_and_experts_without_a_replica_are_said(control, url, browser):
    control.groups = (group(rank(0), rank(1, ExpertRankPhase.LOST), missing=9, replicas_min=0),)
    with looking(browser, url) as page:
        expect(page.locator(".trouble", has_text="holds 9 experts")).to_be_visible()
        expect(region(page, "Ranks: decode of m").locator(".tag.bad")).to_have_text("lost")
        picture(page, "experts-lost")
        control.groups = (group(),)
        expect(page.locator(".trouble", has_text="holds 9 experts")).to_have_count(0)


def test_orders_are_confirmed_and_say_who_gave_them(control, url, browser):
    control.groups = (group(),)
    with looking(browser, url) as page:
        ask = page.get_by_role("dialog")
        page.get_by_role("button", name="Rebalance…").click()
        expect(ask).to_contain_text("Rebalance decode of m?")
        ask.get_by_role("button", name="Cancel").click()
        expect(ask).to_have_count(0)
        assert control.orders == [], "nothing happens without confirmation"
        page.get_by_role("button", name="Rebalance…").click()
        ask.get_by_label("Reason").fill("a new kind of traffic")
        ask.get_by_role("button", name="Rebalance", exact=True).click()
        expect(ask.get_by_role("status")).to_contain_text("#1 accepted: as told")
        ask.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Scale…").click()
        ask.get_by_label("Expert ranks").fill("6")
        ask.get_by_role("checkbox", name="Dry run").click()
        ask.get_by_role("button", name="Scale", exact=True).click()
        expect(ask.get_by_role("status")).to_contain_text("#2 advised: as told")
        ask.get_by_role("button", name="Cancel").click()
        page.get_by_role("row", name="experts-decode-2").get_by_role("link", name="Drain…").click()
        expect(ask).to_contain_text("Drain experts-decode-2?")
        picture(page, "experts-drain")
        ask.get_by_role("button", name="Drain", exact=True).click()
        expect(ask.get_by_role("status")).to_contain_text("#3 accepted: as told")
    given = [(o.action, o.who, o.reason, o.is_advice) for o in control.orders]
    assert given == [
        (RebalanceExperts("decode of m"), "dashboard ada", "a new kind of traffic", False),
        (ScaleExperts(6, "decode of m"), "dashboard ada", "", True),
        (DrainExpertRank("experts-decode-2"), "dashboard ada", "", False),
    ]


def test_pages_arrive_with_their_content(control, url, browser):
    control.groups = (group(),)
    contents = {
        "": "TTFT p99",
        "workers": "There are no workers",
        "decisions": "The autoscaler is off",
        "experts": "4 of 4",
    }
    with looking(browser, url) as page:
        expect(region(page, "Group: decode of m")).to_contain_text("4 of 4")
        for path, content in contents.items():
            text = page.request.get(f"{url}/{path}").text()
            assert "No router follows this cluster" in text, path
            assert content in text, path


def test_who_may_only_look_is_offered_no_order(control, url, browser):
    control.groups = (group(),)
    with looking(browser, url, "vic") as page:
        expect(region(page, "Ranks: decode of m").locator("tbody tr")).to_have_count(4)
        for text in ("Drain…", "Rebalance…", "Scale…"):
            assert page.get_by_text(text).count() == 0


def test_no_request_leaves_the_machine_and_a_key_leads_to_the_page(control, url, browser):
    control.groups = (group(),)
    with looking(browser, url) as page:
        page.goto(url)
        page.wait_for_selector(".tile")
        expect(region(page, "Expert balance")).to_contain_text("decode of m")
        page.keyboard.press("5")
        page.wait_for_url("**/experts")
    outside = {u for u in browser.requests if urlsplit(u).scheme != "data"} - {
        u for u in browser.requests if urlsplit(u).netloc == urlsplit(url).netloc
    }
    assert browser.requests
    assert outside == set()
