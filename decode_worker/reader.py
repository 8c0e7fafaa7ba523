"""The reader's side: sessions with prefill workers, and the one-sided reads from their KV pools."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.ids import ReadId, WorkerId
from baton.core.messages import PeerHello, PeerRef, ReaderMessage, SourceMessage
from baton.wire.client import ReaderEnd, peer_session
from baton.wire.link import LinkBroken
from kv_transfer.manager import ReadOutcome

log = logging.getLogger(__name__)

WAITING_MESSAGES_MAX = 4096
"""Messages for a source whose session is still being opened."""


class KVReaderSink(Protocol):
    """Who wants to know what sources say and how reads end."""

    def from_source(self, source: WorkerId, message: SourceMessage) -> None: ...

    def source_lost(self, source: WorkerId, message: str) -> None: ...

    def read_done(self, read_id: ReadId, outcome: ReadOutcome) -> None: ...

    def read_settled(self, read_id: ReadId) -> None: ...


class Transfer(Protocol):
    """What the puller needs of `kv_transfer.manager.TransferManager`."""

    async def add_peer(self, peer: WorkerId, offers: Mapping[str, bytes]) -> object: ...

    async def remove_peer(self, peer: WorkerId) -> None: ...

    async def read_checked(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        generations: Sequence[int],
        timeout_s: float,
        *,
        checksums: Sequence[int] = (),
    ) -> ReadOutcome: ...

    async def settled(self, local_blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Read:
    """source_blocks[i] of `source` into local_blocks[i]; the source's generations must still be
    `generations` afterwards."""

    read_id: ReadId
    source: WorkerId
    source_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    timeout_s: float
    checksums: tuple[int, ...] = ()
    """Of the source blocks; empty: not compared."""


@dataclass(slots=True)
class _Session:
    link: ReaderEnd | None = None
    """None while it is being opened."""
    waiting: deque[ReaderMessage] = field(default_factory=deque[ReaderMessage])
    task: asyncio.Task[None] | None = None


class KVReader:
    """Sessions are opened when first spoken to, and not again: a session that breaks is reported as
    a lost source, and the next message opens a new one.

    `spawn` runs a coroutine whose unexpected exception ends the process.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], PeerHello],
        transfer: Transfer,
        sink: KVReaderSink,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        connect_timeout_s: float,
    ) -> None:
        self._hello, self._transfer, self._sink = hello, transfer, sink
        self._spawn, self._connect_timeout_s = spawn, connect_timeout_s
        self._sessions: dict[WorkerId, _Session] = {}
        self._ending: dict[WorkerId, asyncio.Task[None]] = {}
        self.reads_in_flight = 0

    @property
    def source_count(self) -> int:
        return sum(session.link is not None for session in self._sessions.values())

    def send(self, source: PeerRef, message: ReaderMessage) -> None:
        """In order. If it cannot be delivered, `source_lost` says so."""
        session = self._sessions.get(source.worker_id)
        if session is None:
            session = self._sessions[source.worker_id] = _Session()
            session.task = self._spawn(self._run(source, session, self._ending.get(source.worker_id)))
        if session.link is not None:
            self._send(source.worker_id, session, session.link, message)
        elif len(session.waiting) < WAITING_MESSAGES_MAX:
            session.waiting.append(message)
        else:
            self._lost(source.worker_id, session, f"{WAITING_MESSAGES_MAX} messages before it answered")

    def start_read(self, read: Read) -> None:
        """Answered by one `read_done`, and by `read_settled` if that said that bytes may yet land."""
        self._spawn(self._read(read))

    def close(self) -> None:
        """Hang up on everybody, without further reports."""
        for session in self._sessions.values():
            if session.task is not None:
                session.task.cancel()
        self._sessions.clear()

    # --- sessions ---------------------------------------------------------------------------------

    async def _run(self, source: PeerRef, session: _Session, predecessor: asyncio.Task[None] | None) -> None:
        try:
            if predecessor is not None:  # it still takes the peer away, which must not hit ours
                await asyncio.wait([predecessor])
            async with peer_session(
                source.address, self._hello(), connect_timeout_s=self._connect_timeout_s
            ) as (theirs, link):
                await self._introduce(source, theirs)
                session.link = link
                while session.waiting and self._is_current(source.worker_id, session):
                    self._send(source.worker_id, session, link, session.waiting.popleft())
                async for message in link:
                    if not self._is_current(source.worker_id, session):
                        return
                    self._sink.from_source(source.worker_id, message)
            self._lost(source.worker_id, session, "it closed the session")
        except (LinkBroken, IncompatiblePeer, TransferFailed) as error:
            self._lost(source.worker_id, session, str(error))
        finally:
            await self._transfer.remove_peer(source.worker_id)
            if self._ending.get(source.worker_id) is session.task:
                del self._ending[source.worker_id]

    async def _introduce(self, source: PeerRef, theirs: PeerHello) -> None:
        """Raises IncompatiblePeer, TransferFailed."""
        if theirs.worker_id != source.worker_id:  # the port belongs to a later process by now
            raise IncompatiblePeer(f"{source.address} is {theirs.worker_id}, not {source.worker_id}")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._transfer.add_peer(source.worker_id, theirs.transfer_offers)
        except TimeoutError:
            raise TransferFailed(f"{source.worker_id}: no transfer connection in time") from None

    def _is_current(self, source: WorkerId, session: _Session) -> bool:
        return self._sessions.get(source) is session

    def _send(self, source: WorkerId, session: _Session, link: ReaderEnd, message: ReaderMessage) -> None:
        try:
            link.send(message)
        except LinkBroken as error:
            self._lost(source, session, str(error))

    def _lost(self, source: WorkerId, session: _Session, message: str) -> None:
        """Once per session."""
        if not self._is_current(source, session):
            return
        del self._sessions[source]
        if session.task is not None:
            self._ending[source] = session.task
            if session.task is not asyncio.current_task():
                session.task.cancel()
        log.warning("source %s lost: %s", source, message)
        self._sink.source_lost(source, message)

    # --- reads ------------------------------------------------------------------------------------

    async def _read(self, read: Read) -> None:
        self.reads_in_flight += 1
        try:
            outcome = await self._transfer.read_checked(
                *(read.source, read.source_blocks, read.local_blocks, read.generations, read.timeout_s),
                checksums=read.checksums,
            )
        finally:
            self.reads_in_flight -= 1
        self._sink.read_done(read.read_id, outcome)
        if not outcome.is_settled:
            await self._transfer.settled(read.local_blocks)
            self._sink.read_settled(read.read_id)
