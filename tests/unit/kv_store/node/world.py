"""All that surrounds a store node's core, as dull models: what is in each slot of the arena and of the SSD
file, what workers were promised, what peers may be reading."""

from dataclasses import dataclass, field
from typing import Any

from baton.config import StoreConfig
from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlockFacts,
    BlocksGrant,
    BlocksReady,
    BlocksRefused,
    BlocksReleased,
    BlocksRequest,
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
    TakeOver,
    Tier,
)
from kv_store.node.core import NodeCore
from kv_store.node.events import (
    DropStoreClient,
    ForgetHost,
    ForgetSsd,
    FromPeer,
    FromStoreClient,
    IoDone,
    LookUp,
    NodeAction,
    NodeEvent,
    OpenSizeClass,
    Publish,
    ReadSsd,
    Recovered,
    SizeClassOpened,
    StoreClientJoined,
    StoreClientLost,
    StoreTick,
    ToPeer,
    ToStoreClient,
    WriteSsd,
)
from kv_transfer.read import BlockRead

TORN = BlockHash(b"torn")
"""Content of a slot that somebody is writing into."""


@dataclass
class Load:
    hashes: tuple[BlockHash, ...]
    slots: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass
class WorkerModel:
    worker_id: WorkerId
    size_class: int
    offers: dict[int, tuple[OfferBlocks, TakeBlocks]] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    finds: dict[int, FindBlocks] = field(default_factory=dict)
    is_dropped: bool = False


@dataclass
class Fetched:
    """A peer's fetch from us."""

    peer: NodeRef
    size_class: int
    hashes: tuple[BlockHash, ...]
    ends_s: float
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    request_number: int = 0


