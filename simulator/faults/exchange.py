"""One request over HTTP between a client and a router's application, without sockets.

The application is the production one, and this is its server: it hands over scope, body and news of the
client, and keeps what the application sends. Nothing is judged here.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from router.http.asgi import ABORT, HANG_UP, WATCH, WRITE_NOW, Message, Scope

Watcher = Callable[[], None]


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_body",
        "_gone",
        "_is_body_read",
        "_may_write",
        "_on_gone",
        "data",
        "first_byte_s",
        "headers",
        "is_broken_off",
        "is_client_gone",
        "is_complete",
        "is_done",
        "now_s",
        "status",
        "token_s",
    )

    def __init__(self, body: dict[str, Any], *, now_s: Callable[[], float]) -> None:
        self._body = msgspec.json.encode(body)
        self.now_s = now_s
        self._is_body_read = False
        self._on_gone: Watcher | None = None
        self._gone: asyncio.Event | None = None
        self._may_write: asyncio.Event | None = None
        """Set while the client reads; None: it always does."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data: list[bytes] = []
        self.first_byte_s: float | None = None
        self.is_complete = False
        """The application said that the body is complete."""
        self.is_broken_off = False
        """The router ended the connection before the answer was complete."""
        self.is_client_gone = False
        self.is_done = False
        """The application returned."""

    def scope(self, path: str, key: str) -> Scope:
        return {
            "type": "http",
            "path": path,
            "method": "POST",
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            WATCH: self._watch,
            WRITE_NOW: self._write_now,
            ABORT: self._abort,
            HANG_UP: self._hang_up,
        }

    # --- the client ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client hangs up. Its router's loop must be entered."""
        if self.is_client_gone or self.is_complete:
            return
        self.is_client_gone = True
        self._break()

    def stop_reading(self) -> None:
        self._may_write = asyncio.Event()

    def read_on(self) -> None:
        if self._may_write is not None:
            self._may_write.set()

    @property
    def text(self) -> bytes:
        return b"".join(self.data)

    # --- the application ----------------------------------------------------------------------------

    async def receive(self) -> Message:
        if not self._is_body_read:
            self._is_body_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if not (self.is_client_gone or self.is_broken_off):
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._may_write is not None and message["type"] == "http.response.body" and self.data:
            await self._may_write.wait()
        self._take(message)

    def _take(self, message: Message) -> None:
        if self.is_client_gone or self.is_broken_off:
            return
        if message["type"] == "http.response.start":
            assert not self.status, "an answer begins twice"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.status, "a body before its head"
        assert not self.is_complete, "a body after its end"
        self._add(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)

    def _add(self, data: bytes) -> None:
        if data:
            if self.first_byte_s is None:
                self.first_byte_s = self.now_s()
            self.data.append(data)

    def _write_now(self, data: bytes) -> bool:
        if self.is_client_gone or self.is_broken_off or (self._may_write and not self._may_write.is_set()):
            return False
        self._add(data)
        return True

    def _watch(self, on_gone: Watcher) -> Watcher:
        def end() -> None:
            if self._on_gone is on_gone:
                self._on_gone = None

        if self.is_client_gone or self.is_broken_off:
            on_gone()
        else:
            self._on_gone = on_gone
        return end

    def _hang_up(self, last: bytes) -> None:
        self._add(last)
        self._abort()

    def _abort(self) -> None:
        self.is_broken_off = True
        self._break()

    def _break(self) -> None:
        if self._may_write is not None:
            self._may_write.set()  # A server lets whoever waits to write go on when the connection is lost.
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()
        if self._gone is not None:
            self._gone.set()
