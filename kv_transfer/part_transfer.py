"""Reads between workers of any two shapes, for a worker whose KV blocks are in one part or in several.

Each part has a transfer manager of its own. A read of whole blocks becomes one read for each pair of parts,
ours and the owner's, that have bytes in common. Two workers of one part each read directly.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import msgspec

from baton.core.errors import IncompatiblePeer
from baton.core.geometry import KVGeometry
from baton.core.ids import ReadId, WorkerId
from baton.core.messages import KVPart
from baton.core.shape import RANKS_MAX
from kv_transfer.backend import KVMemory
from kv_transfer.checksums import WholeChecksums
from kv_transfer.layout import Places, Ranges, check_places, part_geometry, part_reads
from kv_transfer.manager import TransferCounters, TransferManager
from kv_transfer.read import BlockRead, ReadDone


class LocalPart(NamedTuple):
    """A part of this worker's blocks."""

    places: Places
    memory: KVMemory
    manager: TransferManager
    """Reads into `memory`. It knows peers by the names of their parts."""


class _PartLink(NamedTuple):
    """How one of our parts is read from one of a peer's."""

    manager: TransferManager
    name: WorkerId
    """The peer's part."""
    backend: str
    block_bytes: int
    """Bytes of our part of a block."""
    ranges: Ranges


def part_name(worker_id: WorkerId, part: int, part_count: int) -> WorkerId:
    """The name by which transfer backends know a part of a worker."""
    return worker_id if part_count == 1 else WorkerId(f"{worker_id}/part{part}")


def places_of(whole: KVGeometry, parts: Sequence[KVPart]) -> list[Places]:
    """What a peer's parts hold. Raises IncompatiblePeer for parts that no worker of this model has."""
    if not 0 < len(parts) <= RANKS_MAX:
        raise IncompatiblePeer(f"its blocks have {len(parts)} parts: a worker has 1 to {RANKS_MAX}")
    found: list[Places] = []
    for part in parts:
        places = Places(
            range(part.first_layer, part.first_layer + part.layer_count),
            range(part.first_head, part.first_head + part.head_count),
        )
        try:
            check_places(whole, places)
        except ValueError as error:
            raise IncompatiblePeer(f"its blocks have {error}") from None
        found.append(places)
    return found


