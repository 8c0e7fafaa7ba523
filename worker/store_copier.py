"""Copies between a worker's KV pool and the store's arena, on a thread of their own."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from baton.core.store import StoreWelcome
from worker import events as e

log = logging.getLogger(__name__)


class ArenaCopies(Protocol):
    """Copies between one pool and one mapped arena. Calls come from one thread. They return when the bytes
    are in place, and raise what a broken device raises."""

    def to_slots(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        """Copy pool blocks[i] to slots[i]. Returns the checksum of each as it is in the arena; 0 where the
        store wants none."""
        ...

    def from_slots(
        self, slots: Sequence[int], blocks: Sequence[int], checksums: Sequence[int]
    ) -> tuple[int, ...]:
        """Copy slots[i] to pool blocks[i]. Returns the positions whose checksum (0: none) does not hold."""
        ...

    def close(self) -> None:
        """Unmap the arena."""
        ...


_Work = Callable[[ArenaCopies], e.CopyDone]
OpenCopies = Callable[[int, StoreWelcome], ArenaCopies]
"""A function that opens the copies for the arena behind a descriptor. The arena is mapped, and the descriptor
stays the caller's. Raises OSError or ValueError."""


class StoreCopier:
    """Runs copies. Each is answered by one CopyDone, in order; copies of a session that has ended fail.

    The queue is bounded by the core, which has a few copies in flight at most.
    """

    def __init__(
        self, open_copies: OpenCopies, *, block_count: int, post: Callable[[e.CopyDone], None]
    ) -> None:
        self._open, self._block_count, self._post = open_copies, block_count, post
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-copy")
        self._copies: ArenaCopies | None = None
        self._slot_count = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self.copied_count = 0
        """Blocks copied in either direction."""

    # --- a session's begin and end ----------------------------------------------------------------

    def attach(self, descriptor: int, welcome: StoreWelcome) -> None:
        """Map the arena. Raises OSError or ValueError if it cannot be mapped."""
        assert self._copies is None, "detach first"
        self._copies = self._open(descriptor, welcome)
        self._slot_count = welcome.slot_count

    async def detach(self) -> None:
        """Wait until no copy is under way; copies that have not begun fail. Idempotent."""
        copies, self._copies = self._copies, None
        if self._under_way:
            await asyncio.wait(self._under_way)
        if copies is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, copies.close)

    def close(self) -> None:
        """End the thread, after `detach`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- copies -----------------------------------------------------------------------------------

    def to_store(self, copy: e.CopyToStore) -> None:
        def work(copies: ArenaCopies) -> e.CopyDone:
            return e.CopyDone(copy.copy_id, checksums=copies.to_slots(copy.blocks, copy.slots))

        self._start(copy, work)

    def from_store(self, copy: e.CopyFromStore) -> None:
        def work(copies: ArenaCopies) -> e.CopyDone:
            corrupt = copies.from_slots(copy.slots, copy.blocks, copy.checksums)
            return e.CopyDone(copy.copy_id, corrupt=corrupt)

        self._start(copy, work)

    def _start(self, copy: e.CopyToStore | e.CopyFromStore, work: _Work) -> None:
        copies = self._copies
        task = asyncio.create_task(self._run(copy, copies, work))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(
        self,
        copy: e.CopyToStore | e.CopyFromStore,
        copies: ArenaCopies | None,
        work: _Work,
    ) -> None:
        try:
            self._check(copy)
            loop = asyncio.get_running_loop()
            done = await loop.run_in_executor(self._thread, self._work, copies, work)
        except Exception as error:
            log.warning("a copy of %d blocks to or from the store failed: %s", len(copy.blocks), error)
            done = e.CopyDone(copy.copy_id, error=f"{type(error).__name__}: {error}")
        else:
            self.copied_count += len(copy.blocks)
        self._post(done)

    def _work(self, copies: ArenaCopies | None, work: _Work) -> e.CopyDone:
        if copies is None or copies is not self._copies:
            raise ConnectionError("the session with the store has ended")
        began_s = time.monotonic()
        return msgspec.structs.replace(work(copies), seconds=time.monotonic() - began_s)

    def _check(self, copy: e.CopyToStore | e.CopyFromStore) -> None:
        """Check the indices of a copy. The arena is another process's word, and a wrong index is another
        sequence's memory."""
        if any(not 0 <= slot < self._slot_count for slot in copy.slots):
            raise ValueError(f"the store named slots beyond its {self._slot_count}: {copy.slots[:8]}")
        assert all(0 <= block < self._block_count for block in copy.blocks), copy.blocks
        assert len(copy.blocks) == len(copy.slots), copy
