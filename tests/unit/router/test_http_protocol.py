"""Malicious and mistaken connections are bounded, answered in OpenAI's shape, and closed."""

import asyncio
import contextlib
import logging

import orjson
import pytest

from router.http.protocol import HEADER_BYTES_MAX, HEADERS_MAX
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, cluster, make_folder

CHAT = "/v1/chat/completions"
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.asynccontextmanager
async def connected(c):
    host, port = c.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def everything(reader):
    async with asyncio.timeout(BOUND_S):
        return await reader.read()


async def exchange(c, data):
    """Send bytes and return the whole answer, up to the end of the connection."""
    async with connected(c) as (reader, writer):
        writer.write(data)
        return await everything(reader)


def status_and_error(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"connection: close" in head
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    "data",
    [
        GET + b"A: " + b"x" * HEADER_BYTES_MAX + b"\r\n\r\n",
        GET + b"A: " + b"x" * 40 * HEADER_BYTES_MAX,  # The header never ends.
        GET + b"A: b\r\n" * HEADERS_MAX + b"\r\n",
        b"GET /" + b"x" * HEADER_BYTES_MAX + b" HTTP/1.1\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\nT: " + b"x" * 2 * HEADER_BYTES_MAX + b"\r\n\r\n",
    ],
    ids=["bytes", "endless", "count", "url", "trailer"],
)  # fmt: skip
async def test_too_large_headers_are_refused(folder, data):
    async with cluster(folder) as c:
        answer = await exchange(c, data)
        status, error = status_and_error(answer)
        assert status == 431
        assert error["type"] == "invalid_request_error"


async def test_headers_within_the_bounds_are_fine(folder):
    async with cluster(folder) as c:
        headers = b"A: " + b"x" * 200 + b"\r\n"
        answer = await exchange(c, GET + headers * (HEADERS_MAX - 2) + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [
        b"HELO there\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
async def test_what_is_no_http_is_answered_in_the_same_shape_and_no_warning(folder, data, caplog):
    async with cluster(folder) as c:
        status, error = status_and_error(await exchange(c, data))
        assert (status, error["type"]) == (400, "invalid_request_error")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("data", [b"GET / HT", GET + b"\r\nGET / HT"], ids=["first", "second"])
async def test_headers_that_never_come_are_not_waited_for(folder, data):
    async with cluster(folder, headers_timeout_s=0.1) as c:
        answer = await exchange(c, data)
        status, _ = status_and_error(answer[answer.rindex(b"HTTP/1.1 ") :])
        assert status == 408


@pytest.mark.parametrize("data", [b"", b"\r\n"])
async def test_a_connection_that_says_nothing_is_closed(folder, data):
    async with cluster(folder, headers_timeout_s=0.1) as c:
        assert await exchange(c, data) == b""


async def test_one_connection_too_many_is_refused(folder):
    async with cluster(folder, connections_max=2) as c, connected(c) as first, connected(c) as second:
        for reader, writer in (first, second):
            writer.write(GET + b"\r\n")
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
        status, error = status_and_error(await exchange(c, b""))
        assert (status, error["type"]) == (503, "overloaded_error")
        first[1].write(GET + b"\r\n")
        assert b"200" in await first[0].readuntil(b"\r\n\r\n")


async def test_leaving_with_pipelined_streams_is_leaving(folder, caplog):
    letters = Tokenizer.load(str(folder))._rust.encode("abcdefg", add_special_tokens=False).ids
    worker = FakeWorker(reply=letters, endless=True)
    body = orjson.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9000}
    )
    request = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        CHAT.encode(),
        len(body),
        body,
    )
    async with cluster(folder, worker, context=10_000) as c:
        async with connected(c) as (reader, writer):
            writer.write(request * 3)
            await reader.readuntil(b'"content":"a"')
        await worker.until(lambda: worker.cancelled)
        await c.nothing_in_flight()
        assert len(worker.started) == 1
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_an_unforeseen_error_is_500_and_one_bounded_report(folder, monkeypatch, caplog):
    def recurse(depth):
        return recurse(depth - 1) if depth else 1 / 0

    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        monkeypatch.setattr(c.router.models.first.tokenizer, "text_ids", lambda *_, **__: recurse(500))
        monkeypatch.setattr(c.router.models.first.driver, "status", lambda: recurse(500))
        for answer in (
            await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}),
            await http.get("/health"),
        ):
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
        monkeypatch.undo()
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 2
    assert all("ZeroDivisionError" in text and len(text) < 4000 for text in errors)


