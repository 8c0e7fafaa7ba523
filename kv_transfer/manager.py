"""What a worker uses: the backends that work here, one per peer, and reads that are checked."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.errors import IncompatiblePeer, PeerFailure, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory, TransferBackend
from kv_transfer.checksums import checksum_blocks
from kv_transfer.layout import Ranges
from kv_transfer.selection import choose_backend

log = logging.getLogger(__name__)


READ_GRACE_S = 0.5
"""Beyond a read's own time, for the backend to say how it ended."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """`error` empty: the bytes are in place and the source's generations still matched after the copy.

    `is_settled` False: bytes may yet land in the local blocks; await `TransferManager.settled`.
    `is_stale`: the source gave the blocks to somebody else; reading again is pointless.
    `is_corrupt`: the bytes are not those the checksums were made of; reading again may help.
    `bytes` counts what was copied well; `seconds` is the time the read took, well or not.
    """

    error: str = ""
    is_settled: bool = True
    is_stale: bool = False
    is_corrupt: bool = False
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TransferCounters:
    """Of one backend; they only rise. The telemetry reads them."""

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

    def __init__(
        self, backends: Sequence[TransferBackend], *, block_bytes: int, memory: KVMemory | None = None
    ) -> None:
        """`memory`: what the backends read into, for checksums; only in host memory are they compared."""
        self._candidates = tuple(backends)
        self._block_bytes, self._memory = block_bytes, memory
        self._backends: dict[str, TransferBackend] = {}
        self._chosen: dict[WorkerId, TransferBackend] = {}
        self.counters: dict[str, TransferCounters] = {}
        """Backend name -> counts, for the backends that work here."""
        self.left_out: dict[str, str] = {}
        """Backend name -> why it does not work here."""

    async def start(self) -> None:
        """Backends that cannot work here are left out, with a log line. Raises SetupError: none can."""
        for backend in self._candidates:
            try:
                await backend.start()
            except SetupError as error:
                self.left_out[backend.name] = str(error)
                log.warning("KV transfer without %s: %s", backend.name, error)
                await backend.close()
            else:
                self._backends[backend.name] = backend
                self.counters[backend.name] = TransferCounters()
        if not self._backends:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise SetupError(f"no KV transfer backend works on this machine ({reasons or 'none configured'})")

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pool, and nobody can read it."""
        self._chosen.clear()
        backends, self._backends = self._backends, {}
        await asyncio.gather(*(backend.close() for backend in backends.values()))

    def offers(self) -> dict[str, bytes]:
        """For `PeerHello.transfer_offers`."""
        return {name: backend.offer() for name, backend in self._backends.items()}

    @property
    def peer_counts(self) -> dict[str, int]:
        """Backend name -> peers that are read over it."""
        chosen = [backend.name for backend in self._chosen.values()]
        return {name: chosen.count(name) for name in self._backends}

    async def add_peer(
        self, peer: WorkerId, offers: Mapping[str, bytes], *, block_bytes: int | None = None
    ) -> str:
        """The name of the backend that will read from the peer: the first of ours that the peer offers
        and that can reach it. Again with other offers: replaces. `block_bytes`: of the peer's blocks, if
        not of ours; then only `ranges` of them can be read. Raises IncompatiblePeer or
        TransferFailed, the last of the reasons."""
        left = list(self._backends)
        failure: PeerFailure = IncompatiblePeer(f"{peer} offers {sorted(offers)}, we have {left}")
        while (name := choose_backend(left, offers)) is not None:
            backend = self._backends[name]
            try:
                await backend.add_peer(peer, offers[name], block_bytes=block_bytes)
            except (IncompatiblePeer, TransferFailed) as error:
                failure = error
                log.info("%s cannot be read over %s: %s", peer, name, error)
                left = left[left.index(name) + 1 :]
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

    async def read_checked(
        self,
        peer: WorkerId,
        source_blocks: Sequence[int],
        local_blocks: Sequence[int],
        generations: Sequence[int],
        timeout_s: float,
        *,
        ranges: Ranges = (),
        checksums: Sequence[int] = (),
    ) -> ReadOutcome:
        """Read source_blocks[i] of the peer, or `ranges` of it, into local_blocks[i] and compare its
        generation, as it is after the copy, with generations[i]; then its bytes with checksums[i] (XXH3-64,
        of whole blocks; none: not compared). Never raises for what a peer or the network does; cancelled, it
        leaves the read behind: call `settled` then. Returns within `timeout_s` and READ_GRACE_S, even if the
        backend does not.

        Checking after the copy is enough: a generation rises before the first byte of new content is
        written, and never falls.
        """
        backend = self._chosen.get(peer)
        if backend is None:
            return ReadOutcome(error=f"{peer} is not a transfer peer")
        began_s = time.monotonic()
        try:
            # The backend keeps the deadline itself, unless its thread hangs (a driver, a staging copy).
            async with asyncio.timeout(timeout_s + READ_GRACE_S):
                found = await backend.read(
                    peer, source_blocks, local_blocks, timeout_s=timeout_s, ranges=ranges
                )
        except TimeoutError:
            outcome = ReadOutcome(f"{peer}: the transfer backend {backend.name} hangs", is_settled=False)
        except PeerFailure as error:
            settled = not (isinstance(error, TransferFailed) and error.may_still_land)
            outcome = ReadOutcome(str(error) or type(error).__name__, is_settled=settled)
        else:
            outcome = self._compare(peer, source_blocks, generations, found, ranges)
            if checksums and not outcome.error:
                outcome = await self._verified(outcome, peer, local_blocks, checksums)
        seconds = time.monotonic() - began_s
        return self._count(self.counters[backend.name], outcome, seconds)

    def _compare(
        self,
        peer: WorkerId,
        blocks: Sequence[int],
        granted: Sequence[int],
        found: Sequence[int],
        ranges: Ranges,
    ) -> ReadOutcome:
        if list(granted) == list(found):
            block_bytes = sum(piece.length for piece in ranges) or self._block_bytes
            return ReadOutcome(bytes=len(blocks) * block_bytes)
        moved = [block for block, g, f in zip(blocks, granted, found, strict=False) if g != f]
        return ReadOutcome(f"{peer} gave blocks {moved[:8]} to new content", is_stale=True)

    async def _verified(
        self, good: ReadOutcome, peer: WorkerId, blocks: Sequence[int], expected: Sequence[int]
    ) -> ReadOutcome:
        if self._memory is None or not self._memory.is_host:
            return good
        found = await asyncio.to_thread(checksum_blocks, self._memory, blocks)
        if list(expected) == found:
            return good
        wrong = [block for block, e, f in zip(blocks, expected, found, strict=False) if e != f]
        return ReadOutcome(f"{peer}: blocks {wrong[:8]} arrived corrupt", is_corrupt=True)

    def _count(self, counters: TransferCounters, outcome: ReadOutcome, seconds: float) -> ReadOutcome:
        counters.read_seconds += seconds
        counters.bytes_read += outcome.bytes
        if outcome.is_stale:
            counters.reads_stale += 1
        elif outcome.is_corrupt:
            counters.reads_corrupt += 1
        elif outcome.error:
            counters.reads_failed += 1
            counters.reads_unsettled += not outcome.is_settled
        else:
            counters.reads_ok += 1
        return replace(outcome, seconds=seconds)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read of any backend can write into these blocks any more."""
        for backend in list(self._backends.values()):
            await backend.settled(local_blocks)
