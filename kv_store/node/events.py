"""What happens to a store node, and what it does about it.

`kv_store.node.core.NodeCore` is pure: `handle(event, now_s=…) -> list[NodeAction]`. The process
(`kv_store.process.store_node`) and the simulator feed it events and perform its actions in order.

A *space* is the arena and the SSD file of one block size; its name is that size in bytes (`block_bytes`).
Ids of operations, reads and look-ups come from one count and are unique in the core's life.
"""

import msgspec

from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlockFacts,
    Holding,
    NodeRef,
    NodeToNode,
    StoreChanges,
    StoreHello,
    StoreToWorker,
    Tier,
    WorkerToStore,
)
from kv_transfer.read import BlockRead, ReadDone, ReadSettled

# --- events ---------------------------------------------------------------------------------------


class Recovered(msgspec.Struct, frozen=True):
    """A block that the SSD file of a space was found to hold, whole, at the start."""

    ssd_slot: int
    facts: BlockFacts
    checksum: int


class SpaceOpened(msgspec.Struct, frozen=True):
    """The SSD file of a space is open, and this is what it holds.

    Told once per space where there is an SSD tier: at the start for each space whose file was found (its
    OpenSpace comes as the answer, its size by the configuration of today), later as the answer to the
    OpenSpace of a new one. Until then nothing of that space is read from or written to SSD, so a worker does
    not wait for the scan. Slots that the core has no use for are answered by ForgetSsd."""

    space: int
    recovered: tuple[Recovered, ...] = ()
    error: str = ""
    """Not empty: the file cannot be used. The space goes on without SSD, and status says why."""


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker opened a session. Answered by ToWorker(StoreWelcome or StoreRefused); of a worker id that has
    a session already the adapter reports the old one's end first."""

    hello: StoreHello


class FromWorker(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    message: WorkerToStore


class WorkerLost(msgspec.Struct, frozen=True):
    """End of file on its socket: it touches nothing any more. What it was writing is void, its pins end."""

    worker_id: WorkerId


class FromPeer(msgspec.Struct, frozen=True):
    """Of the session about this space."""

    space: int
    peer: NodeRef
    message: NodeToNode


class PeerLost(msgspec.Struct, frozen=True):
    """The session broke or could not be opened. Leases it held run on: a one-sided read may be under way."""

    space: int
    peer: NodeId
    message: str


class IoDone(msgspec.Struct, frozen=True):
    """A ReadSsd or WriteSsd ended, well (`error` empty) or not."""

    op_id: int
    error: str = ""
    is_corrupt: bool = False
    """Read: the header or the checksum did not hold."""
    is_full: bool = False
    """Write: no space left on the device."""
    seconds: float = 0.0
    checksum: int = 0
    """Read: of the payload, as it was found right."""


class LookedUp(msgspec.Struct, frozen=True):
    """The directory's answer; of a directory that does not answer in time: nothing for each."""

    lookup_id: int
    holdings: tuple[tuple[Holding, ...], ...]


class DirectoryForgot(msgspec.Struct, frozen=True):
    """The directory is new, was flushed, or saw a gap: everything must be told again."""


class PeersChanged(msgspec.Struct, frozen=True):
    """Who else is there (draining ones included), this node left out."""

    peers: tuple[NodeRef, ...]


class Clear(msgspec.Struct, frozen=True):
    """An operator wants these gone; pinned ones go when they are unpinned."""

    tier: Tier | None = None
    """None: all."""
    tenant: str | None = None
    """None: all."""


class Drain(msgspec.Struct, frozen=True):
    """Take nothing new, offer the most valuable blocks to the peers; loads go on. `is_drained` says when."""

    budget_bytes: int


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


NodeEvent = (
    SpaceOpened
    | WorkerJoined
    | FromWorker
    | WorkerLost
    | FromPeer
    | PeerLost
    | IoDone
    | ReadDone
    | ReadSettled
    | LookedUp
    | DirectoryForgot
    | PeersChanged
    | Clear
    | Drain
    | Tick
)

# --- actions --------------------------------------------------------------------------------------


class OpenSpace(msgspec.Struct, frozen=True):
    """Before the first use of a block size: make its arena (sparse), at once; what fails ends the process, as
    there is no memory. Then, beside the loop, its SSD file unless `ssd_slot_count` is 0 or SpaceOpened was
    told of it already: answered by SpaceOpened."""

    space: int
    slot_bytes: int
    slot_count: int
    ssd_slot_count: int


class ToWorker(msgspec.Struct, frozen=True):
    """Dropped by the adapter if its session is gone."""

    worker_id: WorkerId
    message: StoreToWorker


class DropWorker(msgspec.Struct, frozen=True):
    """It breaks the protocol. The adapter half-closes its session (shuts its writing side), reads no more
    messages, and reports WorkerLost at the end of file as ever: until then the worker may still write into
    what it was given, and the core keeps that aside."""

    worker_id: WorkerId
    message: str


class ToPeer(msgspec.Struct, frozen=True):
    """The adapter opens a session if there is none; failing that, PeerLost."""

    space: int
    peer: NodeRef
    message: NodeToNode


class ReadSsd(msgspec.Struct, frozen=True):
    """Into the arena's slot, header and checksum verified. Always answered by one IoDone, never dropped: the
    slot is the device's until then."""

    op_id: int
    space: int
    ssd_slot: int
    slot: int
    block_hash: BlockHash


class WriteSsd(msgspec.Struct, frozen=True):
    """Header and payload, from the arena's slot. Always answered by one IoDone."""

    op_id: int
    space: int
    ssd_slot: int
    slot: int
    facts: BlockFacts
    checksum: int
    """Of the payload; 0: not known yet, the writer makes it."""


class ForgetSsd(msgspec.Struct, frozen=True):
    """The slot's content must not be found after a restart, and its disk space may be given back. A WriteSsd
    into the same slot may follow at once: it comes after this."""

    space: int
    ssd_slot: int


class ForgetHost(msgspec.Struct, frozen=True):
    """The slot's memory goes back to the system, for use by another space."""

    space: int
    slot: int


class LookUp(msgspec.Struct, frozen=True):
    """Who else has these. Always answered by one LookedUp, within `timeout_s` and a little."""

    lookup_id: int
    hashes: tuple[BlockHash, ...]
    timeout_s: float


class Publish(msgspec.Struct, frozen=True):
    changes: StoreChanges


NodeAction = (
    OpenSpace
    | ToWorker
    | DropWorker
    | ToPeer
    | ReadSsd
    | WriteSsd
    | ForgetSsd
    | ForgetHost
    | BlockRead
    | LookUp
    | Publish
)
