"""The source's side of peer sessions: decode workers ask, this worker grants."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.messages import PeerHello, ReaderMessage, SourceMessage
from baton.wire.link import LinkBroken
from baton.wire.server import SourceEnd
from baton.wire.serving import serve_until


class ReaderSink(Protocol):
    """Who wants to know what readers say."""

    def from_reader(self, reader: WorkerId, message: ReaderMessage) -> None: ...

    def reader_lost(self, reader: WorkerId) -> None: ...


class ReaderSessions:
    """At most one session per reader: a new one replaces the old, whose end is reported first.

    Fingerprint and wire version have been compared by the wire layer before `serve_reader` is called.
    """

    def __init__(self, *, hello: Callable[[], PeerHello], sink: ReaderSink) -> None:
        self._hello, self._sink = hello, sink
        self._sessions: dict[WorkerId, tuple[SourceEnd, asyncio.Event]] = {}
        """The link, and what ends the session from our side when set."""

    @property
    def reader_count(self) -> int:
        return len(self._sessions)

    def hello(self) -> PeerHello:
        return self._hello()

    async def serve_reader(self, theirs: PeerHello, link: SourceEnd) -> None:
        reader = theirs.worker_id
        self._drop(reader)
        dropped = asyncio.Event()
        self._sessions[reader] = (link, dropped)
        try:
            await serve_until(dropped, self._read(reader, link))
        finally:
            if self._is_current(reader, link):
                self._drop(reader)

    async def _read(self, reader: WorkerId, link: SourceEnd) -> None:
        async for message in link:
            if not self._is_current(reader, link):
                return
            self._sink.from_reader(reader, message)

    def send(self, reader: WorkerId, message: SourceMessage) -> None:
        """Dropped if the session is gone: the reader's loss has been reported, its leases run on."""
        session = self._sessions.get(reader)
        if session is None:
            return
        try:
            session[0].send(message)
        except LinkBroken:
            self._drop(reader)

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        for reader in list(self._sessions):
            self._drop(reader)

    def _is_current(self, reader: WorkerId, link: SourceEnd) -> bool:
        session = self._sessions.get(reader)
        return session is not None and session[0] is link

    def _drop(self, reader: WorkerId) -> None:
        session = self._sessions.pop(reader, None)
        if session is not None:
            session[1].set()
            self._sink.reader_lost(reader)
