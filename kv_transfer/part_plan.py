"""This module says which part of one worker's blocks is read from which part of another's, and when such
reads are over.

Pure: `part_transfer` does the IO, and the fault simulator decides by the same functions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from baton.core.errors import IncompatiblePeer
from baton.core.geometry import KVGeometry
from baton.core.ids import ReadId, WorkerId
from baton.core.messages import KVPart
from baton.core.shape import RANKS_MAX
from kv_transfer.layout import Places, Ranges, check_places, part_geometry, part_reads
from kv_transfer.read import BlockRead, ReadDone


class PartLink(NamedTuple):
    """How one of our parts is read from one of a peer's."""

    local_part: int
    source_part: int
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


def part_links(whole: KVGeometry, local: Sequence[Places], sources: Sequence[Places]) -> list[PartLink]:
    """All reads that bring a block of a peer here. Raises ValueError for bytes that no source part holds."""
    # Parts of ours that hold the same read from different ones of the peer's parts.
    replicas = [local[:part].count(places) for part, places in enumerate(local)]
    return [
        PartLink(part, read.source_part, part_geometry(whole, places).block_bytes, read.ranges)
        for part, places in enumerate(local)
        for read in part_reads(whole, sources, places, spread=replicas[part])
    ]


def part_of_read(read: BlockRead, link: PartLink, source_name: WorkerId) -> BlockRead:
    """The bytes of a read that are in one of the owner's parts and wanted in one of ours. Checksums are those
    of whole blocks."""
    return msgspec.structs.replace(
        read, owner=source_name, block_bytes=link.block_bytes, ranges=link.ranges, checksums=()
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
