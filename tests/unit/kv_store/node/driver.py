"""One store node's core, with its clock in our hand; every event is followed by an audit."""

from typing import Any

from baton.config import StoreConfig
from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlockFacts,
    BlocksReady,
    BlocksWritten,
    EndLoad,
    FindBlocks,
    FoundBlocks,
    LoadBlocks,
    LoadFailed,
    NodeRef,
    OfferBlocks,
    StoreHello,
    TakeBlocks,
)
from kv_store.node.core import NodeCore
from kv_store.node.events import (
    FromStoreClient,
    IoDone,
    NodeAction,
    NodeEvent,
    Publish,
    ReadSsd,
    SizeClassOpened,
    StoreClientJoined,
    StoreTick,
    ToStoreClient,
    WriteSsd,
)

BLOCK_BYTES = 8000
SLOT_BYTES = 8192
W0, W1 = WorkerId("w0.a"), WorkerId("w1.a")
SELF = NodeRef(NodeId("node-0"), "host0:1")


def block_hash(i: int, chain: str = "a") -> BlockHash:
    return BlockHash(f"{chain}{i}".encode())


def facts(i: int, chain: str = "a", **changes: Any) -> BlockFacts:
    parent = block_hash(i - 1, chain) if i else BlockHash(b"root")
    return BlockFacts(block_hash(i, chain), parent, depth=i, recompute_s=0.01, **changes)


def chain_of(count: int, chain: str = "a") -> tuple[BlockHash, ...]:
    return tuple(block_hash(i, chain) for i in range(count))


class Driver:
    def __init__(
        self, slots: int = 16, *, ssd_slots: int = 0, policy: str = "lru", ref: NodeRef = SELF, **config: Any
    ) -> None:
        settings = {"host_bytes": slots * SLOT_BYTES, "load_timeout_s": 1.0, "policy": policy, **config}
        if ssd_slots:
            settings |= {"ssd_dir": "/ssd", "ssd_bytes": ssd_slots * (SLOT_BYTES + 4096)}
        self.config = StoreConfig(**settings)
        self.now_s = 100.0
        self.generations: dict[int, list[int]] = {}
        self.core = NodeCore(
            ref,
            self.config,
            make_generations=self._generations,
            now_s=self.now_s,
        )
        self.published: list[Publish] = []
        self.performed: list[NodeAction] = []
        """All actions, until a test clears them."""
        self._ids = 0

    def _generations(self, size_class: int, slot_count: int) -> list[int]:
        self.generations[size_class] = [0] * slot_count
        return self.generations[size_class]

    def handle(self, event: NodeEvent) -> list[NodeAction]:
        actions = self.core.handle(event, now_s=self.now_s)
        self.core.check()
        self.performed += actions
        self.published += [a for a in actions if isinstance(a, Publish)]
        return [a for a in actions if not isinstance(a, Publish)]

    def wait(self, seconds: float) -> list[NodeAction]:
        """Time passes, with a tick whenever one is wanted."""
        end_s = self.now_s + seconds
        actions: list[NodeAction] = []
        while (tick_s := self.core.next_tick_s) is not None and tick_s <= end_s:
            self.now_s = max(self.now_s, tick_s)
            actions += self.handle(StoreTick())
        self.now_s = end_s
        return actions

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    # --- a worker's side ------------------------------------------------------------------------

    def join(self, worker: WorkerId = W0, block_bytes: int = BLOCK_BYTES) -> list[NodeAction]:
        actions = self.handle(StoreClientJoined(StoreHello(worker, "fingerprint", block_bytes)))
        for action in actions:
            if type(action).__name__ == "OpenSizeClass" and self.config.ssd_dir:
                actions = actions + self.handle(SizeClassOpened(block_bytes))
        return actions

    def say(self, message: Any, worker: WorkerId = W0) -> list[NodeAction]:
        return self.handle(FromStoreClient(worker, message))

    def offer(self, *blocks: BlockFacts, worker: WorkerId = W0) -> tuple[int, TakeBlocks]:
        offer_id = self.new_id()
        taken = only(self.say(OfferBlocks(offer_id, blocks), worker), TakeBlocks)
        return offer_id, taken

    def store(self, *blocks: BlockFacts, worker: WorkerId = W0) -> list[int]:
        """Offered, written. Which of them were taken."""
        offer_id, taken = self.offer(*blocks, worker=worker)
        if taken.places:
            self.say(BlocksWritten(offer_id, (7,) * len(taken.places)), worker)
        return [place.index for place in taken.places]

    def find(self, hashes: tuple[BlockHash, ...], *, held: int = 0, worker: WorkerId = W0) -> FoundBlocks:
        return only(self.say(FindBlocks(self.new_id(), hashes, held), worker), FoundBlocks)

    def found(self, hashes: tuple[BlockHash, ...], *, worker: WorkerId = W0) -> list[tuple[str, int]]:
        spans = self.find(hashes, worker=worker).spans
        return [(span.tier.value, span.block_count) for span in spans]

    def load(
        self, hashes: tuple[BlockHash, ...], *, worker: WorkerId = W0, time_left_s: float = 10.0
    ) -> tuple[int, list[NodeAction]]:
        load_id = self.new_id()
        return load_id, self.say(LoadBlocks(load_id, hashes, time_left_s), worker)

    def end(self, load_id: int, *corrupt: BlockHash, worker: WorkerId = W0) -> list[NodeAction]:
        return self.say(EndLoad(load_id, corrupt), worker)

    # --- the device's side ----------------------------------------------------------------------

    def io(self, actions: list[NodeAction], **result: Any) -> list[NodeAction]:
        """All its operations end, those that follow too."""
        done: list[NodeAction] = []
        while operations := [a for a in actions if isinstance(a, ReadSsd | WriteSsd)]:
            actions = []
            for operation in operations:
                actions += self.handle(IoDone(operation.op_id, **{"checksum": 7, **result}))
            done += actions
        return done


def messages(actions: list[NodeAction], kind: type[Any]) -> list[Any]:
    said = [a.message for a in actions if isinstance(a, ToStoreClient)]
    return [m for m in said if isinstance(m, kind)]


def only(actions: list[NodeAction], kind: type[Any]) -> Any:
    found = messages(actions, kind)
    assert len(found) == 1, actions
    return found[0]


def ready(actions: list[NodeAction]) -> list[tuple[int, tuple[int, ...]]]:
    return [(m.first, m.slots) for m in messages(actions, BlocksReady)]


def failed(actions: list[NodeAction]) -> list[tuple[int, str]]:
    return [(m.first, m.message) for m in messages(actions, LoadFailed)]
