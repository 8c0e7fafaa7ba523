"""The KV owner's end of peer sessions: decode workers request, this worker grants."""

from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.messages import OwnerMessage, PeerHello, ReaderMessage
from baton.wire.server import OwnerEnd
from kv_transfer.peers import SessionsWithReaders


class ReaderSink(Protocol):
    """Wants to know what KV readers say."""

    def from_reader(self, reader: WorkerId, message: ReaderMessage) -> None: ...

    def reader_lost(self, reader: WorkerId) -> None: ...


class ReaderSessions:
    """Sessions with readers, at most one each: a new one replaces the old, whose end is reported first.

    Fingerprint and wire version have been compared by the wire layer before `serve_reader` is called.
    """

    def __init__(self, *, hello: Callable[[], PeerHello], sink: ReaderSink) -> None:
        self._hello = hello
        self._sessions = SessionsWithReaders[WorkerId, OwnerMessage, ReaderMessage](
            on_message=sink.from_reader, on_lost=sink.reader_lost
        )

    @property
    def reader_count(self) -> int:
        return self._sessions.count

    def hello(self) -> PeerHello:
        return self._hello()

    async def serve_reader(self, theirs: PeerHello, link: OwnerEnd) -> None:
        await self._sessions.serve(theirs.worker_id, link)

    def send(self, reader: WorkerId, message: OwnerMessage) -> None:
        """Dropped if the session is gone: the reader's loss has been reported, its leases run on."""
        self._sessions.send(reader, message)

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        self._sessions.hang_up()
