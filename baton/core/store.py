"""What workers, store nodes and the directory say to each other about blocks in the tiers below a pool.

A worker and the store node of its host share an arena of *slots* in host memory. Messages between the two
travel over a local socket; bytes never do. The socket's end is the proof of death: a side that reads end of
file knows that the other has stopped touching what it had been given, since the kernel closes a process's
descriptors only when none of its threads runs any more. So nothing local needs a lease, and a frozen worker
keeps what it holds until somebody kills it; the amount is bounded.

A slot is an index of the arena of one block size: it begins at `slot * slot_bytes`.
"""

from enum import StrEnum, auto
from typing import Annotated

import msgspec

from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.wire_types import Columns, UInt64

STORE_WIRE_VERSION = 2
"""The version rises when a field changes its meaning; a new field with a default does not raise it."""


class Tier(StrEnum):
    """The places where a block can be, from fast to slow. A worker's own pool is no tier of the store."""

    HOST = auto()
    """The arena in host memory that the workers of a host share."""
    SSD = auto()
    """The files of this host's store node."""
    PEER = auto()
    """Another host's store node, in any of its own tiers."""


class DropReason(StrEnum):
    """The reason why a block is no longer in a tier."""

    EVICTED = auto()
    """It made room for others."""
    EXPIRED = auto()
    """It was older than the TTL."""
    QUOTA = auto()
    """It made room for others of its own tenant."""
    CORRUPT = auto()
    """Its checksum did not hold."""
    IO_ERROR = auto()
    CLEARED = auto()
    """An operator asked for it."""
    REPLACED = auto()
    """Blocks of another size needed its memory."""


class BlockFacts(msgspec.Struct, frozen=True):
    """What is told about a block when it is offered. Policies decide by this and by time alone."""

    block_hash: BlockHash
    parent: BlockHash
    """The hash of the block before it; for the first block the chain's root."""
    depth: int
    """Its position in its chain from 0: as many blocks must be there before it is of use."""
    recompute_s: float = 0.0
    """The time that computing it took or would take; 0: not known."""
    tenant: str = ""
    """The tenant to whose quota it counts. Isolation does not rest on it: the chain's root is salted."""
    is_generated: bool = False
    """It holds generated tokens, the end of a turn to which a session may come back."""


# --- worker -> store node -------------------------------------------------------------------------


class StoreHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a session, from the worker."""

    worker_id: WorkerId
    fingerprint: str
    block_bytes: int
    wire_version: int = STORE_WIRE_VERSION


class OfferBlocks(msgspec.Struct, frozen=True, tag=True):
    """The worker has these full blocks. One TakeBlocks answers it. `offer_id` rises within a session."""

    offer_id: int
    blocks: tuple[BlockFacts, ...]


class BlocksWritten(msgspec.Struct, frozen=True, tag=True):
    """The worker's last word on an offer: it does not write into its slots any more.

    `checksums[i]` is XXH3-64 over the `block_bytes` of the i-th place of TakeBlocks, as they are in the
    arena. None: the pool's block was gone, so it was not written, and its slot is free again. Where the node
    asks for no checksums they are 0.
    """

    offer_id: int
    checksums: tuple[int | None, ...]


class FindBlocks(msgspec.Struct, frozen=True, tag=True):
    """The worker asks where these blocks of one chain are, first block first.

    The question counts as a use of all of them, those that the worker holds itself included. One FoundBlocks
    answers it, after one look-up in the directory at most.
    """

    find_id: int
    hashes: tuple[BlockHash, ...]
    held_count: int
    """The number of blocks from the front that are in the worker's own pool."""
    tenant: str = ""


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """The node shall bring these into the arena and keep them there until EndLoad, in the chain's order.

    The worker sends it as soon as the request is known, before there is room in the pool. One or several
    BlocksReady answer it, in order, and LoadFailed if not all blocks come. The node may refuse what would pin
    more than a worker's part of the arena.
    """

    load_id: int
    hashes: tuple[BlockHash, ...]
    time_left_s: float
    """The time after which the worker computes instead: what is not there by then fails."""
    tenant: str = ""


class EndLoad(msgspec.Struct, frozen=True, tag=True):
    """No copy out of this load's slots is or will be under way.

    It also cancels what is still on its way. There is no answer; an unknown load changes nothing.
    """

    load_id: int
    corrupt: tuple[BlockHash, ...] = ()
    """Blocks whose checksum did not hold after the copy: they are dropped and counted."""


WorkerToStore = StoreHello | OfferBlocks | BlocksWritten | FindBlocks | LoadBlocks | EndLoad


# --- store node -> worker -------------------------------------------------------------------------


class StoreWelcome(msgspec.Struct, frozen=True, tag=True):
    """The first answer of a session. The arena's file descriptor comes with it (SCM_RIGHTS)."""

    node_id: NodeId
    slot_bytes: int
    """The `block_bytes`, rounded up to whole pages."""
    slot_count: int
    has_checksums: bool
    """Writers make checksums, and readers check them after the copy."""
    wire_version: int = STORE_WIRE_VERSION


class StoreRefused(msgspec.Struct, frozen=True, tag=True):
    """The session ends without a welcome. The worker goes on without a store, and says why."""

    message: str


class Place(msgspec.Struct, frozen=True):
    """A block of an offer, and the slot to write it to."""

    index: int
    """The position of the block within the offer."""
    slot: int


