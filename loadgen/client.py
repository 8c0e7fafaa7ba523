"""A lean HTTP/1.1 client for streamed answers. It opens one connection per request and reuses none.

Every request pays for a connect, as a new user's does, and no connection pool can hold back a request whose
instant has come. `httptools` parses the responses, because CPU time spent per event adds to our own lateness
at thousands of tokens per second.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

from baton.core.errors import SetupError
from loadgen.disconnects import Disconnect
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.sse import Answer, OpenAIStream, StreamFault, error_text

ERROR_BODY_BYTES_MAX = 16_384
_REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """The server that requests go to; made by `parse_url`."""

    host: str
    port: int
    prefix: str
    """The path before `/v1`, without a trailing slash."""
    tls: ssl.SSLContext | None
    api_key: str = ""
    says_done: bool = True
    """True if the server ends its streams with `[DONE]`. Otherwise a finish reason and the end of the HTTP
    body end a stream."""

    @property
    def origin(self) -> str:
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.prefix}"


def parse_url(url: str, *, api_key: str = "") -> ServerUrl:
    """Parse `http://host:port`, with or without `/v1`. Raises SetupError."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise SetupError(f"--url {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError(f"--url {url}: must look like http://127.0.0.1:8000")
    if any(not 32 < ord(c) < 127 for c in parts.path + api_key):
        raise SetupError("--url and --api-key must be printable ASCII without blanks")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    tls = ssl.create_default_context() if secure else None
    return ServerUrl(parts.hostname, port or (443 if secure else 80), prefix, tls, api_key)


def request_bytes(
    server: ServerUrl,
    path: str,
    body: bytes,
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of a whole POST, head and body. `api_key` None uses the server's key."""
    key = server.api_key if api_key is None else api_key
    extra = dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
    more = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
    head = (
        f"POST {server.prefix}{path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n{more}"
        "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


class _Response:
    """The callbacks of httptools; the parser calls them from `feed`."""

    def __init__(self, record: RequestRecord, *, says_done: bool, answer: Answer | None) -> None:
        self._stream = OpenAIStream(record, says_done=says_done, answer=answer)
        self._parser = httptools.HttpResponseParser(self)
        self._error_body = b""
        self._now_s = 0.0
        self._fault: StreamFault | None = None
        self.status: int | None = None
        self.is_complete = False

    def feed(self, data: bytes, *, now_s: float) -> None:
        """Raises StreamFault."""
        self._now_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The parser wraps an exception of ours in one of its own.
            raise self._fault or StreamFault(ErrorKind.STREAM_GARBAGE, f"not HTTP: {error}") from None

    @property
    def tokens_seen(self) -> int:
        return self._stream.tokens_seen

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status != 200:
            self._error_body = (self._error_body + body)[:ERROR_BODY_BYTES_MAX]
            return
        try:
            self._stream.feed(body, now_s=self._now_s)
        except StreamFault as fault:
            self._fault = fault
            raise

    def on_message_complete(self) -> None:
        self.is_complete = True

    def end(self, record: RequestRecord, *, now_s: float) -> None:
        """The stream has ended: set the outcome, or raise StreamFault."""
        if self.status is None:
            raise StreamFault(ErrorKind.CONNECT, "the connection ended before an answer")
        if self.status == 200:
            self._stream.end(now_s=now_s, is_complete=self.is_complete)
            return
        detail = f"{self.status}: {self._error_detail()}"
        if self.status in _REFUSALS:
            record.outcome, record.error, record.detail = RequestOutcome.REFUSED, ErrorKind.OVERLOADED, detail
            return
        raise StreamFault(ErrorKind.HTTP, detail)

    def close(self) -> None:
        """Break the cycle between parser and callbacks, which only the garbage collector would free
        otherwise."""
        del self._parser

    def _error_detail(self) -> str:
        try:
            value: object = orjson.loads(self._error_body)
        except orjson.JSONDecodeError:
            return self._error_body[:200].decode("utf-8", "replace")
        return error_text(cast("dict[str, object]", value)) if isinstance(value, dict) else str(value)[:200]


async def send(
    server: ServerUrl,
    message: bytes,
    record: RequestRecord,
    *,
    timeout_s: float,
    disconnect: Disconnect | None = None,
    answer: Answer | None = None,
) -> None:
    """Send one request, from connect to the end of the answer. Fills the record, and raises nothing but
    cancellation.

    `timeout_s` counts from now. `disconnect` says when the user gives up. `answer` collects the text of the
    answer.
    """
    record.sent_s = time.monotonic()
    exchange = _Exchange(message, _Response(record, says_done=server.says_done, answer=answer), disconnect)
    try:
        async with asyncio.timeout(timeout_s), _patience(exchange, record, disconnect):
            await asyncio.get_running_loop().create_connection(
                lambda: exchange, server.host, server.port, ssl=server.tls
            )
            await exchange.over
            exchange.end(record)
    except _Disconnected as reason:
        record.outcome, record.detail = RequestOutcome.CANCELLED, str(reason)
    except TimeoutError:
        _fail(record, ErrorKind.TIMEOUT, f"no end within {timeout_s:g} s")
    except StreamFault as fault:
        _fail(record, fault.kind, fault.detail)
    except (OSError, ssl.SSLError) as error:
        began = bool(record.token_instants_s)
        _fail(record, ErrorKind.STREAM_BROKEN if began else ErrorKind.CONNECT, str(error))
    except asyncio.CancelledError:
        _fail(record, ErrorKind.INTERRUPTED, "the replay was stopped")
        raise
    finally:
        exchange.abort()
        record.ended_s = time.monotonic()


def _fail(record: RequestRecord, kind: ErrorKind, detail: str) -> None:
    record.outcome, record.error, record.detail = RequestOutcome.FAILED, kind, detail[:200]


class _Disconnected(Exception):
    """The user gave up."""


@asynccontextmanager
async def _patience(
    exchange: "_Exchange", record: RequestRecord, disconnect: Disconnect | None
) -> AsyncGenerator[None]:
    """End the body with _Disconnected when `after_s` has passed since the planned instant."""
    if disconnect is None or disconnect.after_s is None:
        yield
        return
    patience = asyncio.timeout(max(0.0, record.planned_s + disconnect.after_s - time.monotonic()))
    try:
        async with patience:
            yield
    except TimeoutError:
        if not patience.expired() or exchange.response.is_complete:
            raise
        raise _Disconnected(f"disconnected after {disconnect.after_s:.3f} s") from None


class _Exchange(asyncio.Protocol):
    """Writes the message and feeds the response; `over` is done when nothing more will come."""

    def __init__(self, message: bytes, response: _Response, disconnect: Disconnect | None) -> None:
        self._message = message
        self.response = response
        self._tokens_max = disconnect.after_tokens if disconnect else None
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        if self.over.done():  # also true for data that arrives after the abort
            return
        try:
            self.response.feed(data, now_s=time.monotonic())
        except StreamFault as fault:
            self.over.set_exception(fault)
            return
        if self.response.is_complete:
            self.over.set_result(None)
        elif self._tokens_max is not None and self.response.tokens_seen >= self._tokens_max:
            self.over.set_exception(_Disconnected(f"disconnected after {self.response.tokens_seen} tokens"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        if exc is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(exc)

    def end(self, record: RequestRecord) -> None:
        """The connection has ended: set the outcome, or raise StreamFault."""
        self.response.end(record, now_s=time.monotonic())

    def abort(self) -> None:
        # Abort instead of close: there is nothing left to send, and an orderly TLS close could take for ever.
        if self._transport is not None:
            self._transport.abort()
        self.response.close()
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # retrieve a late exception, so that asyncio does not warn about it
