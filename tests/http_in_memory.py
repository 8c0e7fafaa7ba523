"""HTTP servers without sockets: a protocol gets bytes, and a test sees what the application saw."""

import asyncio
import re
from typing import NamedTuple

import uvicorn
from uvicorn.server import ServerState

QUIET_TURNS = 6
"""Turns of the loop without any change after which a server is done with what it got."""


class Seen(NamedTuple):
    """One request as the application saw it."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Exchange(NamedTuple):
    seen: list[Seen]
    answer: bytes
    is_ended: bool
    """Whether the server closed the connection, or its own side of it."""

    @property
    def statuses(self) -> list[int]:
        """Statuses of the answers, in the order of the connection."""
        found = re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", self.answer)
        return [int(status) for status in found]


class RecordingApp:
    """An application that reads each request to its end and answers 200."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message.get("more_body", False):
                break
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.seen.append(Seen(scope["method"], target, tuple(scope["headers"]), body))
        answer = b"request %d" % len(self.seen)
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class MemoryTransport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self):
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.is_ended = self._is_closing = False
        self.is_paused = False
        self.protocol = None

    def write(self, data):
        if not self.is_ended:
            self.written += data

    def close(self):
        if not self._is_closing:
            self.is_ended = self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self):
        return self._is_closing

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.is_ended = True

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


async def _settle(app, transport):
    quiet, before = 0, None
    while quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        now = (len(app.seen), len(transport.written), transport.is_ended)
        quiet, before = (quiet + 1, now) if now == before else (0, now)


async def exchange(protocol_class, segments, app=None) -> Exchange:
    """Give a server the segments of one connection, each when it is done with those before."""
    app = app or RecordingApp()
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    transport = MemoryTransport()
    server = protocol_class(config, ServerState(), {})
    transport.protocol = server
    server.connection_made(transport)
    for segment in segments:
        if transport.is_closing():
            break
        server.data_received(segment)
        await _settle(app, transport)
    found = Exchange(app.seen, bytes(transport.written), transport.is_ended)
    transport.close()
    await asyncio.sleep(0)
    return found


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def splits(data: bytes) -> dict[str, list[bytes]]:
    """Return the segmentations that tests of a request try: head and body in one write, in two, and byte by
    byte."""
    head, separator, body = data.partition(b"\r\n\r\n")
    return {"one": [data], "two": [head + separator, body] if body else [data], "bytes": bytewise(data)}
