"""The source's side of peer sessions: decode workers ask, this worker grants."""

from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.messages import AskerMessage, PeerHello, SourceMessage
from baton.wire.link import LinkBroken
from baton.wire.server import SourceEnd


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
        self._links: dict[WorkerId, SourceEnd] = {}

    @property
    def asker_count(self) -> int:
        return len(self._links)

    def hello(self) -> PeerHello:
        return self._hello()

    async def serve_asker(self, theirs: PeerHello, link: SourceEnd) -> None:
        asker = theirs.worker_id
        self._forget(asker, self._links.get(asker))
        self._links[asker] = link
        try:
            async for message in link:
                if self._links.get(asker) is not link:
                    return  # replaced, or dropped because it does not read
                self._sink.from_asker(asker, message)
        finally:
            self._forget(asker, link)

    def send(self, asker: WorkerId, message: SourceMessage) -> None:
        """Dropped if the session is gone: the asker's loss has been reported, its leases run on."""
        link = self._links.get(asker)
        if link is None:
            return
        try:
            link.send(message)
        except LinkBroken:
            self._forget(asker, link)

    def _forget(self, asker: WorkerId, link: SourceEnd | None) -> None:
        if link is not None and self._links.get(asker) is link:
            del self._links[asker]
            self._sink.asker_lost(asker)
