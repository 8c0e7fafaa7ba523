"""Clients that go away, read slowly or stop reading leave nothing behind and disturb nobody else."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys

import orjson
import pytest

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from router.http.streaming import DEADLINE_GRACE_S, ResponseStream
from router.process import listening_socket, run_router
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, called, cluster, make_folder, soon

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def letters(folder):
    return Tokenizer.load(str(folder))._rust.encode("abcdefg", add_special_tokens=False).ids


class RawClient:
    """A client whose reads are each controlled by the test."""

    @classmethod
    async def post(cls, c, *, receive_bytes=0, **changes):
        self = cls()
        c.clients.append(self)
        host, port = c.url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=2**16)
        body = orjson.dumps(BODY | changes)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()
        return self

    async def until(self, words):
        async with asyncio.timeout(BOUND_S):
            return await self.reader.readuntil(words)

    async def rest(self):
        """Read everything up to the end of the connection, however it ends."""
        parts = []
        async with asyncio.timeout(BOUND_S):
            with contextlib.suppress(ConnectionError):
                while part := await self.reader.read(2**16):
                    parts.append(part)
        return b"".join(parts)

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued(folder, stream, monkeypatch):
    async with cluster(folder) as c:
        submitted = called(monkeypatch, c.driver, "submit")
        client = await RawClient.post(c, stream=stream)
        await soon(submitted)
        assert c.driver.status().queued == 1
        await client.close()
        await c.nothing_in_flight()
        assert c.driver.status().queued == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_prefilling(folder, letters, stream):
    prefill, decode = FakeWorker("p", Role.PREFILL, letters), FakeWorker("d", Role.DECODE, letters)
    prefill.gate.clear()
    decode.gate.clear()
    async with cluster(folder, prefill, decode) as c:
        client = await RawClient.post(c, stream=stream)
        await prefill.until(lambda: prefill.started)
        await client.close()
        await prefill.until(lambda: prefill.cancelled)
        await decode.until(lambda: decode.cancelled)
        await c.nothing_in_flight()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_decoding(folder, letters, stream):
    prefill, decode = FakeWorker("p", Role.PREFILL, letters), FakeWorker("d", Role.DECODE, letters)
    decode.gate.clear()
    async with cluster(folder, prefill, decode) as c:
        client = await RawClient.post(c, stream=stream, n=2)
        await decode.until(lambda: len(decode.started) == 2)
        await prefill.until(lambda: not prefill.running)
        if stream:
            await client.until(b'"content":"a"')  # The prefill worker's token comes at once.
        await client.close()
        await decode.until(lambda: len(decode.cancelled) == 2)
        await c.nothing_in_flight()


async def test_a_client_that_never_takes_its_whole_answer_is_dropped_after_its_deadline():
    async def written_to_nobody():
        await asyncio.Event().wait()

    dropped = asyncio.Event()
    deadline_s = asyncio.get_running_loop().time() - DEADLINE_GRACE_S
    response = ResponseStream(None, None, deadline_s=deadline_s, unsent_tokens_max=1)
    await response.write_end(written_to_nobody(), on_drop=dropped.set)
    assert dropped.is_set()
    assert response.dropped_reason


async def test_leaving_before_the_body_is_complete(folder):
    async with cluster(folder) as c:
        host, port = c.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await c.nothing_in_flight()
        async with c.http() as http:
            assert (await http.get("/health/live")).status_code == 200


async def test_a_client_that_stops_reading_is_dropped_and_others_go_on(folder, letters, caplog):
    caplog.set_level(logging.INFO)
    worker = FakeWorker(reply=letters, endless=True)
    async with cluster(folder, worker, output_buffer_tokens_max=64, context=200_000) as c:
        stuck = await RawClient.post(c, stream=True, max_tokens=100_000, receive_bytes=2048)
        await worker.until(lambda: worker.running)
        answer = await c.openai().chat.completions.create(**BODY)
        assert answer.usage.completion_tokens == 200
        await worker.until(lambda: worker.cancelled)
        await c.nothing_in_flight()
        read = await stuck.rest()
        assert b"[DONE]" not in read
        *_, last, end = read.split(b"\r\n0\r\n\r\n")[0].split(b"\n\n")
        assert end == b""
        error = orjson.loads(last.split(b"data: ")[-1])["error"]
        assert error["code"] == "client_too_slow"
        dropped = [r.getMessage() for r in caplog.records if "does not read" in r.getMessage()]
        assert len(dropped) == 1
        async with c.http() as http:
            metrics = (await http.get("/metrics")).text
        assert 'baton_router_dropped_slow_requests_total{model="tiny"} 1.0' in metrics
        await stuck.close()


async def test_what_arrives_while_a_client_is_slow_comes_as_larger_deltas(folder, letters):
    worker = FakeWorker(reply=letters, endless=True)
    tokens = 3000 * len(letters)
    async with cluster(folder, worker, output_buffer_tokens_max=10**6, context=200_000) as c:
        slow = await RawClient.post(c, stream=True, max_tokens=tokens, receive_bytes=2048)
        await worker.until(lambda: worker.started)
        await worker.until(lambda: not worker.running)  # The engine did not wait for the client.
        text = b""
        async with asyncio.timeout(BOUND_S):
            while b"[DONE]" not in text:
                text += await slow.reader.read(2**16)
        lines = [line for line in text.split(b"\n") if line.startswith(b"data: {")]
        deltas = [orjson.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines]
        assert "".join(deltas) == "abcdefg" * 3000
        assert len(deltas) < tokens / 2  # One delta grew while the client read nothing.
        assert max(map(len, deltas)) > 20
        await slow.close()


# --- the end --------------------------------------------------------------------------------------


async def test_draining_finishes_streams_and_refuses_new_requests(folder, letters, monkeypatch):
    stop = asyncio.Event()
    worker = FakeWorker(reply=letters)
    worker.gate.clear()
    async with cluster(folder, worker, stop=stop) as c, c.http() as http:
        client = await RawClient.post(c, stream=True)
        await worker.until(lambda: worker.running)
        draining = called(monkeypatch, c.driver, "drain")
        stop.set()
        await soon(draining)
        assert (await http.get("/health/ready")).status_code == 503
        refused = await http.post(CHAT, json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        worker.gate.set()
        assert b"data: [DONE]" in await client.rest()
        await client.close()


async def test_what_outlasts_the_drain_is_told_so(folder, letters):
    stop = asyncio.Event()
    worker = FakeWorker(reply=letters, endless=True)
    async with cluster(folder, worker, stop=stop, drain_timeout_s=0.1) as c:
        streaming = await RawClient.post(c, stream=True)
        await streaming.until(b'"content":')
        worker.gate.clear()
        stop.set()
        events = (await streaming.rest()).split(b"\n\n")
        assert not any(b"[DONE]" in event for event in events)
        error = next(event for event in events if b'data: {"error"' in event)
        assert b"shutting down" in error
        await streaming.close()


async def test_sigterm_ends_the_process_well(folder):
    script = (
        "import asyncio; from baton.config import Config; from router.process import run_router;"
        "from baton.wire.transport import secure;"
        f"c = Config(model={{'path': {str(folder)!r}}}, router={{'port': 0}}); secure(c.tls);"
        "asyncio.run(run_router(c, on_ready=lambda urls: print(urls[0], flush=True)))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    async with asyncio.timeout(60):
        url = (await process.stdout.readline()).decode().strip()
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_an_occupied_port_is_one_clear_line(folder):
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        config = Config(model={"path": str(folder)}, router={"port": port})
        with pytest.raises(SetupError, match=str(port)):
            await run_router(config)


@pytest.mark.parametrize("path", ["", "/nowhere/at/all"])
async def test_a_missing_model_is_one_clear_line(path):
    with pytest.raises(SetupError, match="model") as error:
        await run_router(Config(model={"path": path}))
    assert "\n" not in str(error.value)


async def test_a_folder_without_tokenizer_is_one_clear_line(folder, tmp_path):
    with pytest.raises(SetupError, match=r"config\.json"):
        await run_router(Config(model={"path": str(tmp_path)}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(SetupError, match="tokenizer"):
        await run_router(Config(model={"path": str(tmp_path)}))
