"""Reads between workers of any two shapes, for a worker whose KV blocks are in one part or in several.

Each part has a transfer manager of its own, in this process or, for a part that this one does not map, in
the process that has it. A read of whole blocks becomes one read for each pair of parts, ours and the owner's,
that have bytes in common. Two workers of one part each read directly.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple, Protocol

import msgspec

from baton.core.errors import IncompatiblePeer
from baton.core.geometry import KVGeometry
from baton.core.ids import WorkerId
from baton.core.messages import KVPart
from kv_transfer.backend import KVMemory
from kv_transfer.checksums import WholeChecksums
from kv_transfer.layout import Places, part_geometry
from kv_transfer.manager import TransferCounters
from kv_transfer.part_plan import PartLink, merged, part_links, part_name, part_of_read, places_of
from kv_transfer.read import BlockRead, ReadDone


class PartReader(Protocol):
    """Reads into a part: its `TransferManager`, or a stand-in for that (`kv_transfer.remote_part`). It knows
    peers by the names of their parts."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def offers(self) -> dict[str, bytes]: ...

    async def add_peer(
        self, peer: WorkerId, offer: Mapping[str, bytes], *, block_bytes: int | None = None
    ) -> str: ...

    async def remove_peer(self, peer: WorkerId) -> None: ...

    async def read_checked(self, read: BlockRead) -> ReadDone: ...

    async def settled(self, local_blocks: Sequence[int]) -> None: ...

    @property
    def counters(self) -> Mapping[str, TransferCounters]: ...

    @property
    def left_out(self) -> Mapping[str, str]: ...


class OwnPart(NamedTuple):
    """A part of this worker's blocks."""

    places: Places
    memory: KVMemory | None
    """None: another process has it, and this one does not map it."""
    manager: PartReader


class _OpenLink(NamedTuple):
    """A link whose peer's part a manager knows."""

    plan: PartLink
    manager: PartReader
    name: WorkerId
    """The peer's part."""
    backend: str


class PartTransfer:
    """See `kv_transfer.peers.Transfer`. It belongs to the worker's event loop."""

    def __init__(self, whole: KVGeometry, parts: Sequence[OwnPart]) -> None:
        """`whole` is the geometry of the whole model; `parts` hold all of it together."""
        memories = [(part.places, part.memory) for part in parts if part.memory is not None]
        for places, memory in memories:
            expected = part_geometry(whole, places).block_bytes
            assert memory.block_bytes == expected, f"{places} in {memory.block_bytes} B"
        self._whole, self._parts = whole, tuple(parts)
        self._checksums: WholeChecksums | None = None
        if len(memories) == len(parts) and all(memory.is_host for _, memory in memories):
            self._checksums = WholeChecksums(whole, memories)
        self._added: dict[WorkerId, set[tuple[PartReader, WorkerId]]] = {}
        """Names of a peer's parts that managers know, or may know."""
        self._links: dict[WorkerId, list[_OpenLink]] = {}
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
            plans = part_links(self._whole, [part.places for part in self._parts], places)
        except (IncompatiblePeer, ValueError) as error:
            await self.remove_peer(peer)
            raise IncompatiblePeer(f"{peer}: {error}") from None
        managers = [self._parts[plan.local_part].manager for plan in plans]
        names = [part_name(peer, plan.source_part, len(offer)) for plan in plans]
        wanted = set(zip(managers, names, strict=True))
        await self._forget(self._added.get(peer, set()) - wanted)
        self._added[peer] = wanted
        backends = await asyncio.gather(
            *(
                manager.add_peer(
                    name,
                    offer[plan.source_part].transfer_offers,
                    block_bytes=part_geometry(self._whole, places[plan.source_part]).block_bytes,
                )
                for plan, manager, name in zip(plans, managers, names, strict=True)
            ),
            return_exceptions=True,
        )
        links: list[_OpenLink] = []
        for plan, manager, name, backend in zip(plans, managers, names, backends, strict=True):
            if isinstance(backend, BaseException):
                await self.remove_peer(peer)
                raise backend
            links.append(_OpenLink(plan, manager, name, backend))
        self._links[peer] = links

    async def remove_peer(self, peer: WorkerId) -> None:
        """Reads in flight from it end with an error. Unknown peer: nothing happens."""
        self._links.pop(peer, None)
        await self._forget(self._added.pop(peer, set()))

    async def _forget(self, names: set[tuple[PartReader, WorkerId]]) -> None:
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
            await asyncio.gather(
                *(link.manager.read_checked(part_of_read(read, link.plan, link.name)) for link in links)
            ),
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
