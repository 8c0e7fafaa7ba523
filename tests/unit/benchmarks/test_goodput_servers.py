"""Starting and ending compared servers: real processes, with a server of a few lines in place of a peer."""

import os
import select

import pytest

from baton.core.errors import SetupError
from benchmarks import goodput_servers
from benchmarks.goodput_variants import Process, ServerVariant

SERVER = """
import http.server, os, sys, subprocess
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"])); self.do_GET()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def a_variant(pids):
    server = Process("behind", ["{python}", "-c", SERVER, "{port}", str(pids)], ready="/health")
    command = ["{python}", "-m", "benchmarks.proxies.round_robin", "--port", "{port}"]
    front = Process("front", [*command, "--to", "127.0.0.1:{port:behind}"])
    return ServerVariant("pair", [server, front])


def has_ended(pidfd):
    return bool(select.select([pidfd], [], [], 10)[0])


async def test_a_variant_answers_behind_its_front_and_leaves_no_process(tmp_path):
    cores = sorted(os.sched_getaffinity(0))[:1]
    pids = tmp_path / "pids"
    async with goodput_servers.running(a_variant(pids), model=tmp_path, cores=cores, logs=tmp_path) as server:
        pid, child = map(int, pids.read_text().split())
        watched = [os.pidfd_open(one) for one in (pid, child)]
        assert os.sched_getaffinity(pid) == set(cores)
        await goodput_servers.settle(server, "bench", within_s=10)
    assert all(map(has_ended, watched))
    for one in watched:
        os.close(one)


async def test_a_process_that_ends_at_its_start_is_told_with_its_log(tmp_path):
    broken = Process("broken", ["{python}", "-c", "raise SystemExit('no such model')"], ready="/health")
    with pytest.raises(SetupError, match="no such model"):
        async with goodput_servers.running(
            ServerVariant("broken", [broken]), model=tmp_path, cores=[0], logs=tmp_path
        ):
            pass
