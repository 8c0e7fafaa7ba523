"""The chat page in a real browser: with fake workers, whose pace the test decides, and with a real model."""

import contextlib

import pytest
from playwright.async_api import async_playwright
from playwright.async_api import expect as expect_async
from playwright.sync_api import expect

from baton.core.costs import PhaseTimings
from baton.core.messages import Role
from router.tenants.key_files import write_file
from router.tenants.keys import KeyBook, KeyRecord, Tenant, digest_of, new_key
from router.text.tokenizer import Tokenizer
from tests.integration.browser import START_MS, WAIT_MS, chromium, chromium_path, picture
from tests.integration.cluster import Cluster
from tests.integration.fetched_model import fetched_model
from tests.unit.router.http_fakes import FakeWorker, cluster, make_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PICTURE = {"width": 1100, "height": 760}
PHONE = {"width": 390, "height": 780}
CAPITAL = "Name the capital of France."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reply(folder):
    return Tokenizer.load(str(folder))._rust.encode("in a land", add_special_tokens=False).ids


@contextlib.asynccontextmanager
async def opened(url, **options):
    """The page, and the errors that its code or the browser reported. There must be none at the end."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox", "--disable-gpu"], timeout=START_MS
        )
        page = await browser.new_page(**options)
        page.set_default_timeout(WAIT_MS)
        errors, hosts = [], set()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security" in said.text else None)
        page.on("request", lambda request: hosts.add("/".join(request.url.split("/")[:3])))
        await page.goto(f"{url}/")
        yield page
        await browser.close()
        assert errors == []
        assert hosts == {url}


async def ask(page, text="Hello"):
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def test_an_answer_streams_and_shows_where_it_ran(folder, reply):
    told = PhaseTimings(0.0, 0.0, 0.0)
    prefill = FakeWorker("p", Role.PREFILL, reply, timings=told)
    decode = FakeWorker("d", Role.DECODE, reply, endless=True)
    async with cluster(folder, prefill, decode) as c, opened(c.url) as page:
        await page.get_by_label("Max tokens").fill("6")
        await page.get_by_label("Seed").fill("7")
        await page.get_by_label("Temperature").fill("0.5")
        await page.get_by_label("System prompt").fill("Be brief.")
        decode.gate.clear()
        await ask(page)
        answer = page.get_by_role("article", name="Answer")
        await expect_async(answer.locator(".text")).not_to_be_empty()  # the first token, while decode waits
        await expect_async(answer.get_by_label("Timings")).to_have_count(0)
        decode.gate.set()
        timings = answer.get_by_label("Timings")
        for shown in ("TTFT", "TPOT", "tokens/s", "6 out", "p.1", "d.1", "cached"):
            await expect_async(timings).to_contain_text(shown)
        await expect_async(answer).to_contain_text("Cut off")
        started = prefill.started[0].sampling
        assert (started.seed, started.max_tokens, started.temperature) == (7, 6, 0.5)
        await answer.get_by_text("Where the time went").click()
        await expect_async(answer.get_by_role("row", name="computing the prompt")).to_be_visible()
        first = await answer.locator(".text").inner_text()
        await answer.get_by_role("button", name="Regenerate").click()
        await expect_async(page.get_by_role("article", name="Answer")).to_have_count(1)
        await expect_async(page.get_by_role("button", name="Regenerate")).to_be_visible()
        assert await answer.locator(".text").inner_text() == first
        assert prefill.started[1].tokens == prefill.started[0].tokens
        await ask(page, "More")
        await expect_async(page.get_by_role("article", name="Answer")).to_have_count(2)
        await expect_async(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        assert len(prefill.started[2].tokens) > len(prefill.started[0].tokens)  # the conversation goes along
        await page.get_by_role("button", name="New chat").click()
        await expect_async(page.get_by_role("article")).to_have_count(0)


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop_ends_the_work_on_the_worker(folder, reply, by):
    worker = FakeWorker(reply=reply, endless=True, pauses_at=5)
    async with cluster(folder, worker) as c, opened(c.url) as page:
        await ask(page)
        await worker.until(lambda: len(worker.running) == 1)
        answer = page.get_by_role("article", name="Answer")
        await expect_async(answer.locator(".text")).not_to_be_empty()
        if by == "button":
            await page.get_by_role("button", name="Stop").click()
        else:
            await page.keyboard.press("Escape")
        await worker.until(lambda: len(worker.cancelled) == 1 and not worker.running)
        await expect_async(answer).to_contain_text("Stopped.")
        await expect_async(page.locator("#said")).to_be_empty()
        await expect_async(page.get_by_role("button", name="Send")).to_be_visible()


async def test_errors_of_the_server_are_shown_as_it_says_them(folder, reply):
    worker = FakeWorker(reply=reply, endless=True)
    worker.refuses = "no such thing here"
    async with cluster(folder, worker) as c, opened(c.url) as page:
        await ask(page)
        failed = page.get_by_role("article", name="Answer").get_by_role("alert")
        await expect_async(failed).to_contain_text("no such thing here")
        await expect_async(failed).to_contain_text("status 400")
        worker.refuses = None
        await page.get_by_label("Max tokens").fill("4")
        await page.get_by_role("button", name="Regenerate").click()
        await expect_async(page.get_by_label("Timings")).to_contain_text("4 out")
        assert await failed.count() == 0


async def test_a_key_is_asked_for_and_stays_in_the_tab(folder, reply, tmp_path):
    key = new_key()
    write_file(tmp_path / "keys.json", KeyBook({"a": Tenant()}, (KeyRecord(digest_of(key), "a"),)))
    worker = FakeWorker(reply=reply)
    async with cluster(folder, worker, keys=str(tmp_path / "keys.json")) as c, opened(c.url) as page:
        await expect_async(page.get_by_role("alert")).to_contain_text("You did not provide an API key")
        field = page.get_by_label("API key")
        await expect_async(field).to_be_focused()
        await field.fill(key)
        await field.press("Tab")
        await expect_async(page.get_by_role("alert")).to_have_count(0)
        await expect_async(page.get_by_label("Model")).to_have_value("tiny")
        await ask(page)
        await expect_async(page.get_by_label("Timings")).to_be_visible()
        assert key not in await page.evaluate("JSON.stringify(localStorage)")


MARKUP = "**bold** `a<b`\n\n- one\n- two\n\n# Head\n\n```html\n<img src=x onerror=alert(1)>\n```\n\n<b>no</b>"


async def test_text_never_becomes_markup(folder):
    async with cluster(folder, FakeWorker()) as c, opened(c.url) as page:
        shown = await page.evaluate(
            "(text) => { const box = made('div', '', ...markdown(text)); return [box.textContent, "
            "[...box.querySelectorAll('*')].map((node) => node.tagName)]; }",
            MARKUP,
        )
    assert "<img src=x onerror=alert(1)>" in shown[0]
    assert "<b>no</b>" in shown[0]
    assert shown[1] == ["P", "STRONG", "CODE", "UL", "LI", "LI", "H3", "PRE", "CODE", "P"]


async def test_a_phone_shows_it_without_scrolling_sideways(folder, reply):
    worker = FakeWorker(reply=reply, endless=True)
    async with cluster(folder, worker) as c, opened(c.url, viewport=PHONE, has_touch=True) as page:
        await expect_async(page.get_by_label("System prompt")).to_be_hidden()
        await page.get_by_role("button", name="Settings").tap()
        await page.get_by_label("Max tokens").fill("9")
        await page.get_by_role("button", name="Settings").tap()
        await page.get_by_label("Message", exact=True).fill("x" * 90)
        await page.get_by_role("button", name="Send").tap()
        await expect_async(page.get_by_label("Timings")).to_contain_text("9 out")
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        bottom = await page.evaluate("document.getElementById('ask').getBoundingClientRect().bottom")
        assert bottom <= PHONE["height"]


async def test_colours_follow_the_system_until_they_are_chosen(folder):
    paper = "getComputedStyle(document.body).backgroundColor"
    async with cluster(folder, FakeWorker()) as c, opened(c.url, color_scheme="dark") as page:
        dark = await page.evaluate(paper)
        await page.get_by_role("button", name="Light").click()
        light = await page.evaluate(paper)
        assert (dark, light) == ("rgb(14, 17, 21)", "rgb(241, 243, 245)")
        await page.reload()
        assert await page.evaluate(paper) == light
        await page.get_by_role("button", name="Auto").click()
        assert await page.evaluate(paper) == dark


@pytest.mark.timeout(600)
def test_make_serves_model_answers_in_the_page():
    """The fetched model, through `baton serve`, knows the capital of France.

    "What is …?" would let rounding decide whether it answers in English: the first two tokens are as likely.
    """
    with Cluster(fetched_model()) as c:
        messages = [{"role": "user", "content": CAPITAL}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0}
        answer = c.http.post("/v1/chat/completions", json=body).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert any(line == f"Chat: {c.url}/" for line in c.log)
        with chromium() as browser:
            for dark in (False, True):
                with browser.person(dark=dark, size=PICTURE) as page:
                    page.goto(f"{c.url}/")
                    page.get_by_label("Temperature").fill("0")
                    for question in (
                        CAPITAL,
                        "Write a Python function that adds two numbers.",
                    ):
                        page.get_by_label("Message", exact=True).fill(question)
                        page.keyboard.press("Enter")
                        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
                    expect(page.get_by_role("article", name="Answer").first).to_contain_text("Paris")
                    picture(page, f"chat-{'dark' if dark else 'light'}")
            assert browser.errors == []
        c.assert_idle()
