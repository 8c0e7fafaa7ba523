"""The KV reader of a worker: its sessions with prefill workers, and the reads from their KV pools."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.messages import KVPart, OwnerMessage, PeerHello, PeerRef, ReaderMessage
from baton.wire.client import ReaderEnd, peer_session
from kv_transfer.peers import SessionsWithOwners, Spawn, Transfer, carry_out, introduce
from kv_transfer.read import BlockRead, ReadEvent


class KVReaderSink(Protocol):
    """Wants to know what KV owners say and how reads end."""

    def from_owner(self, source: WorkerId, message: OwnerMessage) -> None: ...

    def owner_lost(self, source: WorkerId, message: str) -> None: ...

    def read_event(self, event: ReadEvent) -> None: ...


class KVReader:
    """Sessions are opened when first spoken in, and not again: a session that breaks is reported as a lost
    owner, and the next message opens a new one."""

    def __init__(
        self,
        *,
        hello: Callable[[], PeerHello],
        transfer: Transfer[tuple[KVPart, ...]],
        sink: KVReaderSink,
        spawn: Spawn,
        connect_timeout_s: float,
    ) -> None:
        self._hello, self._transfer, self._sink = hello, transfer, sink
        self._spawn, self._connect_timeout_s = spawn, connect_timeout_s
        self._sessions = SessionsWithOwners[WorkerId, ReaderMessage, OwnerMessage](
            on_message=sink.from_owner, on_lost=sink.owner_lost, spawn=spawn
        )

    @property
    def owner_count(self) -> int:
        return self._sessions.count

    def send(self, owner: PeerRef, message: ReaderMessage) -> None:
        """Send messages in order. If one cannot be delivered, `owner_lost` says so."""
        self._sessions.send(owner.worker_id, message, lambda: self._session(owner))

    def start_read(self, read: BlockRead) -> None:
        self._spawn(carry_out(read, self._transfer, self._sink.read_event))

    def close(self) -> None:
        """Hang up on everybody, without further reports."""
        self._sessions.close()

    @asynccontextmanager
    async def _session(self, owner: PeerRef) -> AsyncGenerator[ReaderEnd]:
        timeout_s = self._connect_timeout_s
        try:
            async with peer_session(owner.address, self._hello(), connect_timeout_s=timeout_s) as session:
                theirs, link = session
                await introduce(
                    self._transfer,
                    owner.worker_id,
                    address=owner.address,
                    answered_by=theirs.worker_id,
                    offer=theirs.parts,
                    timeout_s=timeout_s,
                )
                yield link
        finally:
            await self._transfer.remove_peer(owner.worker_id)