class World:
    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.now_s = 100.0
        self.node = NodeRef(NodeId("node-0"), "host0:1")
        self.generations: dict[int, list[int]] = {}
        self.core = NodeCore(self.node, config, make_generations=self._make_generations, now_s=self.now_s)
        self.arena: dict[tuple[int, int], BlockHash] = {}
        self.file: dict[tuple[int, int], BlockHash] = {}
        self.facts: dict[BlockHash, BlockFacts] = {}
        self.ssd_slots: dict[int, int] = {}
        self.slot_bytes: dict[int, int] = {}
        self.workers: dict[WorkerId, WorkerModel] = {}
        self.io: dict[int, ReadSsd | WriteSsd] = {}
        self.reads: dict[int, BlockRead] = {}
        self.unsettled: dict[int, BlockRead] = {}
        self.lookups: dict[int, LookUp] = {}
        self.asked: dict[tuple[NodeId, int], tuple[int, BlocksRequest]] = {}
        """Fetches of ours at peers, not yet unpinned."""
        self.at_peers: dict[int, BlockHash] = {}
        """What is in the slots of peers, whose numbers are all different here."""
        self.leases: dict[tuple[NodeId, int], Fetched] = {}
        self.directory: dict[BlockHash, Tier] = {}
        self.sequence_number = 0
        self.takeovers: list[TakeOver] = []
        self._ids = 0

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _make_generations(self, size_class: int, slot_count: int) -> list[int]:
        self.generations[size_class] = [0] * slot_count
        return self.generations[size_class]

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: NodeEvent) -> list[NodeAction]:
        actions = self.core.handle(event, now_s=self.now_s)
        for action in actions:
            self._perform(action)
        self.core.check()
        self.check()
        return actions

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (tick_s := self.core.next_tick_s) is not None and tick_s <= end_s:
            self.now_s = max(self.now_s, tick_s)
            self._lapse()
            self.handle(StoreTick())
        self.now_s = end_s
        self._lapse()
        self.handle(StoreTick())

    def _lapse(self) -> None:
        self.leases = {key: lease for key, lease in self.leases.items() if lease.ends_s > self.now_s}

    def join(self, worker_id: WorkerId, size_class: int) -> None:
        if worker_id in self.workers:
            self.lose(worker_id)
        self.workers[worker_id] = WorkerModel(worker_id, size_class)
        self.handle(StoreClientJoined(StoreHello(worker_id, "fingerprint", size_class)))

    def open(self, size_class: int) -> None:
        """The SSD file is there, with whatever was written whole."""
        held = [(slot, h) for (s, slot), h in self.file.items() if s == size_class and h != TORN]
        recovered = tuple(Recovered(slot, self.facts[h], 1) for slot, h in sorted(held))
        self.handle(SizeClassOpened(size_class, recovered))

    def lose(self, worker_id: WorkerId) -> None:
        """What it was writing stays torn."""
        del self.workers[worker_id]
        self.handle(StoreClientLost(worker_id))

    def offer(self, worker: WorkerModel, blocks: tuple[BlockFacts, ...]) -> None:
        self.facts.update({block.block_hash: block for block in blocks})
        offer = OfferBlocks(self.new_id(), blocks)
        worker.offers[offer.offer_id] = (offer, TakeBlocks(offer.offer_id, ()))
        self.handle(FromStoreClient(worker.worker_id, offer))

    def write(self, worker: WorkerModel, offer_id: int, is_written: list[bool]) -> None:
        offer, taken = worker.offers.pop(offer_id)
        checksums: list[int | None] = []
        for i, place in enumerate(taken.places):
            is_good = is_written[i % len(is_written)]
            checksums.append(1 if is_good else None)
            if is_good:
                self.arena[worker.size_class, place.slot] = offer.blocks[place.index].block_hash
        self.handle(FromStoreClient(worker.worker_id, BlocksWritten(offer_id, tuple(checksums))))

    def load(self, worker: WorkerModel, hashes: tuple[BlockHash, ...], time_left_s: float) -> None:
        load_id = self.new_id()
        worker.loads[load_id] = Load(hashes)
        self.handle(FromStoreClient(worker.worker_id, LoadBlocks(load_id, hashes, time_left_s)))

    def end_load(self, worker: WorkerModel, load_id: int, corrupt: tuple[BlockHash, ...] = ()) -> None:
        del worker.loads[load_id]
        self.handle(FromStoreClient(worker.worker_id, EndLoad(load_id, corrupt)))

    def find(self, worker: WorkerModel, hashes: tuple[BlockHash, ...], held: int) -> None:
        find = FindBlocks(self.new_id(), hashes, held)
        worker.finds[find.find_id] = find
        self.handle(FromStoreClient(worker.worker_id, find))

    def io_ends(self, op_id: int, how: str) -> None:
        operation = self.io.pop(op_id)
        done: dict[str, Any] = {"checksum": 1}
        if isinstance(operation, ReadSsd):
            found = self.file.get((operation.size_class, operation.ssd_slot))
            if how == "error":
                done = {"error": "input/output error"}
            elif how == "corrupt" or found != operation.block_hash:
                done = {"error": "checksum", "is_corrupt": True}
            else:
                self.arena[operation.size_class, operation.slot] = operation.block_hash
        else:
            content = self.arena[operation.size_class, operation.slot]
            assert content == operation.facts.block_hash, "its block was replaced while it was written"
            if how in ("error", "full"):
                done = {"error": "no", "is_full": how == "full"}
            else:
                self.file[operation.size_class, operation.ssd_slot] = content
        self.handle(IoDone(op_id, **done))

    # --- peers ----------------------------------------------------------------------------------

    def peer_pins(
        self, peer: NodeRef, size_class: int, hashes: tuple[BlockHash, ...], time_left_s: float
    ) -> None:
        fetch_id = self.new_id()
        ends_s = self.now_s + self.config.lease_s
        self.leases[peer.node_id, fetch_id] = Fetched(peer, size_class, hashes, ends_s)
        self.handle(FromPeer(size_class, peer, BlocksRequest(fetch_id, hashes, time_left_s)))

    def peer_renews(self, key: tuple[NodeId, int]) -> None:
        lease = self.leases[key]
        lease.ends_s = self.now_s + self.config.lease_s
        lease.request_number += 1
        again = BlocksRequest(key[1], lease.hashes, 1.0, lease.request_number)
        self.handle(FromPeer(lease.size_class, lease.peer, again))

    def peer_unpins(self, key: tuple[NodeId, int], corrupt: tuple[BlockHash, ...] = ()) -> None:
        lease = self.leases.pop(key)
        self.handle(FromPeer(lease.size_class, lease.peer, BlocksReleased(key[1], corrupt)))

    # --- actions --------------------------------------------------------------------------------

    def _perform(self, action: NodeAction) -> None:
        match action:
            case OpenSizeClass():
                self.ssd_slots[action.size_class] = action.ssd_slot_count
                self.slot_bytes[action.size_class] = action.slot_bytes
            case ToStoreClient():
                self._to_worker(action)
            case DropStoreClient(worker_id):
                self.workers[worker_id].is_dropped = True  # and may go on to read what it was given
            case ToPeer():
                self._to_peer(action)
            case ReadSsd():
                assert action.op_id not in self.io
                self.io[action.op_id] = action
                self._tear(action.size_class, action.slot)
            case WriteSsd():
                assert self.arena[action.size_class, action.slot] == action.facts.block_hash
                assert 0 <= action.ssd_slot < self.ssd_slots[action.size_class]
                place = action.size_class, action.ssd_slot
                assert place not in self.file, "not forgotten before it is reused"
                self.file[action.size_class, action.ssd_slot] = TORN
                self.io[action.op_id] = action
            case ForgetSsd():
                busy = [op for op in self.io.values() if op.size_class == action.size_class]
                assert action.ssd_slot not in [op.ssd_slot for op in busy]
                self.file.pop((action.size_class, action.ssd_slot), None)
            case ForgetHost():
                self.arena.pop((action.size_class, action.slot), None)
            case BlockRead():
                self.reads[action.read_id] = action
                for slot in action.local_blocks:
                    self._tear(action.block_bytes, slot)
            case LookUp():
                self.lookups[action.lookup_id] = action
            case Publish():
                self._publish(action)

    def _tear(self, size_class: int, slot: int) -> None:
        assert 0 <= slot < len(self.generations[size_class])
        self.arena[size_class, slot] = TORN

    def _to_worker(self, action: ToStoreClient) -> None:
        worker = self.workers[action.worker_id]
        match action.message:
            case TakeBlocks() as taken:
                worker.offers[taken.offer_id] = (worker.offers[taken.offer_id][0], taken)
                for place in taken.places:
                    self._tear(worker.size_class, place.slot)
            case BlocksReady() as ready:
                load = worker.loads[ready.load_id]
                assert not load.is_over
                assert ready.first == len(load.slots)
                assert len(ready.slots) == len(ready.checksums) == len(ready.tiers) > 0
                load.slots += ready.slots
            case LoadFailed() as failed:
                load = worker.loads[failed.load_id]
                assert not load.is_over
                assert failed.first == len(load.slots) < max(1, len(load.hashes))
                load.is_over = True
            case FoundBlocks() as found:
                find = worker.finds.pop(found.find_id)
                spans = sum(span.block_count for span in found.spans)
                assert spans <= max(0, len(find.hashes) - find.held_count)
                assert all(span.block_count > 0 for span in found.spans)
                assert all(span.wait_s >= 0 and span.block_s >= 0 for span in found.spans)
            case _:
                pass

    def _to_peer(self, action: ToPeer) -> None:
        peer = action.peer.node_id
        match action.message:
            case BlocksRequest() as pin:
                known = self.asked.get((peer, pin.fetch_id))
                assert known is None or known[1].request_number < pin.request_number
                self.asked[peer, pin.fetch_id] = (action.size_class, pin)
            case BlocksReleased(fetch_id):
                del self.asked[peer, fetch_id]
            case BlocksGrant() as pinned:
                lease = self.leases[peer, pinned.fetch_id]
                assert pinned.first_block == len(lease.slots)
                assert len(pinned.source_blocks) == len(pinned.generations) == len(pinned.facts)
                lease.slots += pinned.source_blocks
                lease.generations += pinned.generations
                if pinned.source_blocks:
                    lease.ends_s = self.now_s + self.config.lease_s
            case BlocksRefused() as failed:
                lease = self.leases[peer, failed.fetch_id]
                assert failed.first_block == len(lease.slots)
                if not lease.slots:
                    del self.leases[peer, failed.fetch_id]
            case TakeOver() as offer:
                self.takeovers.append(offer)
            case _:
                raise AssertionError(action)

    def _publish(self, action: Publish) -> None:
        changes = action.changes
        self.sequence_number += 1
        assert changes.sequence_number == self.sequence_number
        if changes.is_snapshot:
            assert dict(changes.stored) == self.directory
            return
        self.directory.update(changes.stored)
        for block_hash in changes.removed:
            del self.directory[block_hash]

    # --- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        for worker in self.workers.values():
            for load in worker.loads.values():
                for block_hash, slot in zip(load.hashes, load.slots, strict=False):
                    found = self.arena[worker.size_class, slot]
                    assert found == block_hash, "a reader's slot has another block"
            for _, taken in worker.offers.values():
                assert all(self.arena[worker.size_class, place.slot] == TORN for place in taken.places)
        for lease in self.leases.values():
            for i, slot in enumerate(lease.slots):
                assert self.arena[lease.size_class, slot] == lease.hashes[i]
                assert self.generations[lease.size_class][slot] == lease.generations[i]
        for read in [*self.reads.values(), *self.unsettled.values()]:
            assert all(self.arena[read.block_bytes, slot] == TORN for slot in read.local_blocks)
        used = sum(self.slot_bytes[size_class] for size_class, _ in self.arena)
        assert used <= self.config.host_bytes
        on_disk = sum(self.slot_bytes[size_class] + 4096 for size_class, _ in self.file)
        assert on_disk <= self.config.ssd_bytes
