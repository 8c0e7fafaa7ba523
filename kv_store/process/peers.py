"""Sessions with the store nodes of other hosts, and the one-sided reads from their arenas."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from baton.core.ids import NodeId, WorkerId
from baton.core.store import NodeHello, NodeRef, NodeToNode, PinBlocks, TakeOver, UnpinBlocks
from baton.wire.link import LinkBroken
from baton.wire.serving import serve_until
from baton.wire.store_nodes import NodeEnd, node_session
from kv_store.node import events as e
from kv_transfer.manager import TransferManager

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""The time from dialling to the peer's hello, and for the transfer connection."""

WAITING_MESSAGES_MAX = 4096
"""Messages for a peer whose session is still being opened, at most."""

Key = tuple[int, NodeId]
"""A session by (size class, peer)."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine whose unexpected exception ends the process."""

READER_MESSAGES = PinBlocks | UnpinBlocks | TakeOver
"""These travel in sessions that the sender opened; answers travel in those that it was asked in."""


class PeerSpace(Protocol):
    """The part of a size class that is needed here."""

    async def transfer(self) -> TransferManager:
        """The transfer manager, started with the first call. Raises SetupError if nothing works here."""
        ...

    def hello(self, transfer: TransferManager) -> NodeHello: ...

    async def corrupt(self, slots: Sequence[int], checksums: Sequence[int]) -> tuple[int, ...]:
        """Positions whose checksum (0: none) does not hold."""
        ...


class Asking:
    """Sessions that we opened, in order to read: one per peer and size class, opened ahead or when first
    used. A session that breaks after that is reported as a lost peer, and the next message opens a new
    one."""

    def __init__(
        self,
        *,
        space: Callable[[int], PeerSpace],
        post: Callable[[e.NodeEvent], None],
        spawn: Spawn,
    ) -> None:
        self._space, self._post, self._spawn = space, post, spawn
        self._sessions: dict[Key, _Session] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}

    @property
    def count(self) -> int:
        return sum(session.link is not None for session in self._sessions.values())

    def open(self, space: int, peer: NodeRef) -> None:
        """Open a session ahead of need, unless it is open: dialling and the first transfer connection take
        longer than a fetch may. A failure is not reported."""
        self._session(space, peer)

    def send(self, space: int, peer: NodeRef, message: NodeToNode) -> None:
        """Send messages in order. PeerLost follows if one cannot be delivered."""
        key = (space, peer.node_id)
        session = self._session(space, peer)
        session.is_used = True
        if session.link is not None:
            self._send(key, session, session.link, message)
        elif len(session.waiting) < WAITING_MESSAGES_MAX:
            session.waiting.append(message)
        else:
            self._lost(key, session, f"{WAITING_MESSAGES_MAX} messages before it answered")

    def _session(self, space: int, peer: NodeRef) -> "_Session":
        key = (space, peer.node_id)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
            session.task = self._spawn(self._run(key, peer, session, self._ending.get(key)))
        return session

    def close(self) -> None:
        """Hang up on everybody, without further reports."""
        for session in self._sessions.values():
            if session.task is not None:
                session.task.cancel()
        self._sessions.clear()

    async def _run(
        self, key: Key, peer: NodeRef, session: "_Session", predecessor: asyncio.Task[None] | None
    ) -> None:
        transfer: TransferManager | None = None
        try:
            if predecessor is not None:  # it still takes the peer away, which must not hit ours
                await asyncio.wait([predecessor])
            space = self._space(key[0])
            transfer = await space.transfer()
            hello = space.hello(transfer)
            async with node_session(peer.address, hello, connect_timeout_s=CONNECT_S) as (theirs, link):
                await _introduce(peer, theirs, transfer)
                session.link = link
                while session.waiting and self._is_current(key, session):
                    self._send(key, session, link, session.waiting.popleft())
                async for message in link:
                    if not self._is_current(key, session):
                        return
                    self._post(e.FromPeer(key[0], peer, message))
            self._lost(key, session, "it closed the session")
        except (LinkBroken, IncompatiblePeer, TransferFailed, SetupError) as error:
            self._lost(key, session, str(error))
        finally:
            if transfer is not None:
                await transfer.remove_peer(WorkerId(peer.node_id))
            if self._ending.get(key) is session.task:
                del self._ending[key]

    def _is_current(self, key: Key, session: "_Session") -> bool:
        return self._sessions.get(key) is session

    def _send(self, key: Key, session: "_Session", link: NodeEnd, message: NodeToNode) -> None:
        try:
            link.send(message)
        except LinkBroken as error:
            self._lost(key, session, str(error))

    def _lost(self, key: Key, session: "_Session", message: str) -> None:
        """Report the loss of a session, once."""
        if not self._is_current(key, session):
            return
        del self._sessions[key]
        if session.task is not None:
            self._ending[key] = session.task
            if session.task is not asyncio.current_task():
                session.task.cancel()
        if session.is_used:
            log.warning("store node %s lost: %s", key[1], message)
            self._post(e.PeerLost(key[0], key[1], message))
        else:
            log.debug("store node %s is not reached ahead of need: %s", key[1], message)


