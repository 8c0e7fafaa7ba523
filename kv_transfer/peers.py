"""Sessions between KV readers and KV owners, and the reads themselves: the adapters of both ends.

A reader opens a session to an owner and requests blocks in it; the owner grants them in the same session.
Bytes never travel in a session: the transfer manager reads them out of the owner's memory. What is said is
the user's: workers hand a prompt over, store nodes fetch blocks from each other."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from baton.core.ids import WorkerId
from baton.wire.link import LinkBroken
from baton.wire.serving import serve_until
from kv_transfer.read import BlockRead, ReadDone, ReadEvent, ReadSettled

log = logging.getLogger(__name__)

WAITING_MESSAGES_MAX = 4096
"""Messages for an owner whose session is still being opened."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine whose unexpected exception ends the process."""

KeyT = TypeVar("KeyT", bound=Hashable)
OutT = TypeVar("OutT")
InT = TypeVar("InT")
OfferT = TypeVar("OfferT")
OfferT_contra = TypeVar("OfferT_contra", contravariant=True)
OutT_contra = TypeVar("OutT_contra", contravariant=True)
InT_co = TypeVar("InT_co", covariant=True)


class LinkEnd(Protocol[OutT_contra, InT_co]):
    """One end of a session: `baton.wire.link.Link`."""

    def send(self, message: OutT_contra) -> None:
        """Raises LinkBroken."""
        ...

    def __aiter__(self) -> AsyncIterator[InT_co]: ...


class Transfer(Protocol[OfferT_contra]):
    """What readers need of `kv_transfer.manager.TransferManager` (store nodes) and of
    `kv_transfer.part_transfer.PartTransfer` (workers): the offer is what the owner's hello says."""

    async def add_peer(self, peer: WorkerId, offer: OfferT_contra) -> object: ...

    async def remove_peer(self, peer: WorkerId) -> None: ...

    async def read_checked(self, read: BlockRead) -> ReadDone: ...

    async def settled(self, local_blocks: Sequence[int]) -> None: ...


async def introduce(
    transfer: Transfer[OfferT],
    owner: WorkerId,
    *,
    address: str,
    answered_by: str,
    offer: OfferT,
    timeout_s: float,
) -> None:
    """Make the owner's memory readable, after its hello. Raises IncompatiblePeer, TransferFailed."""
    if answered_by != owner:  # the port belongs to a later process by now
        raise IncompatiblePeer(f"{address} is {answered_by}, not {owner}")
    try:
        async with asyncio.timeout(timeout_s):
            await transfer.add_peer(owner, offer)
    except TimeoutError:
        raise TransferFailed(f"{owner}: no transfer connection in time") from None


@dataclass(slots=True)
class _OwnerSession(Generic[OutT, InT]):
    link: LinkEnd[OutT, InT] | None = None
    """None while it is being opened."""
    waiting: deque[OutT] = field(default_factory=deque[OutT])
    task: asyncio.Task[None] | None = None
    is_used: bool = False
    """Something was said in it."""


