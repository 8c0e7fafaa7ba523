"""A part of a worker's blocks in a process of its own: it carries the orders of the leader's stand-in out.

`kv_transfer.remote_part` is the other end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.core.errors import IncompatiblePeer, PeerFailure
from baton.core.ids import WorkerId
from kv_transfer.manager import TransferManager
from kv_transfer.remote_messages import (
    AbandonCall,
    AddPartPeer,
    ClosePart,
    PartCallDone,
    PartOrder,
    PartPeerAdded,
    PartReadDone,
    PartReport,
    ReadIntoPart,
    RemovePartPeer,
    SettlePart,
)

RaiseGenerations = Callable[[Sequence[int], Sequence[int]], None]
"""Raises the entries of some blocks in the table that peers read."""


@dataclass(slots=True, eq=False)
class _Call:
    task: asyncio.Task[None]
    blocks: frozenset[int] = frozenset()
    """Blocks that it reads into."""
    is_abandoned: bool = False


class PartService:
    """It belongs to the event loop of the part's process."""

    def __init__(
        self,
        manager: TransferManager,
        *,
        raise_generations: RaiseGenerations,
        report: Callable[[PartReport], None],
        on_crash: Callable[[str], None],
    ) -> None:
        """`report` delivers in order and does not wait. `on_crash` ends the worker: an order could not be
        carried out because of a mistake of its own."""
        self._manager, self._raise_generations = manager, raise_generations
        self._report, self._on_crash = report, on_crash
        self._calls: dict[int, _Call] = {}
        self._of_peers: dict[WorkerId, asyncio.Task[None]] = {}
        """The last call about each peer: one at a time, in order."""
        self._is_closed = False

    def take(self, order: PartOrder) -> None:
        """Begin to carry an order out. Orders are taken in the order in which they were sent."""
        if self._is_closed:
            return
        match order:
            case AddPartPeer(number, peer):
                self._begin_for(peer, number, lambda: self._add(order))
            case RemovePartPeer(number, peer):
                self._begin_for(peer, number, lambda: self._manager.remove_peer(peer))
            case ReadIntoPart(number, read, generations):
                # Before the first byte: a peer that reads the old content meanwhile finds out.
                self._raise_generations(read.local_blocks, generations)
                self._begin(number, self._read(order)).blocks = frozenset(read.local_blocks)
            case SettlePart(number, blocks):
                self._begin(number, self._settle(number, blocks))
            case AbandonCall(number):
                if (call := self._calls.get(number)) is not None:
                    call.is_abandoned = True
                    call.task.cancel()
            case ClosePart(number):
                self._is_closed = True
                self._begin(number, self._close_as_told(number))

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool, and nobody can read it."""
        self._is_closed = True
        this = asyncio.current_task()
        if others := [call.task for call in self._calls.values() if call.task is not this]:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        await self._manager.close()

    # --- calls --------------------------------------------------------------------------------------

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> _Call:
        call = self._calls[number] = _Call(asyncio.create_task(work))
        call.task.add_done_callback(lambda task: self._ended(number, task))
        return call

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(f"{type(error).__name__}: {error}")

    def _begin_for(
        self, peer: WorkerId, number: int, work: Callable[[], Awaitable[PartReport | None]]
    ) -> None:
        before = self._of_peers.get(peer)

        async def in_turn() -> None:
            if before is not None and not before.done():
                await asyncio.wait([before])
            found = await work()
            self._report(PartCallDone(number) if found is None else found)

        task = self._of_peers[peer] = self._begin(number, in_turn()).task

        def forget(_: asyncio.Task[None]) -> None:
            if self._of_peers.get(peer) is task:
                del self._of_peers[peer]

        task.add_done_callback(forget)

    async def _add(self, order: AddPartPeer) -> PartReport:
        try:
            backend = await self._manager.add_peer(order.peer, order.offers, block_bytes=order.block_bytes)
        except PeerFailure as error:
            is_incompatible = isinstance(error, IncompatiblePeer)
            reason = str(error) or type(error).__name__
            return PartPeerAdded(order.number, error=reason, is_incompatible=is_incompatible)
        return PartPeerAdded(order.number, backend)

    async def _read(self, order: ReadIntoPart) -> None:
        done = await self._manager.read_checked(order.read)
        counters = {name: replace(counts) for name, counts in self._manager.counters.items()}
        self._report(PartReadDone(order.number, done, counters))

    async def _settle(self, number: int, blocks: Sequence[int]) -> None:
        wanted = frozenset(blocks)
        # A read that was given up is the manager's to know only once its own task has heard it.
        given_up = [call.task for call in self._calls.values() if call.is_abandoned and call.blocks & wanted]
        if given_up:
            await asyncio.wait(given_up)
        await self._manager.settled(blocks)
        self._report(PartCallDone(number))

    async def _close_as_told(self, number: int) -> None:
        await self.close()
        self._report(PartCallDone(number))
