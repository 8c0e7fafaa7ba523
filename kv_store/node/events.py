"""The events of a store node, and its actions.

`kv_store.node.core.NodeCore` is pure: `handle(event, now_s=…) -> list[NodeAction]`. The process
(`kv_store.process.store_node`) and the simulator feed it events and perform its actions in order.

A *size class* is the arena and the SSD file of one block size; its name is that size in bytes
(`block_bytes`). Ids of operations, reads and look-ups come from one count and are unique in the core's life.
"""

import msgspec

from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlockFacts,
    BlockLocation,
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
    """A whole block that the SSD file of a size class was found to hold at the start."""

    ssd_slot: int
    facts: BlockFacts
    checksum: int


class SizeClassOpened(msgspec.Struct, frozen=True):
    """The SSD file of a size class is open, with these blocks in it.

    It comes once per size class where there is an SSD tier. At the start that is each class whose file was
    found: its OpenSizeClass is the answer, with the size by today's configuration. Later it answers the
    OpenSizeClass of a new one. Until then nothing of that class is read from or written to SSD, so a worker
    does not wait for the scan. Slots that the core has no use for are answered by ForgetSsd.
    """

    size_class: int
    recovered: tuple[Recovered, ...] = ()
    error: str = ""
    """If not empty, the reason why the file cannot be used. The size class goes on without SSD, and the
    status shows the reason."""


class StoreClientJoined(msgspec.Struct, frozen=True):
    """A worker opened a session. The answer is ToStoreClient with StoreWelcome or StoreRefused. The adapter
    first reports the end of an older session of the same worker id."""

    hello: StoreHello


class FromStoreClient(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    message: WorkerToStore


class StoreClientLost(msgspec.Struct, frozen=True):
    """The worker's socket is at its end of file: the worker touches nothing any more. What it was writing is
    void, and its pins end."""

    worker_id: WorkerId


class FromPeer(msgspec.Struct, frozen=True):
    """A message of a peer, in the session about this size class."""

    size_class: int
    peer: NodeRef
    message: NodeToNode


class StorePeerLost(msgspec.Struct, frozen=True):
    """The session broke or could not be opened. Leases that it held run on: a one-sided read may be under
    way."""

    size_class: int
    peer: NodeId
    message: str


class IoDone(msgspec.Struct, frozen=True):
    """A ReadSsd or WriteSsd ended, well (`error` empty) or not."""

    op_id: int
    error: str = ""
    is_corrupt: bool = False
    """Read: the header or the checksum did not hold."""
    is_full: bool = False
    """Write: no space is left on the device."""
    seconds: float = 0.0
    checksum: int = 0
    """Read: the checksum of the payload, which was found right."""


class LookedUp(msgspec.Struct, frozen=True):
    """The directory's answer. A directory that does not answer in time counts as nothing for each hash."""

    lookup_id: int
    locations: tuple[tuple[BlockLocation, ...], ...]


class DirectoryForgot(msgspec.Struct, frozen=True):
    """The directory is new, was flushed, or saw a gap: everything must be published again."""


class PeersChanged(msgspec.Struct, frozen=True):
    """The other nodes, draining ones included."""

    peers: tuple[NodeRef, ...]


class Clear(msgspec.Struct, frozen=True):
    """An operator wants these blocks gone. Pinned ones go when they are unpinned."""

    tier: Tier | None = None
    """The tier to clear; None for all."""
    tenant: str | None = None
    """The tenant to clear; None for all."""


class DrainStore(msgspec.Struct, frozen=True):
    """Take nothing new, and offer the most valuable blocks to the peers; loads go on. `is_drained` tells when
    it is done."""

    budget_bytes: int


class StoreTick(msgspec.Struct, frozen=True):
    """The time named by `next_tick_s` has come. An earlier tick is harmless."""


NodeEvent = (
    SizeClassOpened
    | StoreClientJoined
    | FromStoreClient
    | StoreClientLost
    | FromPeer
    | StorePeerLost
    | IoDone
    | ReadDone
    | ReadSettled
    | LookedUp
    | DirectoryForgot
    | PeersChanged
    | Clear
    | DrainStore
    | StoreTick
)

# --- actions --------------------------------------------------------------------------------------


class OpenSizeClass(msgspec.Struct, frozen=True):
    """Make the arena (sparse) of a block size at once, before its first use. A failure ends the process, as
    there is no memory. Then, beside the loop, open its SSD file, unless `ssd_slot_count` is 0 or
    SizeClassOpened came already. The answer is SizeClassOpened."""

    size_class: int
    slot_bytes: int
    slot_count: int
    ssd_slot_count: int


class ToStoreClient(msgspec.Struct, frozen=True):
    """Send a message. The adapter drops it if the session is gone."""

    worker_id: WorkerId
    message: StoreToWorker


class DropStoreClient(msgspec.Struct, frozen=True):
    """End the session of a worker that breaks the protocol. The adapter half-closes the session (shuts its
    writing side), reads no more messages, and reports StoreClientLost at the end of file as ever. Until then
    the worker may still write into what it was given, and the core keeps that aside."""

    worker_id: WorkerId
    message: str


class ToPeer(msgspec.Struct, frozen=True):
    """Send a message to a peer. The adapter opens a session if there is none; if that fails, StorePeerLost
    follows."""

    size_class: int
    peer: NodeRef
    message: NodeToNode


class ReadSsd(msgspec.Struct, frozen=True):
    """Read into the arena's slot, and verify header and checksum. It is always answered by one IoDone and
    never dropped: the slot is the device's until then."""

    op_id: int
    size_class: int
    ssd_slot: int
    slot: int
    block_hash: BlockHash


class WriteSsd(msgspec.Struct, frozen=True):
    """Write header and payload from the arena's slot. It is always answered by one IoDone."""

    op_id: int
    size_class: int
    ssd_slot: int
    slot: int
    facts: BlockFacts
    checksum: int
    """The checksum of the payload; 0 if the writer must compute it."""


class ForgetSsd(msgspec.Struct, frozen=True):
    """Make sure that the slot's content is not found after a restart; its disk space may be given back. A
    WriteSsd into the same slot may follow at once, and comes after this."""

    size_class: int
    ssd_slot: int


class ForgetHost(msgspec.Struct, frozen=True):
    """Give the slot's memory back to the system, for use by another size class."""

    size_class: int
    slot: int


class LookUp(msgspec.Struct, frozen=True):
    """Ask which other nodes have these blocks. It is always answered by one LookedUp, within `timeout_s` and
    a little."""

    lookup_id: int
    hashes: tuple[BlockHash, ...]
    timeout_s: float


class Publish(msgspec.Struct, frozen=True):
    changes: StoreChanges


NodeAction = (
    OpenSizeClass
    | ToStoreClient
    | DropStoreClient
    | ToPeer
    | ReadSsd
    | WriteSsd
    | ForgetSsd
    | ForgetHost
    | BlockRead
    | LookUp
    | Publish
)
