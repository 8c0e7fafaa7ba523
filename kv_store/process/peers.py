"""Sessions with the store nodes of other hosts, and the reads from their arenas."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.store import BlocksReleased, BlocksRequest, NodeHello, NodeRef, NodeToNode, TakeOver
from baton.wire.link import LinkBroken
from baton.wire.store_nodes import NodeEnd, node_session
from kv_store.node import events as e
from kv_transfer.manager import TransferManager
from kv_transfer.peers import SessionsWithOwners, SessionsWithReaders, Spawn, carry_out, introduce
from kv_transfer.read import BlockRead

CONNECT_S = 3.0
"""The time from dialling to the peer's hello, and for the transfer connection."""

Key = tuple[int, NodeRef]
"""A session by (size class, peer)."""

READER_MESSAGES = BlocksRequest | BlocksReleased | TakeOver
"""These travel in sessions that the sender opened; answers travel in those that they answer."""


class PeerSizeClass(Protocol):
    """The part of a size class that is needed here."""

    async def transfer(self) -> TransferManager:
        """The transfer manager, started with the first call. Raises SetupError if nothing works here."""
        ...

    def hello(self, transfer: TransferManager) -> NodeHello: ...


class Asking:
    """Sessions that we opened, in order to read: one per peer and size class, opened ahead or when first
    used. A session that breaks after that is reported as a lost peer, and the next message opens a new
    one."""

    def __init__(
        self,
        *,
        size_class: Callable[[int], PeerSizeClass],
        post: Callable[[e.NodeEvent], None],
        spawn: Spawn,
    ) -> None:
        self._size_class, self._post, self._spawn = size_class, post, spawn
        self._sessions = SessionsWithOwners[Key, NodeToNode, NodeToNode](
            on_message=lambda key, message: post(e.FromPeer(*key, message)),
            on_lost=lambda key, reason: post(e.StorePeerLost(key[0], key[1].node_id, reason)),
            spawn=spawn,
        )

    @property
    def count(self) -> int:
        return self._sessions.count

    def open(self, size_class: int, peer: NodeRef) -> None:
        """Open a session ahead of need, unless it is open: dialling and the first transfer connection take
        longer than a fetch may. A failure is not reported."""
        self._sessions.open((size_class, peer), lambda: self._session(size_class, peer))

    def send(self, size_class: int, peer: NodeRef, message: NodeToNode) -> None:
        """Send messages in order. StorePeerLost follows if one cannot be delivered."""
        self._sessions.send((size_class, peer), message, lambda: self._session(size_class, peer))

    def read(self, read: BlockRead) -> None:
        """Start a read. It is answered by one ReadDone, and by ReadSettled if bytes may yet land after
        that."""
        self._spawn(self._read(read))

    def close(self) -> None:
        """Hang up on everybody, without further reports."""
        self._sessions.close()

    @asynccontextmanager
    async def _session(self, size_class: int, peer: NodeRef) -> AsyncGenerator[NodeEnd]:
        here = self._size_class(size_class)
        transfer, owner = await here.transfer(), WorkerId(peer.node_id)
        try:
            async with node_session(peer.address, here.hello(transfer), connect_timeout_s=CONNECT_S) as (
                theirs,
                link,
            ):
                await introduce(
                    transfer,
                    owner,
                    address=peer.address,
                    answered_by=theirs.node.node_id,
                    offer=theirs.transfer_offers,
                    timeout_s=CONNECT_S,
                )
                yield link
        finally:
            await transfer.remove_peer(owner)

    async def _read(self, read: BlockRead) -> None:
        await carry_out(read, await self._size_class(read.block_bytes).transfer(), self._post)


class Answering:
    """Sessions that peers opened, in order to read from us. Their loss is not reported: leases run on."""

    def __init__(self, *, post: Callable[[e.NodeEvent], None]) -> None:
        self._post = post
        self._sessions = SessionsWithReaders[Key, NodeToNode, NodeToNode](on_message=self._on_message)

    @property
    def count(self) -> int:
        return self._sessions.count

    async def serve(self, theirs: NodeHello, link: NodeEnd) -> None:
        await self._sessions.serve((theirs.block_bytes, theirs.node), link)

    def send(self, size_class: int, peer: NodeRef, message: NodeToNode) -> None:
        """Send a message, or drop it if the session is gone: the reader knows of its end."""
        self._sessions.send((size_class, peer), message)

    def hang_up(self) -> None:
        """End all sessions; what is queued for them is still sent."""
        self._sessions.hang_up()

    def _on_message(self, key: Key, message: NodeToNode) -> None:
        if not isinstance(message, READER_MESSAGES):
            raise LinkBroken(f"{key[1].node_id} answers what nobody requested: {type(message).__name__}")
        self._post(e.FromPeer(*key, message))
