"""The metrics port answers one request per connection, and reads nothing after its head."""

import asyncio

import pytest

from baton.telemetry.exporter import MetricsServer


async def answer_to(data):
    server = MetricsServer(render=lambda: b"metric 1\n", health=lambda: {"status": "ok"})
    await server.start("127.0.0.1")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        async with asyncio.timeout(10):
            found = await reader.read()
        writer.close()
        return found
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"metric 1\n"),
        (b"GET /health?a HTTP/1.1\r\nHost: x\r\n\r\n", 200, b'{"status":"ok"}'),
        (b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, b""),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", 404, b"try /metrics or /health\n"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405, b"only GET and HEAD\n"),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405, b"only GET and HEAD\n"),
        (b"GET /metrics\r\n\r\n", 400, b"no HTTP/1.1 request\n"),
        (b"PRI * HTTP/2.0\r\n\r\n", 400, b"no HTTP/1.1 request\n"),
    ],
)
async def test_a_request_has_one_answer(data, status, body):
    head, _, found = (await answer_to(data)).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert found == body
    assert b"Connection: close" in head


async def test_an_upgrade_is_ignored_and_what_follows_not_read():
    data = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    found = await answer_to(data + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 OK") == 1
    assert found.endswith(b"metric 1\n")


async def test_ready_is_another_question_than_live():
    is_ready = False
    server = MetricsServer(
        render=lambda: b"", health=lambda: {"status": "draining"}, is_ready=lambda: is_ready
    )
    await server.start("127.0.0.1")
    try:

        async def status(path):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            line = (await reader.read()).split(b" ")
            writer.close()
            return int(line[1])

        assert (await status("/health/live"), await status("/health"), await status("/health/ready")) == (
            200,
            200,
            503,
        )
        is_ready = True
        assert await status("/health/ready") == 200
    finally:
        await server.close()
