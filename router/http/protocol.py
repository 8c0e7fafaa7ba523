"""The HTTP connection: uvicorn's protocol, bounded against clients that mean harm or know no better."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar
from weakref import ref

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.config.router import RouterConfig
from router.http.asgi import ABORT, HANG_UP, IS_CLOSING, LINGER_BYTES_MAX, LINGER_S, WATCH, WRITE_NOW
from router.http.heads import RefusedHead, check_head, head_bytes, without_upgrade
from router.openai.responses import error_body

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 64 * 2**10
HANG_UP_GRACE_S = 5.0
"""Time that a client has to read the reason after the server hung up on it."""
PIPELINED_MAX = 128
"""Most requests of one connection that wait for the answer to another. Thousands fit into one segment, and
taking them in would hold up the event loop."""
HEADERS_MAX = 256
"""Most headers of one request, trailers included."""


_TOO_LARGE = (
    f"the request's headers are too large: at most {HEADER_BYTES_MAX} bytes and {HEADERS_MAX} headers "
    "are allowed"
)
_TOO_MANY = f"too many requests wait on one connection: at most {PIPELINED_MAX} are allowed"


def _write_now(of: "ref[RequestResponseCycle]", body: bytes) -> bool:
    """Write a piece of the body as `cycle.send` would, if that needs no waiting. Returns whether it was
    written."""
    cycle = of()
    if cycle is None:
        return False
    is_open = cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected)
    if not is_open or cycle.flow.write_paused or cycle.transport.is_closing():
        return False
    cycle.transport.write(_chunk(body))
    return True


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _without_chunks(app: Any) -> Any:
    """Wrap an application for HTTP/1.0, which has no chunks (RFC 9112, section 6.1). A body of unknown length
    ends when the connection is closed."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        cycle: RequestResponseCycle = send.__self__
        is_open_ended = False

        async def send_plain(message: Any) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                is_open_ended = all(
                    name.lower() != b"content-length" for name, _ in message.get("headers", ())
                )
                cycle.chunked_encoding = False if is_open_ended else None
            elif is_open_ended:  # uvicorn refuses a body longer than it expects.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


