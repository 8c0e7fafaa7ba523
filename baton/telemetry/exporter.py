"""The small HTTP server that shows a process's metrics to Prometheus."""

import asyncio
from collections.abc import Callable

import msgspec

from baton.core.errors import SetupError
from baton.telemetry.metrics import CONTENT_TYPE

REQUEST_S = 5.0
"""Longest time from connecting to the end of the answer."""
REQUEST_BYTES_MAX = 16_384


class MetricsServer:
    """HTTP server for GET /metrics and /health, one answer per connection. It is not meant for the public."""

    def __init__(
        self,
        *,
        render: Callable[[], bytes],
        health: Callable[[], dict[str, object]],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_ready` says whether /health/ready has status 200 or 503."""
        self._render, self._health, self._is_ready = render, health, is_ready
        self._server: asyncio.Server | None = None
        self.address = ""
        """host:port, once started."""
        self.port = 0

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on `port`; 0 is any free one. Raises SetupError if the port is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            raise SetupError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked has gone or talks nonsense
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        line = head.split(b"\r\n", 1)[0].split(b" ")
        if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "text/plain", b"no HTTP/1.1 request\n")
        method, target, _ = line
        if method not in (b"GET", b"HEAD"):
            return _response(
                "405 Method Not Allowed", "text/plain", b"only GET and HEAD\n", "Allow: GET, HEAD\r\n"
            )
        answer = self._page(target.split(b"?")[0])
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def _page(self, path: bytes) -> bytes:
        match path:
            case b"/metrics":
                return _response("200 OK", CONTENT_TYPE, self._render())
            case b"/health" | b"/health/live" | b"/health/ready":
                is_unready = path == b"/health/ready" and not self._is_ready()
                status = "503 Service Unavailable" if is_unready else "200 OK"
                return _response(status, "application/json", msgspec.json.encode(self._health()))
            case _:
                return _response("404 Not Found", "text/plain", b"try /metrics or /health\n")


def _response(status: str, content_type: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
