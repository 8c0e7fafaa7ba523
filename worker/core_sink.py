"""Reports of sessions and reads, as events of the worker's core."""

from collections.abc import Callable

from baton.core.ids import RouterId, SeqKey, WorkerId
from baton.core.messages import OwnerMessage, Phase, ReaderMessage, RouterMessage
from kv_transfer.read import ReadDone, ReadEvent
from worker import events as e


class CoreSink:
    """Turns what sessions and reads report into events."""

    def __init__(self, post: Callable[[e.WorkerEvent], None], *, on_read: Callable[[ReadDone], None]) -> None:
        self._post, self._on_read = post, on_read

    def router_joined(self, router_id: RouterId) -> None:
        self._post(e.RouterJoined(router_id))

    def from_router(self, router_id: RouterId, message: RouterMessage) -> None:
        self._post(e.FromRouter(router_id, message))

    def preparation_began(self, key: SeqKey, phase: Phase) -> None:
        self._post(e.PreparationBegan(key, phase))

    def preparation_ended(self, key: SeqKey, reason: str) -> None:
        self._post(e.PreparationEnded(key, reason))

    def router_lost(self, router_id: RouterId) -> None:
        self._post(e.RouterLost(router_id))

    def drain(self) -> None:
        self._post(e.Drain())

    def from_reader(self, reader: WorkerId, message: ReaderMessage) -> None:
        self._post(e.FromReader(reader, message))

    def reader_lost(self, reader: WorkerId) -> None:
        self._post(e.ReaderLost(reader))

    def from_owner(self, source: WorkerId, message: OwnerMessage) -> None:
        self._post(e.FromOwner(source, message))

    def owner_lost(self, source: WorkerId, message: str) -> None:
        self._post(e.OwnerLost(source, message))

    def read_event(self, event: ReadEvent) -> None:
        if isinstance(event, ReadDone):
            self._on_read(event)
        self._post(event)