class BoundedProtocol(HttpToolsProtocol):
    """A protocol that bounds connections, headers and the time they take. It answers malformed HTTP in
    OpenAI's error shape, and ends every request of a connection that is lost. It can also hang up: ASGI
    cannot, and an ordinary close waits until the client has read everything, which it may never do."""

    connections_max: ClassVar[int] = 4096
    headers_timeout_s: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: RequestResponseCycle | None = None
        self._on_gone: Callable[[], None] | None = None
        """Callback of the running request for a lost connection, if it registered one."""
        self._header_bytes = self._header_count = 0
        self._idle_bytes = 0
        """Bytes received without any progress: an unfinished header, chunk extensions, blank lines."""
        self._has_progressed = False
        self._was_used = False
        self._offers_upgrade = False
        """Whether the head offers another protocol. Such a head is read twice."""
        self._is_head_complete = self._is_body_complete = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._linger_bytes = 0

    # --- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open", linger_s=0.0)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the running request. uvicorn tells only the request that came last; with pipelining, another
        one is running."""
        self._stop_head_timer()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            if self._on_gone is not None:
                self._on_gone()
        self._on_gone = None
        super().connection_lost(exc)
        # A request and its scope refer to the connection: only the garbage collector would free them.
        self._running = self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._linger(len(data))
            return
        self._unset_keepalive_if_required()
        self._has_progressed = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, RefusedHead):
                self._reject(refused.status, refused.message)
            else:
                self._reject(HTTPStatus.BAD_REQUEST, f"invalid HTTP request: {error}")
            return
        self._idle_bytes = 0 if self._has_progressed else self._idle_bytes + len(data)
        if self._idle_bytes > HEADER_BYTES_MAX:
            self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)
        elif not self._is_head_complete or self._running is None or self._running.response_complete:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and not self._is_answering():
            self._unset_keepalive_if_required()
            self._answer_refusal()

    # --- the parser -------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Feed the parser. A head that offers another protocol is read again without the offer: the parser
        would take everything after it for the other protocol, whereas the server ignores it and reads the
        body (RFC 9110, section 7.8)."""
        rest = memoryview(data)
        while len(rest):
            assert self.parser is not None
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = head_bytes(method, self.url, version, without_upgrade(self.headers))
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn does.
            self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope[IS_CLOSING] = self.transport.is_closing  # type: ignore[typeddict-unknown-key]
        self._header_bytes = self._header_count = 0
        self._is_head_complete = self._is_body_complete = False
        self._has_progressed = self._was_used = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if not self._is_head_complete:  # Trailers are dropped: they are no headers (RFC 9110, section 6.5.1).
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self._has_progressed = True
        self._offers_upgrade = self.parser.should_upgrade() and method != b"CONNECT"
        if self._offers_upgrade:
            return
        self.url, self.expect_100_continue = check_head(method, self.url, version, self.headers)
        if len(self.pipeline) >= PIPELINED_MAX:
            raise RefusedHead(HTTPStatus.TOO_MANY_REQUESTS, _TOO_MANY)
        self._is_head_complete = True
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progressed = True
        if not self._offers_upgrade:
            self._is_body_complete = True
            assert self.parser is not None
            if not self.parser.should_keep_alive():
                # `Connection: close` among the trailers: the parser reads no further request.
                self.cycle.keep_alive = False
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._on_gone = None
        of = ref(cycle)  # The handler has the scope: only the garbage collector would free the cycle.
        cycle.scope[WRITE_NOW] = partial(_write_now, of)  # type: ignore[typeddict-unknown-key]
        cycle.scope[WATCH] = partial(self._watch, of)  # type: ignore[typeddict-unknown-key]
        cycle.scope[HANG_UP] = partial(self._hang_up, of)  # type: ignore[typeddict-unknown-key]
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(app) if is_old else app)

    def _hang_up(self, of: "ref[RequestResponseCycle]", last: bytes) -> None:
        cycle = of()
        if cycle is None or cycle.disconnected or cycle.response_complete or self.transport.is_closing():
            self.transport.abort()
            return
        self.transport.write(_chunk(last) + _chunk(b"") if cycle.chunked_encoding else last)
        cycle.disconnected = True  # The cycle must not write any more.
        cycle.message_event.set()
        cycle.flow.resume_writing()  # Nobody may wait to write either.
        self.transport.close()
        self.loop.call_later(HANG_UP_GRACE_S, self.transport.abort)

    def _watch(self, of: "ref[RequestResponseCycle]", on_gone: Callable[[], None]) -> Callable[[], None]:
        cycle = of()

        def end() -> None:
            if self._on_gone is on_gone:
                self._on_gone = None

        if cycle is None or cycle.disconnected:
            on_gone()
        else:
            self._on_gone = on_gone
            cycle.flow.resume_reading()  # Otherwise the end of the connection would not be read either.
        return end

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX or self._header_count > HEADERS_MAX:
            raise RefusedHead(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)

    # --- time -------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.headers_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._was_used:
            self.transport.close()  # A connection that was opened in advance and never used gets no answer.
            return
        message = f"the headers did not arrive within {self.headers_timeout_s:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

    # --- refusing ---------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Refuse the request that is being received, and end its handler if that waits for the body. A
        request has one answer: if its own has begun, the connection is closed instead."""
        cycle = self.cycle
        if self._is_head_complete and not self._is_body_complete:
            if cycle.response_started:
                self._refusal = (status, message)
                self.transport.close()
                return
            if cycle is self._running:
                self._running = None
                cycle.disconnected = True
                cycle.message_event.set()
            else:
                self.pipeline.popleft()  # uvicorn adds requests on the left.
        self._refuse(status, message)

    def _refuse(self, status: HTTPStatus, message: str, *, linger_s: float = LINGER_S) -> None:
        """Answer with an error, after the requests that came before, and hang up."""
        log.debug("%s is refused: %s", self.client, message)
        self._refusal = (status, message)
        self._stop_head_timer()
        if not self._is_answering():
            self._answer_refusal(linger_s=linger_s)

    def _answer_refusal(self, *, linger_s: float = LINGER_S) -> None:
        """Write the refusal and hang up. Closing at once would reset the connection, and the client would see
        no answer; so its further bytes are read and dropped for a moment."""
        if self.transport.is_closing():
            return
        assert self._refusal is not None
        status, message = self._refusal
        kind = "overloaded_error" if status.value == 503 else "invalid_request_error"
        body = error_body(message, kind)
        allow = "allow: GET, HEAD, POST\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{allow}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if linger_s and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(linger_s, self.transport.close)
        else:
            self.transport.close()

    def _linger(self, size: int) -> None:
        self._linger_bytes += size
        if self._linger_bytes > LINGER_BYTES_MAX:
            self.transport.close()


def protocol_for(config: RouterConfig) -> type[BoundedProtocol]:
    class ConfiguredProtocol(BoundedProtocol):
        connections_max = config.connections_max
        headers_timeout_s = config.headers_timeout_s

    return ConfiguredProtocol