@dataclass(slots=True)
class _Session:
    link: NodeEnd | None = None
    """The link; None while it is being opened."""
    waiting: deque[NodeToNode] = field(default_factory=deque[NodeToNode])
    task: asyncio.Task[None] | None = None
    is_used: bool = False
    """A message was sent in it."""


async def _introduce(peer: NodeRef, theirs: NodeHello, transfer: TransferManager) -> None:
    """Exchange hellos and connect the transfer. Raises IncompatiblePeer, TransferFailed."""
    if theirs.node.node_id != peer.node_id:  # the port belongs to a later process by now
        raise IncompatiblePeer(f"{peer.address} is {theirs.node.node_id}, not {peer.node_id}")
    try:
        async with asyncio.timeout(CONNECT_S):
            await transfer.add_peer(WorkerId(peer.node_id), theirs.transfer_offers)
    except TimeoutError:
        raise TransferFailed(f"{peer.node_id}: no transfer connection in time") from None


class Answering:
    """Sessions that peers opened, in order to read from us. Their loss is not reported: leases run on."""

    def __init__(self, *, post: Callable[[e.NodeEvent], None]) -> None:
        self._post = post
        self._sessions: dict[Key, tuple[NodeEnd, asyncio.Event]] = {}
        """The link, and an event that ends the session from our side."""

    @property
    def count(self) -> int:
        return len(self._sessions)

    async def serve(self, theirs: NodeHello, link: NodeEnd) -> None:
        key = (theirs.block_bytes, theirs.node.node_id)
        self._drop(key)
        dropped = asyncio.Event()
        self._sessions[key] = (link, dropped)
        try:
            await serve_until(dropped, self._read(theirs, link))
        finally:
            if self._is_current(key, link):
                del self._sessions[key]

    async def _read(self, theirs: NodeHello, link: NodeEnd) -> None:
        async for message in link:
            if isinstance(message, READER_MESSAGES):
                self._post(e.FromPeer(theirs.block_bytes, theirs.node, message))
            else:
                raise LinkBroken(f"{theirs.node.node_id} answers what nobody asked: {type(message).__name__}")

    def send(self, space: int, peer: NodeId, message: NodeToNode) -> None:
        """Send a message, or drop it if the session is gone: its peer knows of its end."""
        session = self._sessions.get((space, peer))
        if session is None:
            return
        try:
            session[0].send(message)
        except LinkBroken:
            self._drop((space, peer))

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        for key in list(self._sessions):
            self._drop(key)

    def _is_current(self, key: Key, link: NodeEnd) -> bool:
        session = self._sessions.get(key)
        return session is not None and session[0] is link

    def _drop(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session[1].set()


class PeerReads:
    """One-sided reads of peers' arenas into ours, checked by generation and by checksum."""

    def __init__(
        self,
        *,
        space: Callable[[int], PeerSpace],
        post: Callable[[e.NodeEvent], None],
        spawn: Spawn,
    ) -> None:
        self._space, self._post, self._spawn = space, post, spawn

    def start(self, read: e.ReadPeer) -> None:
        """Start a read. It is answered by one PeerReadDone, and by PeerReadSettled if bytes may yet land
        after that."""
        self._spawn(self._read(read))

    async def _read(self, read: e.ReadPeer) -> None:
        space = self._space(read.space)
        transfer = await space.transfer()
        outcome = await transfer.read_checked(
            WorkerId(read.peer), read.source_slots, read.slots, read.generations, read.timeout_s
        )
        corrupt = await space.corrupt(read.slots, read.checksums) if not outcome.error else ()
        self._post(
            e.PeerReadDone(
                read.read_id, outcome.error, outcome.is_settled, outcome.is_stale, corrupt, outcome.seconds
            )
        )
        if not outcome.is_settled:
            await transfer.settled(read.slots)
            self._post(e.PeerReadSettled(read.read_id))
