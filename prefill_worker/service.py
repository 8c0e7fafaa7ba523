"""The source's side of peer sessions: decode workers ask, this worker grants."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.messages import AskerMessage, PeerHello, SourceMessage
from baton.wire.link import LinkBroken
from baton.wire.server import SourceEnd
from baton.wire.serving import serve_until


class AskerSink(Protocol):
    """Who wants to know what askers say."""

    def from_asker(self, asker: WorkerId, message: AskerMessage) -> None: ...

    def asker_lost(self, asker: WorkerId) -> None: ...


class AskerSessions:
    """At most one session per asker: a new one replaces the old, whose end is reported first.

    Fingerprint and wire version have been compared by the wire layer before `serve_asker` is called.
    """

    def __init__(self, *, hello: Callable[[], PeerHello], sink: AskerSink) -> None:
        self._hello, self._sink = hello, sink
        self._sessions: dict[WorkerId, tuple[SourceEnd, asyncio.Event]] = {}
        """The link, and what ends the session from our side when set."""

    @property
    def asker_count(self) -> int:
        return len(self._sessions)

    def hello(self) -> PeerHello:
        return self._hello()

    async def serve_asker(self, theirs: PeerHello, link: SourceEnd) -> None:
        asker = theirs.worker_id
        self._drop(asker)
        dropped = asyncio.Event()
        self._sessions[asker] = (link, dropped)
        try:
            await serve_until(dropped, self._read(asker, link))
        finally:
            if self._is_current(asker, link):
                self._drop(asker)

    async def _read(self, asker: WorkerId, link: SourceEnd) -> None:
        async for message in link:
            if not self._is_current(asker, link):
                return
            self._sink.from_asker(asker, message)

    def send(self, asker: WorkerId, message: SourceMessage) -> None:
        """Dropped if the session is gone: the asker's loss has been reported, its leases run on."""
        session = self._sessions.get(asker)
        if session is None:
            return
        try:
            session[0].send(message)
        except LinkBroken:
            self._drop(asker)

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        for asker in list(self._sessions):
            self._drop(asker)

    def _is_current(self, asker: WorkerId, link: SourceEnd) -> bool:
        session = self._sessions.get(asker)
        return session is not None and session[0] is link

    def _drop(self, asker: WorkerId) -> None:
        session = self._sessions.pop(asker, None)
        if session is not None:
            session[1].set()
            self._sink.asker_lost(asker)
