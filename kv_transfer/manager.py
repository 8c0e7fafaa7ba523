"""What a worker uses: the backends that work here, one per peer, and reads that are checked."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton.core.errors import IncompatiblePeer, OtherMemory, PeerFailure, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.checksums import checksum_blocks
from kv_transfer.read import BlockRead, ReadDone

log = logging.getLogger(__name__)


READ_GRACE_S = 0.5
"""Time that a backend has, after a read's own, to say how the read ended."""


@dataclass(slots=True)
class TransferCounters:
    """Counts of one backend. They only rise, and the telemetry reads them."""

    reads_ok: int = 0
    reads_failed: int = 0
    """Out of time, peer lost."""
    reads_stale: int = 0
    reads_corrupt: int = 0
    """Ended well but for their checksums."""
    reads_unsettled: int = 0
    """Failed with bytes that might still land."""
    bytes_read: int = 0
    read_seconds: float = 0.0
    """Sum over all reads, well or not."""


class TransferManager:
    """Belongs to the worker's event loop. `backends`: most preferred first, none started yet."""

    def __init__(self, backends: Sequence[TransferBackend], *, memory: KVMemory) -> None:
        """`memory` is what the backends read into; checksums are compared in host memory only."""
        self._candidates = tuple(backends)
        self._memory = memory
        self._backends: dict[str, TransferBackend] = {}
        self._chosen: dict[WorkerId, TransferBackend] = {}
        self.counters: dict[str, TransferCounters] = {}
        """Backend name -> counts, for the backends that work here."""
        self.left_out: dict[str, str] = {}
        """Backend name -> why it does not work here. Those for the other kind of memory are not named."""

    async def start(self) -> None:
        """Backends that cannot work here are left out, with a log line unless they are for the other kind of
        memory. Raises SetupError: none can."""
        refusals: dict[str, str] = {}
        for backend in self._candidates:
            try:
                await backend.start()
            except SetupError as error:
                refusals[backend.name] = str(error)
                if isinstance(error, OtherMemory):
                    log.debug("KV transfer without %s: %s", backend.name, error)
                else:
                    self.left_out[backend.name] = str(error)
                    log.warning("KV transfer without %s: %s", backend.name, error)
                await backend.close()
            else:
                self._backends[backend.name] = backend
                self.counters[backend.name] = TransferCounters()
        if not self._backends:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
            raise SetupError(f"no KV transfer backend works on this machine ({reasons or 'none configured'})")

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool, and nobody can read it."""
        self._chosen.clear()
        backends, self._backends = self._backends, {}
        await asyncio.gather(*(backend.close() for backend in backends.values()))

    def offers(self) -> dict[str, bytes]:
        """What each backend offers to peers: `KVPart.transfer_offers`."""
        return {name: backend.offer() for name, backend in self._backends.items()}

    @property
    def peer_counts(self) -> dict[str, int]:
        """Backend name -> peers that are read over it."""
        chosen = [backend.name for backend in self._chosen.values()]
        return {name: chosen.count(name) for name in self._backends}

    async def add_peer(
        self, peer: WorkerId, offer: Mapping[str, bytes], *, block_bytes: int | None = None
    ) -> str:
        """The name of the backend that will read from the peer: the first of ours that the peer offers
        and that can reach it. Again with other offers: replaces. `block_bytes`: of the peer's blocks, if
        not of ours; then only `ranges` of them can be read. Raises IncompatiblePeer or
        TransferFailed, the last of the reasons."""
        ours = list(self._backends)
        failure: PeerFailure = IncompatiblePeer(f"{peer} offers {sorted(offer)}, we have {ours}")
        for name in [name for name in ours if name in offer]:
            backend = self._backends[name]
            try:
                await backend.add_peer(peer, offer[name], block_bytes=block_bytes)
            except (IncompatiblePeer, TransferFailed) as error:
                failure = error
                log.info("%s cannot be read over %s: %s", peer, name, error)
            else:
                before = self._chosen.get(peer)
                self._chosen[peer] = backend
                if before is not None and before is not backend:
                    await before.remove_peer(peer)
                return name
        await self.remove_peer(peer)
        raise failure

    async def remove_peer(self, peer: WorkerId) -> None:
        """Reads in flight from it end with an error. Unknown peer: nothing happens."""
        backend = self._chosen.pop(peer, None)
        if backend is not None:
            await backend.remove_peer(peer)

    async def read_checked(self, read: BlockRead) -> ReadDone:
        """Carry a read out, then compare the owner's generations, as they are after the copy, with the
        granted ones, and the bytes with their checksums. Never raises for what a peer or the network does;
        cancelled, it leaves the read behind: call `settled` then. Returns within the read's time and
        READ_GRACE_S, even if the backend does not.

        Checking after the copy is enough: a generation rises before the first byte of new content is
        written, and never falls.
        """
        backend = self._chosen.get(read.owner)
        if backend is None:
            return ReadDone(read.read_id, f"{read.owner} is not a transfer peer")
        began_s = time.monotonic()
        try:
            # The backend keeps the deadline itself, unless its thread hangs (a driver).
            async with asyncio.timeout(read.timeout_s + READ_GRACE_S):
                found = await backend.read(
                    read.owner,
                    read.source_blocks,
                    read.local_blocks,
                    timeout_s=read.timeout_s,
                    ranges=read.ranges,
                )
        except TimeoutError:
            error = f"{read.owner}: the transfer backend {backend.name} hangs"
            done = ReadDone(read.read_id, error, is_settled=False)
        except PeerFailure as error:
            settled = not (isinstance(error, TransferFailed) and error.may_still_land)
            done = ReadDone(read.read_id, str(error) or type(error).__name__, is_settled=settled)
        else:
            done = _compared(read, found)
            if any(read.checksums) and not done.error:
                done = await self._verified(read, done)
        done = msgspec.structs.replace(done, seconds=time.monotonic() - began_s)
        _count(self.counters[backend.name], done)
        return done

    async def _verified(self, read: BlockRead, good: ReadDone) -> ReadDone:
        if not self._memory.is_host:
            return good
        found = await asyncio.to_thread(
            checksum_blocks, self._memory, read.local_blocks, content_bytes=read.block_bytes
        )
        pairs = enumerate(zip(read.checksums, found, strict=True))
        corrupt = tuple(i for i, (expected, there) in pairs if expected and expected != there)
        return msgspec.structs.replace(good, corrupt=corrupt) if corrupt else good

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read of any backend can write into these blocks any more."""
        for backend in list(self._backends.values()):
            await backend.settled(local_blocks)


def _compared(read: BlockRead, found: Sequence[int]) -> ReadDone:
    if list(read.generations) == list(found):
        return ReadDone(read.read_id, byte_count=read.byte_count)
    pairs = zip(read.source_blocks, read.generations, found, strict=False)
    moved = [block for block, granted, now in pairs if granted != now]
    return ReadDone(read.read_id, f"{read.owner} gave blocks {moved[:8]} to new content", is_stale=True)


def _count(counters: TransferCounters, done: ReadDone) -> None:
    counters.read_seconds += done.seconds
    if done.is_stale:
        counters.reads_stale += 1
    elif done.corrupt:
        counters.reads_corrupt += 1
    elif done.error:
        counters.reads_failed += 1
        counters.reads_unsettled += not done.is_settled
    else:
        counters.reads_ok += 1
        counters.bytes_read += done.byte_count
