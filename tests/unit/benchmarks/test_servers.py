"""Servers that take turns: real processes, with a server of a few lines in place of Baton and its peers."""

import json
import os
import sys

import msgspec
import psutil
import pytest

from baton.core.errors import SetupError
from benchmarks import peers, servers
from benchmarks.closed_loop import LoadResult
from benchmarks.peers import Peer
from benchmarks.servers import ServerComparison, ServerResult, loads_of, ratios

SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        line = {"pid": os.getpid(), "child": child.pid, "prompt": body["prompt"]}
        with open(sys.argv[2], "a") as seen:
            seen.write(json.dumps(line) + "\\n")
        count = body["max_tokens"]
        events = [{"choices": [{"text": "x", "index": 0}]}] * count
        events.append({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": count}})
        events[count - 1] = {"choices": [{"text": "x", "index": 0, "finish_reason": "length"}]}
        text = "".join(f"data: {json.dumps(e)}\\n\\n" for e in events) + "data: [DONE]\\n\\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""

DIES = """
import http.server, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answered = 0
    def do_POST(self):
        Answer.answered += 1
        if Answer.answered > 1:
            print("out of memory", flush=True)
            os._exit(9)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def a_peer(name, folder):
    return Peer(name, (sys.executable, "-c", SERVER, "{port}", str(folder / f"{name}.jsonl")))


def asked(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def status(pid):
    return psutil.Process(pid).status()


async def test_a_paused_server_stands_still_with_its_children_and_goes_on(tmp_path):
    load = loads_of([1], 8, 2)[0]
    peer = a_peer("one", tmp_path)
    async with peers.running(peer, cores=sorted(os.sched_getaffinity(0))[:1], log=tmp_path / "log") as server:
        pids = asked(tmp_path, "one")[0]
        await server.pause()
        assert status(pids["pid"]) == status(pids["child"]) == psutil.STATUS_STOPPED
        server.resume()
        result = await servers.closed_loop.run(server.url, peer.model_name, load, seed=0)
        assert result.requests == load.requests
        await server.pause()
    assert not psutil.pid_exists(pids["pid"]), "a paused server ends too"


@pytest.mark.parametrize("keeps_all", [True, False])
async def test_servers_take_turns_with_the_same_prompts_and_none_twice(tmp_path, keeps_all):
    names = ["baton", "vllm"]
    told: list[str] = []
    comparison = ServerComparison(loads_of([1, 2], 8, 2), 2, keeps_all, told.append)
    found = await servers.compare([a_peer(name, tmp_path) for name in names], comparison, core_counts=[1])
    assert [(r.peer, r.load.concurrency, r.rounds) for r in found] == (
        [("baton", 1, 2), ("vllm", 1, 2), ("baton", 2, 2), ("vllm", 2, 2)]
        if keeps_all
        else [("baton", 1, 2), ("baton", 2, 2), ("vllm", 1, 2), ("vllm", 2, 2)]
    )
    assert sum("starting" in line for line in told) == (2 if keeps_all else 4)
    of_loads = {}
    for name in names:
        lines = asked(tmp_path, name)
        assert len({line["pid"] for line in lines}) == (1 if keeps_all else 2)
        prompts = [tuple(line["prompt"]) for line in lines if line["prompt"] != [200] * 8]
        assert len(set(prompts)) == len(prompts), "no prompt comes twice, so no prefix cache helps"
        of_loads[name] = set(prompts)
        assert len(prompts) >= 2 * 2 * servers.REQUESTS_MIN
    assert len(of_loads["baton"] & of_loads["vllm"]) >= 2 * 2 * servers.REQUESTS_MIN
    order = [line.split(",")[0].strip() for line in told if "in flight" in line]
    if keeps_all:
        assert order == ["baton", "vllm"] * 2 + ["vllm", "baton"] * 2


async def test_a_server_that_died_is_named_with_the_end_of_its_log(tmp_path):
    dying = Peer("baton", (sys.executable, "-c", DIES, "{port}"))
    comparison = ServerComparison(loads_of([1], 8, 2), 1, True, lambda _: None)
    with pytest.raises(SetupError, match=r"(?s)baton: .*out of memory"):
        await servers.compare([dying], comparison, core_counts=[1])


class Interrupted(Exception):
    pass


async def test_a_comparison_that_ends_early_keeps_what_was_measured(tmp_path):
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        if sum("in flight" in one for one in told) == 3:
            raise Interrupted

    measured = servers.MeasuredLoads()
    comparison = ServerComparison(loads_of([1], 8, 2), 2, True, progress)
    with pytest.raises(Interrupted):
        await servers.compare(
            [a_peer(name, tmp_path) for name in ("baton", "vllm")],
            comparison,
            core_counts=[1],
            measured=measured,
        )
    found = measured.results()
    assert [(r.peer, r.rounds) for r in found] == [("baton", 1), ("vllm", 2)]
    own, other = (r.output_tokens_per_s[0] for r in found)
    assert servers.ratios(found[0], found) == [own / other]


def test_a_ratio_is_of_one_round_and_to_the_best_other_server():
    def of(peer, *rounds, concurrency=8):
        load = LoadResult(concurrency, 16, 1.0, sorted(rounds)[len(rounds) // 2], 0.1, 0.1, 0.01, 0.01)
        return ServerResult(peer, 2, len(rounds), load, rounds)

    own = of("baton", 100.0, 220.0, 60.0)
    slow, best = of("transformers", 10.0, 10.0, 90.0), of("vllm", 100.0, 200.0, 50.0)
    elsewhere = of("vllm", 900.0, 900.0, 900.0, concurrency=32)
    results = [own, slow, best, elsewhere, of("baton, speculation", 999.0, 999.0, 999.0)]
    assert ratios(own, results) == pytest.approx([1.0, 1.1, 1.2])
    assert ratios(own, [own, elsewhere]) == []
    assert msgspec.json.decode(msgspec.json.encode(own))["output_tokens_per_s"] == [100.0, 220.0, 60.0]
