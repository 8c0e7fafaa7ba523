"""Debian's Chromium, without a window, for tests of pages."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

LAPTOP = {"width": 1366, "height": 768}
WALL = {"width": 1920, "height": 1080}
START_MS = 120_000
WAIT_MS = 60_000

expect.set_options(timeout=WAIT_MS)


def chromium_path():
    """The path of Chromium. The test is skipped if there is none, except where all tests must run."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None and not os.environ.get("CI"):
        pytest.skip("no chromium: apt-get install chromium")
    assert path is not None, "no chromium: apt-get install chromium"
    return path


class Browser:
    """Each context is a person with cookies of its own. Every request of every page is recorded."""

    def __init__(self, browser):
        self._browser = browser
        self.requests = []
        """URLs, WebSockets included."""
        self.errors = []
        """Errors that the code of pages reported."""

    @contextlib.contextmanager
    def person(self, *, size=LAPTOP, dark=False):
        scheme = "dark" if dark else "light"
        context = self._browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        context.set_default_timeout(WAIT_MS)
        context.on("request", lambda request: self.requests.append(request.url))
        page = context.new_page()
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        try:
            yield page
        finally:
            context.close()


@contextlib.contextmanager
def chromium():
    path = chromium_path()
    with sync_playwright() as playwright:
        # Chromium's own sandbox cannot be set up as root, as in a container.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=START_MS
        )
        try:
            yield Browser(browser)
        finally:
            browser.close()


def sign_in(page, url, token):
    page.goto(f"{url}/login")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector(".tile")


def picture(page, name):
    """Save a picture for people to look at, if PICTURES names a folder."""
    if folder := os.environ.get("PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))
