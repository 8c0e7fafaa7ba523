"""Open loop against a small server over real sockets, and the command as a whole."""

import asyncio
import json
import threading
from itertools import pairwise

import orjson
import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from loadgen.cli import replay
from loadgen.client import parse_url, request_bytes, send
from loadgen.lengths import PlannedRequest
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import Slo
from loadgen.runner import ReplayObserver, replay_plan
from loadgen.sse import OpenAIStream

SILENT = ReplayObserver(lambda record: None, lambda record: None)
EVENT = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


class Server:
    """Behaves as the prompt's first number says, and records its requests with their times."""

    def __init__(self):
        self.asked = []
        self.on_asked = lambda: None

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/v1/models":
            return await self.answer(send, 200, b'{"data": [{"id": "tiny", "vocab_size": 5000}]}')
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        self.asked.append(asked)
        self.on_asked()
        return await self.behave(asked, receive, send)

    async def behave(self, asked, receive, send):
        kind = asked.get("kind", "ok")
        if kind == "refuse":
            return await self.answer(send, 503, b'{"error": {"message": "no room"}}')
        if kind == "http":
            return await self.answer(send, 400, b'{"error": {"message": "bad prompt"}}')
        if kind == "garbage":
            return await self.answer(send, 200, b"data: {not json\n\n")
        if kind == "html":
            return await self.answer(send, 200, b"<html>hello</html>\n")
        if kind == "error":
            return await self.answer(send, 200, EVENT + b'data: {"error": {"message": "lost"}}\n\n')
        if kind == "short":
            return await self.answer(send, 200, EVENT)
        if kind == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return None
        tokens = asked["max_tokens"]
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 32},
        }
        last = {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
        events = EVENT * tokens + b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
        return await self.answer(send, 200, events)

    async def answer(self, send, status, body):
        await send({"type": "http.response.start", "status": status, "headers": []})
        # The answer comes in two pieces, cut inside an event.
        await send({"type": "http.response.body", "body": body[:17], "more_body": True})
        await send({"type": "http.response.body", "body": body[17:]})


@pytest.fixture
def served():
    app = Server()
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical", http="h11", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    ready = threading.Event()
    startup = server.startup

    async def tell(sockets=None):
        await startup(sockets)
        ready.set()

    server.startup = tell
    thread.start()
    assert ready.wait(20)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield app, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


def planned(count, gap_s):
    return [PlannedRequest(i, i * gap_s, 4, 3, ()) for i in range(count)]


def message_for(url, kinds):
    server = parse_url(url)

    def make(request):
        body = {"prompt": [1, 2, 3, 4], "max_tokens": 3, "kind": kinds[request.index % len(kinds)]}
        return request_bytes(server, "/v1/completions", json.dumps(body).encode())

    return server, make


async def run(
    url, kinds, count, *, gap_s=0.01, timeout_s=30.0, connections_max=100, observer=SILENT, stop=None
):
    server, make = message_for(url, kinds)
    return await replay_plan(
        planned(count, gap_s),
        make,
        lambda message, record: send(server, message, record, timeout_s=timeout_s),
        connections_max=connections_max,
        observer=observer,
        stop=stop or asyncio.Event(),
    )


async def test_a_server_that_never_answers_delays_nobody(served):
    """All requests are sent though none is answered; a closed loop would send one."""
    app, url = served
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    app.on_asked = lambda: len(app.asked) == 30 and loop.call_soon_threadsafe(stop.set)
    records = await run(url, ["hang"], 30, timeout_s=60.0, stop=stop)
    assert len(records) == 30
    gaps = [b.planned_s - a.planned_s for a, b in pairwise(records)]
    assert gaps == pytest.approx([0.01] * 29)
    # Every request left before the first one ended.
    assert max(r.sent_s for r in records) < min(r.ended_s for r in records)
    assert all(r.sent_s >= r.planned_s for r in records)
    assert {(r.outcome, r.error) for r in records} == {(RequestOutcome.FAILED, ErrorKind.INTERRUPTED)}


async def test_every_ending_is_told_apart_and_the_accounts_add_up(served):
    _, url = served
    kinds = ["ok", "refuse", "http", "garbage", "html", "error", "short", "hang"]
    ended = []
    observer = ReplayObserver(lambda record: None, lambda record: ended.append(record.index))
    records = await run(url, kinds, len(kinds), timeout_s=5.0, observer=observer)
    assert [(r.outcome, r.error) for r in records] == [
        (RequestOutcome.COMPLETED, None),
        (RequestOutcome.REFUSED, ErrorKind.OVERLOADED),
        (RequestOutcome.FAILED, ErrorKind.HTTP),
        (RequestOutcome.FAILED, ErrorKind.STREAM_GARBAGE),
        (RequestOutcome.FAILED, ErrorKind.STREAM_GARBAGE),
        (RequestOutcome.FAILED, ErrorKind.STREAM_ERROR),
        (RequestOutcome.FAILED, ErrorKind.STREAM_BROKEN),
        (RequestOutcome.FAILED, ErrorKind.TIMEOUT),
    ]
    assert sorted(ended) == list(range(len(kinds)))
    assert records[1].detail == "503: no room"
    assert records[2].detail == "400: bad prompt"
    good = records[0]
    assert (good.prompt_tokens, good.completion_tokens, good.cached_tokens) == (4, 3, 32)
    assert (len(good.token_instants_s), good.finish_reason, good.asked_tokens) == (3, "length", 3)
    assert good.planned_s <= good.sent_s <= good.token_instants_s[0] <= good.ended_s


async def test_a_broken_peer_is_a_connect_failure():
    async def disconnect(reader, writer):
        await reader.readexactly(10)
        writer.transport.abort()

    async with await asyncio.start_server(disconnect, "127.0.0.1", 0) as rude:
        url = f"http://127.0.0.1:{rude.sockets[0].getsockname()[1]}"
        records = await run(url, ["ok"], 1)
    assert [r.error for r in records] == [ErrorKind.CONNECT]
    records = await run(url, ["ok"], 1)  # no server listens any more
    assert [r.error for r in records] == [ErrorKind.CONNECT]


async def test_no_connection_left_fails_at_once_instead_of_waiting(served):
    _, url = served
    records = await run(url, ["hang"], 5, timeout_s=1.0, connections_max=2)
    limit, timeout = ErrorKind.CONNECTION_LIMIT, ErrorKind.TIMEOUT
    assert [r.error for r in records] == [timeout, timeout, limit, limit, limit]
    assert all(r.sent_s is None for r in records[2:])


async def test_stopping_reports_what_was_seen(served):
    _, url = served
    stop = asyncio.Event()
    seen = []

    def on_sent(record):
        seen.append(record)
        if len(seen) == 3:
            stop.set()

    observer = ReplayObserver(on_sent, lambda record: None)
    records = await run(url, ["hang"], 50, observer=observer, stop=stop)
    assert records == seen[: len(records)]
    assert len(records) == 3
    assert {r.error for r in records} == {ErrorKind.INTERRUPTED}
    assert all(r.ended_s is not None for r in records)
    assert not any(Slo().is_met(r) for r in records)


def command():
    app = typer.Typer()
    app.command()(replay)
    return app


def trace_file(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 32, "hash_ids": [0, i + 1]} for i in range(4)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


SCALE = ["--length-scale", "1/16", "--time-scale", "0.05"]


def test_the_command_replays_and_reports(served, tmp_path):
    app, url = served
    out = tmp_path / "figures.json"
    arguments = [trace_file(tmp_path), "--url", url, *SCALE, "--ttft-slo", "60", "--json", str(out)]
    result = CliRunner().invoke(command(), arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_bytes())
    assert (figures["offered"], figures["completed"], figures["refused"], figures["failed"]) == (4, 4, 0, 0)
    assert figures["goodput_share"] == 1.0
    assert figures["cache_hit_ratio"] == pytest.approx(0.5)
    assert figures["settings"]["expected_hit_ratio"] == pytest.approx(3 * 32 / (4 * 64))
    assert figures["settings"]["options"]["length_scale"] == "1/16"
    assert {len(a["prompt"]) for a in app.asked} == {64}
    assert {(a["model"], a["max_tokens"], a["ignore_eos"], a["stream"]) for a in app.asked} == {
        ("tiny", 2, True, True)
    }
    prompts = [a["prompt"] for a in app.asked]
    assert len({tuple(p[:32]) for p in prompts}) == 1
    assert len({tuple(p[32:]) for p in prompts}) == 4
    assert all(1000 <= t < 5000 for p in prompts for t in p)
    assert "length_scale 1/16" in result.output


def test_json_on_standard_output_is_nothing_but_json(served, tmp_path):
    _, url = served
    result = CliRunner().invoke(
        command(), [trace_file(tmp_path), "--url", url, *SCALE, "--api", "completions-text", "--json", "-"]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["completed"] == 4
    assert figures["settings"]["expected_hit_ratio"] is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--length-scale", "0"], "positive factor"),
        (["--start", "99"], "holds no request"),
        (["--url", "ftp://x"], "must look like"),
        (["--url", "http://127.0.0.1:99999"], "--url"),
        (["--url", "http://127.0.0.1:1"], "cannot reach"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments, complaint):
    result = CliRunner().invoke(command(), [trace_file(tmp_path), *arguments])
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.startswith("baton: ")
    assert result.stderr.count("\n") == 1


def test_help_has_an_example():
    result = CliRunner().invoke(command(), ["--help"])
    assert result.exit_code == 0
    assert "baton replay" in result.output


def test_a_token_without_text_is_timed_when_its_id_comes():
    record = RequestRecord(index=0, planned_s=0.0)
    stream = OpenAIStream(record)
    for at_s, choice in ((1.0, {"text": "", "token_ids": [7]}), (2.0, {"text": "a"}), (3.0, {"text": ""})):
        stream.feed(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n", now_s=at_s)
    assert record.token_instants_s == [1.0, 2.0]