class PartTransfer:
    """See `kv_transfer.peers.Transfer`. It belongs to the worker's event loop."""

    def __init__(self, whole: KVGeometry, parts: Sequence[LocalPart]) -> None:
        """`whole` is the geometry of the whole model; `parts` are by rank, and hold all of it together."""
        for part in parts:
            expected = part_geometry(whole, part.places).block_bytes
            assert part.memory.block_bytes == expected, f"{part.places} in {part.memory.block_bytes} B"
        self._whole, self._parts = whole, tuple(parts)
        self._checksums: WholeChecksums | None = None
        if all(part.memory.is_host for part in parts):
            self._checksums = WholeChecksums(whole, [(part.places, part.memory) for part in parts])
        places = [part.places for part in parts]
        self._replicas = [places[:rank].count(places[rank]) for rank in range(len(places))]
        """How many parts before each hold the same."""
        self._added: dict[WorkerId, set[tuple[TransferManager, WorkerId]]] = {}
        """Names of a peer's parts that managers know, or may know."""
        self._links: dict[WorkerId, list[_PartLink]] = {}
        self._corrupt: Counter[str] = Counter()

    async def start(self) -> None:
        """Raises SetupError: one of the parts can be read by no backend."""
        for part in self._parts:
            await part.manager.start()

    async def close(self) -> None:
        """Idempotent. Afterwards nothing writes into the pools, and nobody can read them."""
        self._links.clear()
        self._added.clear()
        await asyncio.gather(*(part.manager.close() for part in self._parts))

    def offers(self) -> tuple[KVPart, ...]:
        """The parts of `PeerHello`."""
        return tuple(
            KVPart(
                part.places.layers.start,
                len(part.places.layers),
                part.places.heads.start,
                len(part.places.heads),
                part.manager.offers(),
            )
            for part in self._parts
        )

    # --- peers ------------------------------------------------------------------------------------

    async def add_peer(self, peer: WorkerId, offer: Sequence[KVPart]) -> None:
        """Make the parts of a peer readable from which ours take bytes. Again with other parts: replaces.
        Raises IncompatiblePeer or TransferFailed; then the peer is not known any more."""
        try:
            places = places_of(self._whole, offer)
            reads = [
                (part, read)
                for rank, part in enumerate(self._parts)
                for read in part_reads(self._whole, places, part.places, spread=self._replicas[rank])
            ]
        except (IncompatiblePeer, ValueError) as error:
            await self.remove_peer(peer)
            raise IncompatiblePeer(f"{peer}: {error}") from None
        names = [part_name(peer, read.source_part, len(offer)) for _, read in reads]
        wanted = {(part.manager, name) for (part, _), name in zip(reads, names, strict=True)}
        await self._forget(self._added.get(peer, set()) - wanted)
        self._added[peer] = wanted
        backends = await asyncio.gather(
            *(
                part.manager.add_peer(
                    name,
                    offer[read.source_part].transfer_offers,
                    block_bytes=part_geometry(self._whole, places[read.source_part]).block_bytes,
                )
                for (part, read), name in zip(reads, names, strict=True)
            ),
            return_exceptions=True,
        )
        links: list[_PartLink] = []
        for (part, read), name, backend in zip(reads, names, backends, strict=True):
            if isinstance(backend, BaseException):
                await self.remove_peer(peer)
                raise backend
            links.append(_PartLink(part.manager, name, backend, part.memory.block_bytes, read.ranges))
        self._links[peer] = links

    async def remove_peer(self, peer: WorkerId) -> None:
        """Reads in flight from it end with an error. Unknown peer: nothing happens."""
        self._links.pop(peer, None)
        await self._forget(self._added.pop(peer, set()))

    async def _forget(self, names: set[tuple[TransferManager, WorkerId]]) -> None:
        await asyncio.gather(*(manager.remove_peer(name) for manager, name in names))

    # --- reads ------------------------------------------------------------------------------------

    async def read_checked(self, read: BlockRead) -> ReadDone:
        """Carry out a read of whole blocks, as `TransferManager.read_checked` says: it is good if every part
        has arrived, with the granted generations at every part that was read."""
        links = self._links.get(read.owner)
        if links is None:
            return ReadDone(read.read_id, f"{read.owner} is not a transfer peer")
        if len(self._parts) == 1 and links[0].name == read.owner:
            return await links[0].manager.read_checked(read)
        began_s = time.monotonic()
        done = merged(
            read.read_id,
            await asyncio.gather(*(link.manager.read_checked(_part(read, link)) for link in links)),
        )
        if any(read.checksums) and not done.error and self._checksums is not None:
            corrupt = await asyncio.to_thread(self._checksums.wrong, read.local_blocks, read.checksums)
            if corrupt:
                self._corrupt.update({link.backend for link in links})
                done = msgspec.structs.replace(done, corrupt=corrupt)
        return msgspec.structs.replace(done, seconds=time.monotonic() - began_s)

    async def settled(self, local_blocks: Sequence[int]) -> None:
        """Returns when no abandoned read of any part can write into these blocks any more."""
        for part in self._parts:
            await part.manager.settled(local_blocks)

    # --- what is told -----------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, TransferCounters]:
        """Backend name -> counts. Each read of a part of blocks counts as one."""
        totals: dict[str, TransferCounters] = {}
        for part in self._parts:
            for backend, counters in part.manager.counters.items():
                total = totals.setdefault(backend, TransferCounters())
                for field in fields(TransferCounters):
                    setattr(total, field.name, getattr(total, field.name) + getattr(counters, field.name))
        for backend, count in self._corrupt.items():
            totals[backend].reads_corrupt += count
        return totals

    @property
    def left_out(self) -> dict[str, str]:
        """Backend name -> why it does not work here, at least for one part."""
        return {name: reason for part in self._parts for name, reason in part.manager.left_out.items()}

    @property
    def peer_counts(self) -> dict[str, int]:
        """Backend name -> peers that are read over it."""
        used = [{link.backend for link in links} for links in self._links.values()]
        return {name: sum(name in backends for backends in used) for name in self.counters}


def _part(read: BlockRead, link: _PartLink) -> BlockRead:
    """The bytes of a read that are in one of the owner's parts and wanted in one of ours. Checksums are those
    of whole blocks."""
    return msgspec.structs.replace(
        read, owner=link.name, block_bytes=link.block_bytes, ranges=link.ranges, checksums=()
    )


def merged(read_id: ReadId, parts: Sequence[ReadDone]) -> ReadDone:
    """How a read ended whose parts ended like this. If the owner gave a block away, that is the error."""
    stale = [done for done in parts if done.is_stale]
    failed = [done for done in parts if done.error]
    return ReadDone(
        read_id,
        (stale or failed)[0].error if failed else "",
        is_settled=all(done.is_settled for done in parts),
        is_stale=bool(stale),
        byte_count=sum(done.byte_count for done in parts),
    )