async def test_head_is_answered_like_get(folder):
    async with cluster(folder) as c, c.http() as http:
        for path in (
            "/health",
            "/health/live",
            "/health/ready",
            "/v1/models",
            f"/v1/models/{MODEL}",
            "/metrics",
        ):
            assert (await http.head(path)).status_code == (await http.get(path)).status_code
            assert (await http.head(path)).content == b""


def request(body, *, version="1.1", headers=b"", length=None):
    length = len(body) if length is None else length
    head = f"POST {CHAT} HTTP/{version}\r\nHost: x\r\nContent-Length: {length}\r\n"
    return head.encode() + headers + b"\r\n" + body


CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


@pytest.fixture(scope="module")
def letters(folder):
    return Tokenizer.load(str(folder))._rust.encode("abcdefg", add_special_tokens=False).ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_http_1_0_gets_no_chunks(folder, letters, version, stream):
    data = request(
        orjson.dumps(CHAT_BODY | {"stream": stream}), version=version, headers=b"Connection: close\r\n"
    )
    async with cluster(folder, FakeWorker(reply=letters)) as c:
        head, _, body = (await exchange(c, data)).partition(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0]
        is_chunked = b"transfer-encoding: chunked" in head.lower()
        assert is_chunked == (stream and version == "1.1")
        if not stream:
            assert orjson.loads(body)["choices"][0]["message"]["content"] == "abcdefg"
        elif not is_chunked:
            events = body.decode().removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            said = [orjson.loads(event.removeprefix("data: ")) for event in events[:-1]]
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in said) == "abcdefg"
        await c.nothing_in_flight()


async def test_a_body_that_is_no_body_is_answered(folder):
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with cluster(folder) as c:
        for begin in (b"", b'5\r\n{"mod\r\n'):
            status, error = status_and_error(await exchange(c, head + begin + b"ZZ\r\nabc\r\n"))
            assert status == 400
            assert "invalid HTTP request" in error["message"]
        await c.nothing_in_flight()


@pytest.mark.parametrize(("coding", "status"), [(b"gzip", 415), (b"br", 415), (b"identity", 200)])
async def test_a_coding_that_is_not_understood_is_refused(folder, letters, coding, status):
    data = request(
        orjson.dumps(CHAT_BODY), headers=b"Content-Encoding: " + coding + b"\r\nConnection: close\r\n"
    )
    async with cluster(folder, FakeWorker(reply=letters)) as c:
        head, _, body = (await exchange(c, data)).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        if status == 415:
            assert "content-encoding" in orjson.loads(body)["error"]["message"]


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
async def test_a_request_that_offers_another_protocol_is_served(folder, letters, offer):
    """Java's HttpClient offers h2c in clear text, and sends the body in a segment of its own."""
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer + b"\r\nHTTP2-Settings: AAEAAEAA\r\n"
    )
    head, _, body = request(orjson.dumps(CHAT_BODY), headers=upgrade).partition(b"\r\n\r\n")
    async with cluster(folder, FakeWorker(reply=letters)) as c, connected(c) as (reader, writer):
        for _ in range(2):
            writer.write(head + b"\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = orjson.loads(await reader.readexactly(length))
            assert answer["choices"][0]["message"]["content"] == "abcdefg"