class TakeBlocks(msgspec.Struct, frozen=True, tag=True):
    """The offered blocks that the worker shall write, and where.

    The slots are the worker's to write until it says BlocksWritten or its session ends. Blocks that are left
    out are here already, or not wanted.
    """

    offer_id: int
    places: tuple[Place, ...]


class FoundSpan(msgspec.Struct, frozen=True):
    """Consecutive blocks of a chain that come by the same path."""

    tier: Tier
    block_count: int
    wait_s: float
    """The predicted time from now to the first block's start on this path: what is queued there."""
    block_s: float
    """The predicted time per block into the arena; 0 for HOST."""


class FoundBlocks(msgspec.Struct, frozen=True, tag=True):
    """Where the blocks from `held_count` on are, up to the first one that is missing."""

    find_id: int
    spans: tuple[FoundSpan, ...]


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """Blocks first, first + 1, … of the load are in these slots, and stay there until EndLoad."""

    load_id: int
    first: int
    slots: tuple[int, ...]
    checksums: tuple[int, ...]
    """The XXH3-64 of each block; 0 where the store has none."""
    tiers: tuple[Tier, ...] = ()
    """The tier that each block came from."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Blocks from `first` on will not come. What was ready before stays until EndLoad, which is still due."""

    load_id: int
    first: int
    message: str


StoreToWorker = StoreWelcome | StoreRefused | TakeBlocks | FoundBlocks | BlocksReady | LoadFailed


# --- store node -> store node of another host -----------------------------------------------------


class NodeRef(msgspec.Struct, frozen=True):
    """A store node as another must know it to connect."""

    node_id: NodeId
    address: str
    """The host:port of its gRPC server."""


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """The first message in both directions of a session between two nodes."""

    node: NodeRef
    slot_bytes: int
    """The slot size of the blocks of this session; there is one session per pair of nodes and block size."""
    block_bytes: int
    transfer_offers: dict[str, bytes]
    """What each backend's `add_peer` needs, by the backend's name."""
    wire_version: int = STORE_WIRE_VERSION


class BlocksRequest(msgspec.Struct, frozen=True, tag=True):
    """The KV reader wants these blocks in the owner's arena, kept there for a lease.

    A second copy renews the lease. One or several BlocksGrant answer it, in order, and BlocksRefused if not
    all blocks come.
    """

    fetch_id: int
    hashes: tuple[BlockHash, ...]
    time_left_s: float
    request_number: int = 0
    """The number rises with every renewal. For the reader, the lease counts from when it sent the request
    that is answered."""


class BlocksGrant(msgspec.Struct, frozen=True, tag=True):
    """Blocks first_block, first_block + 1, … of the fetch, held until BlocksReleased or the lease's end.

    The reader compares `generations` after the read, as in `KVGrant`.
    """

    fetch_id: int
    first_block: int
    source_blocks: tuple[int, ...]
    """Slots of the owner's arena."""
    generations: tuple[int, ...]
    facts: tuple[BlockFacts, ...]
    checksums: tuple[int, ...]
    lease_s: float
    answers_request: int = 0


class BlocksRefused(msgspec.Struct, frozen=True, tag=True):
    """Blocks from `first_block` on will not come."""

    fetch_id: int
    first_block: int
    message: str


class BlocksReleased(msgspec.Struct, frozen=True, tag=True):
    """No read of this fetch is or will be under way. An unknown fetch changes nothing."""

    fetch_id: int
    corrupt: tuple[BlockHash, ...] = ()
    """Blocks that arrived with the right generation and a wrong checksum; the owner checks its own copy."""


class TakeOver(msgspec.Struct, frozen=True, tag=True):
    """The sender leaves and holds these blocks, the most valuable first: fetch what shall be kept."""

    hashes: tuple[BlockHash, ...]


NodeToNode = NodeHello | BlocksRequest | BlocksGrant | BlocksRefused | BlocksReleased | TakeOver


# --- directory ------------------------------------------------------------------------------------


class StoreMember(msgspec.Struct, frozen=True):
    """A store node as the directory lists it, under a lease. A node id names one life of a process."""

    node: NodeRef
    host: str = ""
    pid: int = 0
    is_draining: bool = False
    host_bytes: UInt64 = 0
    ssd_bytes: UInt64 = 0
    metrics_address: str = ""
    notes: tuple[str, ...] = ()


class StoreChanges(msgspec.Struct, frozen=True):
    """Blocks that a node gained and lost.

    `sequence_number` rises by one per message of a node's life; a gap means that a snapshot is needed. A
    snapshot replaces all that was known of the node: what its first message does not say is forgotten with
    that message, and what each message says counts at once. It may come in several messages, with changes in
    between; a first message while one is under way begins anew. A message whose number is not above the last
    one's is a copy and changes nothing.
    """

    node_id: NodeId
    sequence_number: UInt64
    stored: Annotated[tuple[tuple[BlockHash, Tier], ...], Columns("", "tiers")] = ()
    """Blocks that came or moved; the tier is the fastest one that has the block."""
    removed: tuple[BlockHash, ...] = ()
    is_snapshot: bool = False
    is_first: bool = True
    """The first message of a snapshot says so, all others must not."""
    is_last: bool = True
    """The last message of a snapshot says so."""


class BlockLocation(msgspec.Struct, frozen=True):
    """A node whose lease runs has the block."""

    node: NodeRef
    tier: Tier
