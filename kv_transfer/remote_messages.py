"""What the leader of a worker and a part of its blocks in another process say to each other.

The leader numbers its orders, and each is answered by one report with its number, unless it is abandoned.
Orders arrive in order.
"""

import msgspec

from baton.core.ids import WorkerId
from kv_transfer.manager import TransferCounters
from kv_transfer.read import BlockRead, ReadDone


class AddPartPeer(msgspec.Struct, frozen=True, tag=True):
    """See `TransferManager.add_peer`. Answered by `PartPeerAdded`."""

    number: int
    peer: WorkerId
    offers: dict[str, bytes]
    block_bytes: int


class RemovePartPeer(msgspec.Struct, frozen=True, tag=True):
    """See `TransferManager.remove_peer`. Answered by `PartCallDone`."""

    number: int
    peer: WorkerId


class ReadIntoPart(msgspec.Struct, frozen=True, tag=True):
    """See `TransferManager.read_checked`. Answered by `PartReadDone`."""

    number: int
    read: BlockRead
    generations: tuple[int, ...]
    """What the generations of the local blocks have to be before the first byte arrives."""


class SettlePart(msgspec.Struct, frozen=True, tag=True):
    """See `TransferManager.settled`. Answered by `PartCallDone`."""

    number: int
    blocks: tuple[int, ...]


class AbandonCall(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits any more for the answer to the order of this number."""

    number: int


class ClosePart(msgspec.Struct, frozen=True, tag=True):
    """See `TransferManager.close`. Answered by `PartCallDone`, and nothing is carried out afterwards."""

    number: int


PartOrder = AddPartPeer | RemovePartPeer | ReadIntoPart | SettlePart | AbandonCall | ClosePart


class PartReady(msgspec.Struct, frozen=True, tag=True):
    """The first report, without an order: what the part is, and what it offers to peers."""

    first_layer: int
    layer_count: int
    first_head: int
    head_count: int
    block_bytes: int
    block_count: int
    offers: dict[str, bytes]
    left_out: dict[str, str]
    """Names of backends -> why they do not work there."""


class PartPeerAdded(msgspec.Struct, frozen=True, tag=True):
    number: int
    backend: str = ""
    error: str = ""
    """Empty: the peer can be read over `backend`."""
    is_incompatible: bool = False
    """Another attempt would fail alike."""


class PartReadDone(msgspec.Struct, frozen=True, tag=True):
    number: int
    done: ReadDone
    counters: dict[str, TransferCounters]
    """Names of backends -> counts of all reads so far."""


class PartCallDone(msgspec.Struct, frozen=True, tag=True):
    number: int


PartAnswer = PartPeerAdded | PartReadDone | PartCallDone
PartReport = PartReady | PartAnswer
