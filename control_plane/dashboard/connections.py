"""The dashboard's HTTP connections: uvicorn's protocol, with a limit on the time that headers may take.

Connections are bounded, and uvicorn waits for headers without end: a few hundred silent connections would
lock everybody out. The protocol is the one on h11, since the other one, on httptools, takes the body of a
request that offers another protocol for a request.
"""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class HeadersInTime(H11Protocol):
    headers_s: ClassVar[float] = 10.0
    """Time from connecting, or from the first byte of a further request, to the end of its headers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self.conn.trailing_data[0]:
            self._start()

    def _start(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.headers_s, self._on_late)

    def _stop(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()