class SessionsWithOwners(Generic[KeyT, OutT, InT]):
    """The reader's end. A session is opened when it is first spoken in, or ahead of that. One that breaks
    after it was used is reported as a lost owner, once, and the next message opens a new one.

    `on_message` and `on_lost` say what the owner says and that it is gone.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[KeyT, InT], None],
        on_lost: Callable[[KeyT, str], None],
        spawn: Spawn,
    ) -> None:
        self._on_message, self._on_lost, self._spawn = on_message, on_lost, spawn
        self._sessions: dict[KeyT, _OwnerSession[OutT, InT]] = {}
        self._ending: dict[KeyT, asyncio.Task[None]] = {}

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return sum(session.link is not None for session in self._sessions.values())

    def open(
        self, key: KeyT, dial: Callable[[], AbstractAsyncContextManager[LinkEnd[OutT, InT]]]
    ) -> _OwnerSession[OutT, InT]:
        """Open a session ahead of need; nobody is told if that fails. Open already: nothing happens.

        `dial` gives a session whose owner can be read, and takes the owner away from the transfer at its end.
        Raises LinkBroken, IncompatiblePeer, TransferFailed or SetupError.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _OwnerSession[OutT, InT]()
            session.task = self._spawn(self._run(key, session, dial, self._ending.get(key)))
        return session

    def send(
        self,
        key: KeyT,
        message: OutT,
        dial: Callable[[], AbstractAsyncContextManager[LinkEnd[OutT, InT]]],
    ) -> None:
        """Messages arrive in order. If one cannot be delivered, `on_lost` says so."""
        session = self.open(key, dial)
        session.is_used = True
        if session.link is not None:
            self._send(key, session, session.link, message)
        elif len(session.waiting) < WAITING_MESSAGES_MAX:
            session.waiting.append(message)
        else:
            self._lost(key, session, f"{WAITING_MESSAGES_MAX} messages before it answered")

    def close(self) -> None:
        """Hang up on everybody, without further reports."""
        for session in self._sessions.values():
            if session.task is not None:
                session.task.cancel()
        self._sessions.clear()

    async def _run(
        self,
        key: KeyT,
        session: _OwnerSession[OutT, InT],
        dial: Callable[[], AbstractAsyncContextManager[LinkEnd[OutT, InT]]],
        predecessor: asyncio.Task[None] | None,
    ) -> None:
        try:
            if predecessor is not None:  # it still takes the owner away, which must not hit this session
                await asyncio.wait([predecessor])
            async with dial() as link:
                session.link = link
                while session.waiting and self._is_current(key, session):
                    self._send(key, session, link, session.waiting.popleft())
                async for message in link:
                    if not self._is_current(key, session):
                        return
                    self._on_message(key, message)
            self._lost(key, session, "it closed the session")
        except (LinkBroken, IncompatiblePeer, TransferFailed, SetupError) as error:
            self._lost(key, session, str(error))
        finally:
            if self._ending.get(key) is session.task:
                del self._ending[key]

    def _is_current(self, key: KeyT, session: _OwnerSession[OutT, InT]) -> bool:
        return self._sessions.get(key) is session

    def _send(
        self, key: KeyT, session: _OwnerSession[OutT, InT], link: LinkEnd[OutT, InT], message: OutT
    ) -> None:
        try:
            link.send(message)
        except LinkBroken as error:
            self._lost(key, session, str(error))

    def _lost(self, key: KeyT, session: _OwnerSession[OutT, InT], reason: str) -> None:
        """Report the loss of a session, once."""
        if not self._is_current(key, session):
            return
        del self._sessions[key]
        if session.task is not None:
            self._ending[key] = session.task
            if session.task is not asyncio.current_task():
                session.task.cancel()
        if session.is_used:
            log.warning("KV owner %s is lost: %s", key, reason)
            self._on_lost(key, reason)
        else:
            log.debug("KV owner %s is not reached ahead of need: %s", key, reason)


class SessionsWithReaders(Generic[KeyT, OutT, InT]):
    """The owner's end: at most one session for each key. A new one replaces the old, whose end is reported
    first; leases run on, since a one-sided read may be under way.

    `on_message` may raise LinkBroken: the reader breaks the protocol.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[KeyT, InT], None],
        on_lost: Callable[[KeyT], None] = lambda key: None,
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._sessions: dict[KeyT, tuple[LinkEnd[OutT, InT], asyncio.Event]] = {}
        """The link, and what ends the session from this side when set."""

    @property
    def count(self) -> int:
        return len(self._sessions)

    async def serve(self, key: KeyT, link: LinkEnd[OutT, InT]) -> None:
        """Runs until the session's end. LinkBroken may escape."""
        self._drop(key)
        dropped = asyncio.Event()
        self._sessions[key] = (link, dropped)
        try:
            await serve_until(dropped, self._read(key, link))
        finally:
            if self._is_current(key, link):
                self._drop(key)

    async def _read(self, key: KeyT, link: LinkEnd[OutT, InT]) -> None:
        async for message in link:
            if not self._is_current(key, link):
                return
            self._on_message(key, message)

    def send(self, key: KeyT, message: OutT) -> None:
        """Dropped if the session is gone: the reader has heard of its end."""
        session = self._sessions.get(key)
        if session is None:
            return
        try:
            session[0].send(message)
        except LinkBroken:
            self._drop(key)

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        for key in list(self._sessions):
            self._drop(key)

    def _is_current(self, key: KeyT, link: LinkEnd[OutT, InT]) -> bool:
        session = self._sessions.get(key)
        return session is not None and session[0] is link

    def _drop(self, key: KeyT) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session[1].set()
            self._on_lost(key)


async def carry_out(read: BlockRead, transfer: Transfer[Any], report: Callable[[ReadEvent], None]) -> None:
    """One read: a ReadDone is reported, and a ReadSettled when that said that bytes may yet land."""
    done = await transfer.read_checked(read)
    report(done)
    if not done.is_settled:
        await transfer.settled(read.local_blocks)
        report(ReadSettled(read.read_id))
