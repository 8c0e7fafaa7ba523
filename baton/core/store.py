"""What workers, store nodes and the directory say to each other about blocks in the tiers below a pool.

A worker and the store node of its host share an arena of *slots* in host memory. Messages between the two
travel over a local socket; bytes never do. The socket's end is the proof of death: a side that reads end of
file knows that the other has stopped touching what it had been given, since the kernel closes a process's
descriptors only when none of its threads runs any more. So nothing local needs a lease, and a frozen worker
keeps what it holds, which is bounded, until somebody kills it.

A slot is an index of the arena of one block size: it begins at `slot * slot_bytes`.
"""

from enum import StrEnum, auto

import msgspec

from baton.core.ids import BlockHash, NodeId, WorkerId

STORE_WIRE_VERSION = 1
"""Raised when a field changes meaning; a new field with a default does not raise it."""


class Tier(StrEnum):
    """Where a block can be, from fast to slow. A worker's own pool is no tier of the store."""

    HOST = auto()
    """The arena in host memory that the workers of a host share."""
    SSD = auto()
    """Files of this host's store node."""
    PEER = auto()
    """Another host's store node, in whatever tier of its own."""


class DropReason(StrEnum):
    """Why a block is no longer in a tier."""

    EVICTED = auto()
    """Made room."""
    EXPIRED = auto()
    """Older than the TTL."""
    QUOTA = auto()
    """Made room for its own tenant."""
    CORRUPT = auto()
    """Its checksum did not hold."""
    IO_ERROR = auto()
    CLEARED = auto()
    """Asked for by an operator."""
    REPLACED = auto()
    """Its memory was needed by blocks of another size."""


class BlockFacts(msgspec.Struct, frozen=True):
    """What is told of a block when it is offered. Policies decide by nothing else, and by time."""

    block_hash: BlockHash
    parent: BlockHash
    """Hash of the block before it; the chain's root for the first."""
    depth: int
    """Position in its chain, 0 first: so many blocks must be there before it is of use."""
    recompute_s: float = 0.0
    """What computing it took, or would take; 0: not known."""
    tenant: str = ""
    """Whose quota it counts to. Isolation does not rest on it: the chain's root is salted."""
    is_generated: bool = False
    """Holds generated tokens: the end of a turn, to which a session may come back."""


# --- worker -> store node -------------------------------------------------------------------------


class StoreHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a session."""

    worker_id: WorkerId
    fingerprint: str
    block_bytes: int
    wire_version: int = STORE_WIRE_VERSION


class OfferBlocks(msgspec.Struct, frozen=True, tag=True):
    """ "I have these full blocks." Answered by one TakeBlocks. `offer_id` rises within a session."""

    offer_id: int
    blocks: tuple[BlockFacts, ...]


class BlocksWritten(msgspec.Struct, frozen=True, tag=True):
    """The worker's last word on an offer: it does not write into its slots any more.

    `checksums[i]` is XXH3-64 over the `block_bytes` of the i-th place of TakeBlocks, as they are in the
    arena; None: that one was not written (the pool's block was gone), and its slot is free again. Where the
    node asks for no checksums it is 0.
    """

    offer_id: int
    checksums: tuple[int | None, ...]


class FindBlocks(msgspec.Struct, frozen=True, tag=True):
    """ "Where are these?" One chain, first block first. Counts as a use of all of them, those that the worker
    holds itself included. Answered by one FoundBlocks, after a look-up in the directory at most."""

    find_id: int
    hashes: tuple[BlockHash, ...]
    held_count: int
    """So many from the front are in the worker's own pool."""
    tenant: str = ""


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """ "Bring these into the arena and keep them there until I say EndLoad." In the chain's order.

    Sent as early as the request is known, before there is room in the pool. Answered by BlocksReady, one or
    several, in order, and by LoadFailed if not all come. The node may refuse what would pin more than a
    worker's share."""

    load_id: int
    hashes: tuple[BlockHash, ...]
    time_left_s: float
    """After which the worker computes instead: what is not there by then fails."""
    tenant: str = ""


class EndLoad(msgspec.Struct, frozen=True, tag=True):
    """No copy out of this load's slots is or will be under way. Also cancels what is still being brought.
    Answered by nothing; unknown changes nothing."""

    load_id: int
    corrupt: tuple[BlockHash, ...] = ()
    """Whose checksum did not hold after the copy: they are dropped and counted."""


WorkerToStore = StoreHello | OfferBlocks | BlocksWritten | FindBlocks | LoadBlocks | EndLoad


# --- store node -> worker -------------------------------------------------------------------------


class StoreWelcome(msgspec.Struct, frozen=True, tag=True):
    """First answer of a session. The arena's file descriptor comes with it (SCM_RIGHTS)."""

    node_id: NodeId
    slot_bytes: int
    """block_bytes, rounded up to whole pages."""
    slot_count: int
    has_checksums: bool
    """Whether writers make checksums and readers check them after the copy."""
    wire_version: int = STORE_WIRE_VERSION


class StoreRefused(msgspec.Struct, frozen=True, tag=True):
    """Instead of a welcome: the session ends. The worker goes on without a store, and says why."""

    message: str


class Place(msgspec.Struct, frozen=True):
    index: int
    """Of the block within the offer."""
    slot: int


class TakeBlocks(msgspec.Struct, frozen=True, tag=True):
    """Which of the offered blocks to write, and where. The slots are the worker's to write until it says
    BlocksWritten or its session ends. Those left out are here already, or not wanted."""

    offer_id: int
    places: tuple[Place, ...]


class FoundSpan(msgspec.Struct, frozen=True):
    """Consecutive blocks of a chain that the same path would bring."""

    tier: Tier
    block_count: int
    wait_s: float
    """Predicted, from now to the first block's start on this path: what is queued there."""
    block_s: float
    """Predicted per block, into the arena; 0 for HOST."""


class FoundBlocks(msgspec.Struct, frozen=True, tag=True):
    """From block `held_count` on, as far as no block is missing."""

    find_id: int
    spans: tuple[FoundSpan, ...]


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """Blocks first, first + 1, … of the load are in these slots, and stay there until EndLoad."""

    load_id: int
    first: int
    slots: tuple[int, ...]
    checksums: tuple[int, ...]
    """XXH3-64 of each; 0 where the store has none."""
    tiers: tuple[Tier, ...] = ()
    """Where each came from."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Blocks from `first` on will not come. What was ready before stays until EndLoad, which is owed."""

    load_id: int
    first: int
    message: str


StoreToWorker = StoreWelcome | StoreRefused | TakeBlocks | FoundBlocks | BlocksReady | LoadFailed


# --- store node -> store node of another host -----------------------------------------------------


class NodeRef(msgspec.Struct, frozen=True):
    """A store node as another must know it to connect."""

    node_id: NodeId
    address: str
    """host:port of its gRPC server."""


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """First message in both directions of a session between two nodes."""

    node: NodeRef
    slot_bytes: int
    """Of the blocks that this session is about: one session per pair of nodes and block size."""
    block_bytes: int
    transfer_offers: dict[str, bytes]
    """Backend name -> what that backend's `add_peer` needs."""
    wire_version: int = STORE_WIRE_VERSION


class BlocksRequest(msgspec.Struct, frozen=True, tag=True):
    """ "I want to read these: bring them into your arena and keep them for a lease." Safe to receive twice:
    the second renews the lease. Answered by BlocksGrant, one or several, in order, and BlocksRefused."""

    fetch_id: int
    hashes: tuple[BlockHash, ...]
    time_left_s: float
    request_number: int = 0
    """Rises with every renewal; the lease counts, for the reader, from when it sent the one answered."""


class BlocksGrant(msgspec.Struct, frozen=True, tag=True):
    """Blocks first_block, first_block + 1, … of the fetch. They are held until BlocksReleased or the lease's
    end; `generations` are compared after the read, as in `KVGrant`."""

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
    """Blocks that arrived with their generation right and their checksum wrong: the owner looks at its own
    copy."""


class TakeOver(msgspec.Struct, frozen=True, tag=True):
    """ "I am leaving and hold these: fetch what you want to keep." First the most valuable."""

    hashes: tuple[BlockHash, ...]


NodeToNode = NodeHello | BlocksRequest | BlocksGrant | BlocksRefused | BlocksReleased | TakeOver


# --- directory ------------------------------------------------------------------------------------


class StoreMember(msgspec.Struct, frozen=True):
    """A store node as the directory lists it, under a lease. A node id names one process life."""

    node: NodeRef
    host: str = ""
    pid: int = 0
    is_draining: bool = False
    host_bytes: int = 0
    ssd_bytes: int = 0
    metrics_address: str = ""
    notes: tuple[str, ...] = ()


class StoreChanges(msgspec.Struct, frozen=True):
    """What a node gained and lost. `sequence_number` rises by one per message of a node's life; a gap means
    that a snapshot is needed.

    A snapshot replaces all that was known of the node: what its first message does not say is forgotten
    with that message, and what each says counts at once. It may come in several messages, with changes in
    between; a first message while one is under way begins anew. A message whose number is not above the
    last one's was heard already and changes nothing.
    """

    node_id: NodeId
    sequence_number: int
    stored: tuple[tuple[BlockHash, Tier], ...] = ()
    """Also a block that moved: the tier is its fastest one there."""
    removed: tuple[BlockHash, ...] = ()
    is_snapshot: bool = False
    is_first: bool = True
    """Of a snapshot's messages: the first says so, all others must not."""
    is_last: bool = True
    """Of a snapshot's messages: the last one says so."""


class Holding(msgspec.Struct, frozen=True):
    """Somebody whose lease runs has the block."""

    node: NodeRef
    tier: Tier
