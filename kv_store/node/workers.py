"""The workers of this host: who has a session, and what each has open."""

from dataclasses import dataclass, field

from baton.core.ids import WorkerId
from baton.core.store import BlockFacts
from kv_store.node.promotion import PromotionRequest
from kv_store.node.quotas import Holder
from kv_store.node.size_classes import SizeClass


class ProtocolError(Exception):
    """The worker says what no sound worker would: its session ends."""


@dataclass(slots=True, eq=False)
class Write:
    """A slot that a worker writes a block into."""

    facts: BlockFacts
    slot: int


@dataclass(slots=True, eq=False)
class StoreClientState:
    worker_id: WorkerId
    size_class: SizeClass
    holder: Holder
    offers: dict[int, list[Write]] = field(default_factory=dict[int, list[Write]])
    """Slots of each open offer, in the order of its places."""
    loads: dict[int, PromotionRequest] = field(default_factory=dict[int, PromotionRequest])
    """Open loads, until EndLoad."""
    is_dropped: bool = False
    """The worker broke the protocol: nothing it says counts, and what it writes is kept aside until its
    end."""
    is_gone: bool = False
    """This session has ended; another of the same id may be there."""
