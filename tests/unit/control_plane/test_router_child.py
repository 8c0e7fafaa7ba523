"""The router's supervisor, with a small HTTP server in the router's place."""

import asyncio
import os
import signal
import sys

import pytest

from baton.core.errors import SetupError
from control_plane import child as supervision
from control_plane.reconcile import RestartPolicy
from control_plane.router_child import RouterChild, RouterChildren

POLICY = RestartPolicy(
    backoff_s=0.01, backoff_max_s=0.1, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=5.0
)

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/live" else 404)
        self.end_headers()
    def log_message(self, *_): pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"ready http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
"""


def child(script, *, silence_s=0.3):
    return RouterChild(
        [sys.executable, "-c", script], environment=dict(os.environ), policy=POLICY, silence_s=silence_s
    )


@pytest.fixture
def fast_probes(monkeypatch):
    monkeypatch.setattr(supervision, "PROBE_S", 0.1)


@pytest.fixture
def answered(fast_probes, monkeypatch):
    """Queue of the URLs that were probed and answered."""
    urls: asyncio.Queue[str] = asyncio.Queue()
    look = supervision._answers

    async def watched(client, url, *, timeout_s):
        is_answered = await look(client, url, timeout_s=timeout_s)
        if is_answered:
            urls.put_nowait(url)
        return is_answered

    monkeypatch.setattr(supervision, "_answers", watched)
    return urls


async def test_a_router_that_hangs_is_killed_and_started_anew(answered, caplog):
    router = child(SERVER)
    running = asyncio.create_task(router.run())
    async with asyncio.timeout(30):
        first_url, first_pid = await answered.get(), router.pid
        os.kill(first_pid, signal.SIGSTOP)
        while await answered.get() == first_url:
            pass
    assert router.pid != first_pid
    assert "has not answered" in caplog.text
    await router.stop(5)
    await running


async def test_a_router_that_answers_is_left_alone(answered):
    router = child(SERVER, silence_s=5.0)
    running = asyncio.create_task(router.run())
    async with asyncio.timeout(30):
        urls = {await answered.get() for _ in range(10)}
    assert len(urls) == 1
    assert urls.pop() == f"{router.url.result()}/health/live"
    await router.stop(5)
    await running


async def test_what_the_router_cannot_start_for_is_told_in_its_own_words():
    router = child("print('setup error no tokenizer in there', flush=True); raise SystemExit(2)")
    await asyncio.wait_for(router.run(), 20)
    with pytest.raises(SetupError, match=r"^no tokenizer in there$"):
        router.url.result()


async def test_who_asks_meanwhile_hears_of_the_first_that_cannot_start():
    script = "print('setup error no tokenizer in there', flush=True); raise SystemExit(2)"
    routers = RouterChildren(
        [sys.executable, "-c", script], count=2, environment=dict(os.environ), policy=POLICY, silence_s=0.3
    )
    routers.check()  # nothing is known yet
    await asyncio.wait_for(routers.run(), 20)
    with pytest.raises(SetupError, match="no tokenizer"):
        routers.check()


async def test_a_child_that_may_be_silent_for_a_moment_only_is_probed_more_often(answered, monkeypatch):
    monkeypatch.setattr(supervision, "PROBE_S", 60.0)
    router = child(SERVER, silence_s=0.4)
    running = asyncio.create_task(router.run())
    async with asyncio.timeout(30):
        assert await answered.get() == await answered.get()
    await router.stop(5)
    await running


async def test_a_slow_answer_is_an_answer(fast_probes, monkeypatch):
    """A busy router has streams to lose, so only one without any answer for `silence_s` is killed."""
    looks = []

    async def slowly(client, url, *, timeout_s):
        looks.append(timeout_s)
        return len(looks) % 2 == 0  # every other probe fails, as under load

    monkeypatch.setattr(supervision, "_answers", slowly)
    router = child(SERVER, silence_s=5.0)
    running = asyncio.create_task(router.run())
    async with asyncio.timeout(30):
        await router.url
        pid = router.pid
        while len(looks) < 12:
            await asyncio.wait({running}, timeout=0.05)
    assert router.pid == pid
    assert set(looks) == {2.5}
    await router.stop(5)
    await running
