"""`baton serve` as a person uses it: it serves, dead processes come back, Ctrl-C leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from tests.integration.cluster import ROOT, eventually
from tests.models import make_model
from tests.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

START_S = 120.0
BACK_S = 60.0
"""Seconds from a process's death to its successor; a quiet machine takes a few."""
END_S = 60.0


class Serve:
    def __init__(self, model, *options):
        self.port = free_port()
        self.lines = []
        self.ready = threading.Event()
        command = [sys.executable, "-m", "baton", "serve", "--model", str(model), "--port", str(self.port)]
        for one in (f"engine.kv_bytes={32 * 2**20}", "engine.threads=1", "engine.self_timing_s=0.1"):
            command += ["--set", one]
        self.process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if "Baton is ready" in line:
                self.ready.set()
        self.ready.set()

    @property
    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self):
        found = {}
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if process.cmdline()[0].startswith("ray::WorkerActor"):
                    found[process.pid] = process
        return found

    def router(self):
        return next(iter(self.routers()), None)

    def routers(self):
        found = []
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "router" in process.cmdline() and "baton" in process.cmdline():
                    found.append(process)
        return found

    def complete(self):
        """The text of a greedy completion, or None while the cluster cannot."""
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{self.port}/v1/completions"
            answer = httpx.post(url, json=body, timeout=30)
            if answer.status_code == 200:
                return answer.json()["choices"][0]["text"]
        return None


@pytest.fixture
def serve(tmp_path, request):
    path = make_model(tmp_path / "tiny", "llama", seed=5)
    one = Serve(path, *getattr(request, "param", ()))
    one.model = path.name
    try:
        assert one.ready.wait(START_S)
        assert one.process.poll() is None
        yield one
    finally:
        if one.process.poll() is None:
            for process in [*one.family, psutil.Process(one.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            one.process.wait(10)
        one.reader.join(10)
        one.process.stdout.close()
        print("\n".join(one.lines))


def test_what_dies_or_hangs_comes_back_and_ctrl_c_leaves_nothing(serve):
    text = serve.complete()
    assert text
    before = serve.workers()
    # Else a worker's computing would be in one scheduling group with the person's shell.
    assert {os.getsid(pid) for pid in before} == before.keys()
    assert len(before) == 2

    killed, frozen = before.values()
    killed.send_signal(signal.SIGKILL)
    frozen.send_signal(signal.SIGSTOP)
    eventually(
        "both replaced",
        lambda: len(serve.workers()) == 2 and not serve.workers().keys() & before.keys(),
        timeout_s=BACK_S,
    )
    assert eventually("served as before", serve.complete, timeout_s=BACK_S) == text

    old = serve.router()
    old.send_signal(signal.SIGKILL)
    eventually("a new router", lambda: (r := serve.router()) and r.pid != old.pid, timeout_s=BACK_S)
    assert eventually("served as before", serve.complete, timeout_s=BACK_S) == text

    family = serve.family
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(END_S) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert sum("Baton is ready" in line for line in serve.lines) == 1


def router_of(stream, routers):
    """The process at the other end of a client's connection."""
    port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
    for process in routers:
        if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
            return process
    return None


@pytest.mark.parametrize("serve", [("--routers", "2", "--aggregated", "1", "--prefill", "0")], indirect=True)
def test_of_two_routers_one_is_killed_and_only_its_own_streams_end(serve):
    assert serve.complete()
    routers = serve.routers()
    assert len(routers) == 2
    url = f"http://127.0.0.1:{serve.port}"
    body = {"model": serve.model, "prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = {}
        while len(streams) < 2:  # connections go to either router
            http = stack.enter_context(httpx.Client(timeout=60))
            stream = stack.enter_context(http.stream("POST", f"{url}/v1/completions", json=body))
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            streams.setdefault(router_of(stream, routers), lines)
        left, killed = streams  # the one that began last cannot have ended yet
        killed.kill()
        with contextlib.suppress(httpx.TransportError):
            assert "data: [DONE]" not in list(streams[killed])
        assert "data: [DONE]" in list(streams[left])
    eventually("the port answers", serve.complete, timeout_s=BACK_S)
    eventually("two routers again", lambda: len(serve.routers()) == 2, timeout_s=BACK_S)
    assert left.is_running()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(END_S) == 0
