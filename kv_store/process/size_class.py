"""One block size's arena, SSD file and transfer connections, as the process holds them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError
from baton.core.ids import NodeId
from baton.core.store import NodeHello, NodeRef
from kv_store.arena import Arena
from kv_store.node import events as e
from kv_transfer.backend import KVMemory
from kv_transfer.manager import TransferManager
from kv_transfer.peers import Spawn

log = logging.getLogger(__name__)

MakeTransfer = Callable[[NodeId, KVMemory], TransferManager]
"""A function that makes a transfer manager, which is not started yet."""


AHEAD_BYTES = 64 * 2**20
"""Memory that is taken ahead of its use: what a worker writes in some 50 ms. An idle store takes no more."""


class SizeClassMemory:
    """The memory and connections of one size class. Memory is taken from the system slab by slab, a little
    ahead of its use and beside the loop; a slot that is used before its turn takes its own at once.
    `give_back_unused` ends that: another size class needs memory too."""

    def __init__(
        self,
        opened: e.OpenSizeClass,
        *,
        node: NodeRef,
        generations: npt.NDArray[np.uint64],
        is_first: bool,
        make_transfer: MakeTransfer,
        threads: Executor,
        spawn: Spawn,
    ) -> None:
        """`is_first` means that no other size class shares the host memory yet. Raises SetupError if there is
        too little memory."""
        self.block_bytes, self._node, self._threads = opened.size_class, node, threads
        room_bytes = None if is_first else 0
        self.arena = Arena.create(
            opened.slot_bytes,
            opened.slot_count,
            name=f"baton-store-{opened.size_class}",
            room_bytes=room_bytes,
        )
        self._generations, self._make_transfer = generations, make_transfer
        self._transfer: asyncio.Task[TransferManager] | None = None
        self._used = bytearray(opened.slot_count)
        """Slots that the core has put to use: only the core gives their memory back."""
        self._ahead_count = -(-AHEAD_BYTES // opened.slot_bytes)
        self._is_short = asyncio.Event()
        """Set when slots were put to use, so that fewer than wanted may have memory ahead."""
        self._reserving = spawn(self._reserve_ahead()) if is_first else None

    async def close(self) -> None:
        if self._reserving is not None:
            self._reserving.cancel()
            await asyncio.wait({self._reserving})
        if self._transfer is not None:
            with contextlib.suppress(SetupError):
                await (await self._transfer).close()
        self.arena.close()

    # --- memory -----------------------------------------------------------------------------------

    def use(self, slots: Sequence[int]) -> None:
        """Take the slots' memory before anybody writes there. Raises NoHostMemory."""
        for slot in slots:
            self.arena.reserve(slot)
            self._used[slot] = 1
        self._is_short.set()

    def forget(self, slot: int) -> None:
        """Give the slot's memory back to the system."""
        self._used[slot] = 0
        self.arena.release(slot)

    def give_back_unused(self) -> None:
        """Take no more memory ahead, and give back what was taken ahead."""
        if self._reserving is None:
            return
        self._reserving.cancel()
        self._reserving = None
        for slot, is_used in enumerate(self._used):
            if not is_used:
                self.arena.release(slot)

    async def _reserve_ahead(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._is_short.clear()
            while self.arena.reserved_count() < self._used.count(1) + self._ahead_count:
                if not await loop.run_in_executor(self._threads, self.arena.reserve_slab):
                    break
            await self._is_short.wait()

    # --- peers ------------------------------------------------------------------------------------

    async def transfer(self) -> TransferManager:
        """The transfer manager, started with the first call, as a node without peers needs none. Raises
        SetupError."""
        if self._transfer is None or (self._transfer.done() and self._transfer.exception() is not None):
            self._transfer = asyncio.create_task(self._start_transfer())
        return await asyncio.shield(self._transfer)

    def hello(self, transfer: TransferManager) -> NodeHello:
        return NodeHello(self._node, self.arena.slot_bytes, self.block_bytes, transfer.offers())

    async def _start_transfer(self) -> TransferManager:
        memory = KVMemory(
            base_address=self.arena.base_address,
            block_bytes=self.arena.slot_bytes,
            block_count=self.arena.slot_count,
            generations=self._generations,
        )
        transfer = self._make_transfer(self._node.node_id, memory)
        await transfer.start()
        log.info("blocks of %d bytes are transferred by %s", self.block_bytes, ", ".join(transfer.counters))
        return transfer
