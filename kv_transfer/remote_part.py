"""The leader's stand-in for the transfer manager of a part that only another process has, here or elsewhere.

It passes calls on to `kv_transfer.part_service`, in that process. Reads into the part are done there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TypeVar

from baton.core.errors import IncompatiblePeer, TransferFailed
from baton.core.geometry import KVGeometry
from baton.core.ids import WorkerId
from kv_transfer.layout import Places, part_geometry
from kv_transfer.manager import READ_GRACE_S, TransferCounters
from kv_transfer.read import BlockRead, ReadDone
from kv_transfer.remote_messages import (
    AbandonCall,
    AddPartPeer,
    ClosePart,
    PartAnswer,
    PartCallDone,
    PartOrder,
    PartPeerAdded,
    PartReadDone,
    PartReady,
    PartReport,
    ReadIntoPart,
    RemovePartPeer,
    SettlePart,
)

ANSWER_S = 15.0
"""The longest time for an answer to what takes no time, or for a connection with a peer."""
LINK_S = 0.5
"""Time for a read's order to get there and for the answer to come back, after all that the read may take."""
CLOSE_S = 2.0

A = TypeVar("A", PartPeerAdded, PartReadDone, PartCallDone)


class PartLost(TransferFailed):
    """The process of a part is gone, or cannot be reached. The worker ends with it."""


class RemotePart:
    """See `kv_transfer.part_transfer.PartReader`. It belongs to the leader's event loop."""

    def __init__(
        self,
        name: str,
        *,
        send: Callable[[PartOrder], None],
        generations: Sequence[int],
        on_silent: Callable[[str], None],
    ) -> None:
        """`send` delivers orders in order and does not wait. `generations` is the table of whoever gives
        blocks out. `on_silent` ends the worker: the part does not do what it always can."""
        self._name, self._send, self._generations, self._on_silent = name, send, generations, on_silent
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[PartAnswer]] = {}
        self._said: asyncio.Future[PartReady] = asyncio.get_running_loop().create_future()
        self._lost = ""
        self._closed = asyncio.Event()
        """Set once the part has confirmed that it is closed."""
        self._counters: dict[str, TransferCounters] = {}

    # --- what the link says -------------------------------------------------------------------------

    def heard(self, report: PartReport) -> None:
        if isinstance(report, PartReady):
            if not self._said.done():
                self._said.set_result(report)
                self._counters = {name: TransferCounters() for name in report.offers}
            return
        if isinstance(report, PartReadDone):
            self._counters = report.counters
        waiting = self._waiting.get(report.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(report)

    def lost(self, reason: str) -> None:
        """No report will come any more. Calls under way end at once. Idempotent."""
        if self._lost:
            return
        self._lost = reason
        self._said.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PartLost(f"{self._name}: {reason}"))

    # --- life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the part says that it is there. Raises PartLost."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait([self._said])
        except TimeoutError:
            self._silent()
        if self._lost:
            raise PartLost(f"{self._name}: {self._lost}")

    def places(self, whole: KVGeometry, *, block_count: int) -> Places:
        """What the part holds, after `start`. Raises ValueError if its pool is not one of this worker."""
        said = self._said.result()
        places = Places(
            range(said.first_layer, said.first_layer + said.layer_count),
            range(said.first_head, said.first_head + said.head_count),
        )
        expected = (block_count, part_geometry(whole, places).block_bytes)
        if (said.block_count, said.block_bytes) != expected:
            raise ValueError(
                f"{self._name} has {said.block_count} blocks of {said.block_bytes} B, and not "
                f"{expected[0]} of {expected[1]} B: the hosts of this worker's stages have different models "
                "or settings"
            )
        return places

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool and nobody can read it, unless the part is
        lost: then its process ends with the worker."""
        try:
            await self._ask(ClosePart, PartCallDone, timeout_s=CLOSE_S)
        except (PartLost, TimeoutError) as error:
            self.lost(str(error) or "it does not close in time")
        else:
            self._closed.set()
            self.lost("it is closed")

    def offers(self) -> dict[str, bytes]:
        return self._said.result().offers

    @property
    def left_out(self) -> Mapping[str, str]:
        if not self._said.done() or self._said.cancelled():
            return {}
        return self._said.result().left_out

    @property
    def counters(self) -> Mapping[str, TransferCounters]:
        """Counts as of the last read that ended."""
        return self._counters

    # --- peers and reads ----------------------------------------------------------------------------

    async def add_peer(
        self, peer: WorkerId, offer: Mapping[str, bytes], *, block_bytes: int | None = None
    ) -> str:
        """Raises IncompatiblePeer or TransferFailed."""
        own = self._said.result().block_bytes
        try:
            found = await self._ask(
                lambda number: AddPartPeer(number, peer, dict(offer), block_bytes or own),
                PartPeerAdded,
                timeout_s=ANSWER_S,
            )
        except TimeoutError:
            raise TransferFailed(f"{self._name} does not take up {peer} in time") from None
        if found.error:
            raise (IncompatiblePeer if found.is_incompatible else TransferFailed)(found.error)
        return found.backend

    async def remove_peer(self, peer: WorkerId) -> None:
        try:
            await self._ask(lambda number: RemovePartPeer(number, peer), PartCallDone, timeout_s=ANSWER_S)
        except TimeoutError:
            self._silent()
        except PartLost:
            return  # it reads from nobody any more, as far as this worker is concerned

    async def read_checked(self, read: BlockRead) -> ReadDone:
        """Returns within the read's time, READ_GRACE_S and LINK_S, and at once if the part is lost."""
        # Whatever order gave these blocks new content before, the part knows it before the first byte.
        generations = tuple(int(self._generations[block]) for block in read.local_blocks)
        try:
            found = await self._ask(
                lambda number: ReadIntoPart(number, read, generations),
                PartReadDone,
                timeout_s=read.timeout_s + READ_GRACE_S + LINK_S,
            )
        except TimeoutError:
            error = f"{read.owner}: {self._name} does not say how the read ended"
            return ReadDone(read.read_id, error, is_settled=False)
        except PartLost as error:
            return ReadDone(read.read_id, str(error), is_settled=False)
        return found.done

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read can write into these blocks any more. Once the part is lost, nobody
        knows: then it does not return, and the worker ends."""
        try:
            await self._ask(
                lambda number: SettlePart(number, tuple(local_blocks)), PartCallDone, timeout_s=None
            )
        except PartLost:
            await self._closed.wait()

    async def _ask(self, order: Callable[[int], PartOrder], answer: type[A], *, timeout_s: float | None) -> A:
        """Raises PartLost, TimeoutError."""
        if self._lost:
            raise PartLost(f"{self._name}: {self._lost}")
        number = next(self._numbers)
        waiting: asyncio.Future[PartAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._send(order(number))
            async with asyncio.timeout(timeout_s):
                found = await waiting
        except (TimeoutError, asyncio.CancelledError):
            self._send(AbandonCall(number))
            raise
        finally:
            del self._waiting[number]
        assert isinstance(found, answer), f"{self._name} answers {found}"
        return found

    def _silent(self) -> None:
        reason = f"{self._name} does not answer within {ANSWER_S:g} s"
        self.lost(reason)
        self._on_silent(reason)
