"""What backends that read processes of their own host have in common: threads, open reads and their ends."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.core.errors import TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory
from kv_transfer.backends.cma_memory import ProcessMemory
from kv_transfer.backends.copy_threads import CopyJob, CopyThreads, Steps
from kv_transfer.backends.open_reads import BackendReads
from kv_transfer.backends.source_process import Presence, ProcessOffer, SourceProcess


class HostReads:
    """All methods belong to the event loop. Raises SetupError where processes cannot be read at all."""

    def __init__(self, *, thread_count: int, name: str) -> None:
        self._process = ProcessMemory()
        self.presence = Presence()
        self._reads = BackendReads()
        self._threads = CopyThreads(thread_count, name=name)
        self._is_closed = False

    async def close(self) -> None:
        """Returns when no thread copies any more."""
        self._is_closed = True
        self.presence.end()
        self._reads.give_up("transfers are closed")
        await asyncio.to_thread(self._threads.close)
        await self._reads.all_over()

    def offered(self, memory: KVMemory) -> dict[str, Any]:
        """The fields of `ProcessOffer`."""
        return self.presence.fields(memory)

    def source(self, offer: ProcessOffer) -> SourceProcess:
        return SourceProcess(self._process, offer)

    def check(self, peer: WorkerId, offer: ProcessOffer) -> None:
        """Raises IncompatiblePeer or TransferFailed: the peer's process cannot be read from here."""
        self.source(offer).check(peer, host=self.presence.host)

    def give_up(self, peer: WorkerId) -> None:
        self._reads.give_up(f"{peer} was removed", peer=peer)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        await self._reads.settled(local_blocks)

    async def run(
        self,
        peer: WorkerId,
        steps: Steps,
        local_blocks: Sequence[int],
        timeout_s: float,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """Raises TransferFailed. `on_end` is called when nothing of the read can land any more, on a copying
        thread or here; it raises nothing."""
        read = self._reads.open(peer, local_blocks)

        def end(job: CopyJob) -> None:
            on_end()
            self._reads.ended(read, job.result, job.error)

        job = CopyJob(steps, time.monotonic() + timeout_s, end)

        def abandon() -> None:
            job.is_abandoned = True

        if self._is_closed or not self._threads.submit(job):
            on_end()
            reason = "transfers are closed" if self._is_closed else "too many transfers wait"
            raise TransferFailed(reason)
        read.abandon = abandon
        return await self._reads.run(read, timeout_s=timeout_s)

    def submit(self, steps: Steps) -> None:
        """Steps that nobody waits for. They may not be carried out: too many wait, or all is closed."""
        self._threads.submit(CopyJob(steps, float("inf"), lambda job: None))
