"""The pure core of a store node: events and the time go in, actions come out."""

import math
from collections.abc import Callable, MutableSequence
from typing import assert_never

from baton.config import StoreConfig
from baton.core.store import (
    STORE_WIRE_VERSION,
    BlockFacts,
    BlocksGrant,
    BlocksRefused,
    BlocksReleased,
    BlocksRequest,
    BlocksWritten,
    EndLoad,
    FindBlocks,
    LoadBlocks,
    NodeRef,
    OfferBlocks,
    StoreHello,
    StoreRefused,
    StoreToWorker,
    StoreWelcome,
    TakeOver,
    Tier,
    WorkerToStore,
)
from kv_store.node.audit import check, status
from kv_store.node.components import Components
from kv_store.node.context import HASHES_MAX, SIZE_CLASSES_MAX, WORKERS_MAX, Context
from kv_store.node.counts import NodeStats
from kv_store.node.events import (
    Clear,
    DirectoryForgot,
    DrainStore,
    DropStoreClient,
    FromPeer,
    FromStoreClient,
    IoDone,
    LookedUp,
    NodeAction,
    NodeEvent,
    OpenSizeClass,
    PeersChanged,
    SizeClassOpened,
    StoreClientJoined,
    StoreClientLost,
    StorePeerLost,
    StoreTick,
    ToPeer,
    ToStoreClient,
)
from kv_store.node.promotion import NOT_HERE
from kv_store.node.size_classes import PAGE_BYTES, HostSlots, SizeClass, SsdSlots, slot_bytes_for
from kv_store.node.workers import ProtocolError, StoreClientState
from kv_store.tiers.table import make_eviction_policy
from kv_transfer.read import ReadDone, ReadSettled

SLOTS_MIN = 4
"""A host memory that holds fewer blocks of a size has no use for it."""


def list_of_generations(size_class: int, slot_count: int) -> MutableSequence[int]:
    """A table of generations for a node whose arena no other host reads."""
    del size_class
    return [0] * slot_count


class NodeCore:
    """The store node. `make_generations(block_bytes, slot_count)` makes the table that readers of other hosts
    compare, just before the OpenSizeClass of that size."""

    def __init__(
        self,
        node: NodeRef,
        config: StoreConfig,
        *,
        make_generations: Callable[[int, int], MutableSequence[int]] = list_of_generations,
        now_s: float,
    ) -> None:
        self._context = Context(node, config, now_s=now_s)
        self._make_generations = make_generations
        self._components = Components(self._context)
        self._workers = self._components.workers

    def handle(self, event: NodeEvent, *, now_s: float) -> list[NodeAction]:
        """Handle an event. The actions are to be performed in order."""
        self._context.now_s = max(now_s, self._context.now_s)
        self._context.run_due()
        ttl_s = self._context.config.ttl_s
        if ttl_s > 0:
            self._components.index.expire(ttl_s)
        self._dispatch(event)
        self._components.settle()
        return self._context.take_actions()

    @property
    def next_tick_s(self) -> float | None:
        """The time by which a Tick is wanted. None means not before something happens."""
        ttl_s, oldest_s = self._context.config.ttl_s, self._components.index.oldest_use_s
        timer_s = self._context.next_tick_s
        if ttl_s <= 0 or oldest_s is None:
            return timer_s
        return oldest_s + ttl_s if timer_s is None else min(timer_s, oldest_s + ttl_s)

    # --- accounts -------------------------------------------------------------------------------

    def status(self) -> NodeStats:
        return status(self._components)

    def check(self) -> None:
        """Check that accounts balance: every slot has one owner, every pin a reason, and when idle nothing is
        pinned."""
        check(self._components)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, for anybody."""
        components = self._components
        return not (
            components.promoter.request_count
            or components.promoter.promotion_count
            or components.writes.open_count
            or components.ssd.io_count
            or components.ssd.queued_count
            or components.peers.fetch_count
            or components.peers.pending_count
            or components.lookups.pending_count
            or components.leases.count
            or components.takeovers.is_busy
        )

    @property
    def is_drained(self) -> bool:
        """Peers have read what they wanted after a Drain, or had time to. Ticks come when it may change."""
        return self._components.drainer.is_drained

    # --- events ---------------------------------------------------------------------------------

    def _dispatch(self, event: NodeEvent) -> None:
        match event:
            case FromStoreClient(worker_id, message):
                self._from_worker(worker_id, message)
            case StoreClientJoined(hello):
                self._joined(hello)
            case StoreClientLost(worker_id):
                self._worker_lost(worker_id)
            case SizeClassOpened():
                size_class = self._size_class(event.size_class)
                if size_class is not None:
                    self._components.ssd.opened(size_class, event)
            case IoDone():
                self._components.ssd.io_done(event)
            case DirectoryForgot():
                self._components.publisher.snapshot()
            case Clear(tier, tenant):
                self._clear(tier, tenant)
            case FromPeer():
                self._from_peer(event)
            case StorePeerLost(size_class, peer, message):
                self._components.peers.peer_lost(size_class, peer, message)
            case ReadDone():
                self._components.peers.read_done(event)
            case ReadSettled(read_id):
                self._components.peers.read_settled(read_id)
            case LookedUp():
                self._components.lookups.looked_up(event)
            case PeersChanged(peers):
                self._components.peers.peers_changed(peers)
            case DrainStore(budget_bytes):
                self._components.writes.is_closed = True
                self._components.loads.is_draining = True
                self._components.drainer.drain(budget_bytes)
            case StoreTick():
                pass
            case _:
                assert_never(event)

    def _from_worker(self, worker_id: str, message: WorkerToStore) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.is_dropped:
            return
        try:
            answer = self._on_message(worker, message)
        except ProtocolError as e:
            worker.is_dropped = worker.is_gone = True  # its pins stay: it may be copying out of them
            self._context.counts.workers_dropped += 1
            self._context.emit(DropStoreClient(worker.worker_id, str(e)))
        else:
            if answer is not None:
                self._context.emit(ToStoreClient(worker.worker_id, answer))

    def _on_message(self, worker: StoreClientState, message: WorkerToStore) -> StoreToWorker | None:
        match message:
            case OfferBlocks():
                _check_facts(message.blocks)
                return self._components.writes.offered(worker, message)
            case BlocksWritten():
                self._components.writes.written(worker, message)
            case FindBlocks():
                _check_hashes(len(message.hashes))
                self._components.finds.find(worker, message)
            case LoadBlocks():
                _check_hashes(len(message.hashes))
                return self._components.loads.load(worker, message)
            case EndLoad():
                _check_hashes(len(message.corrupt))
                self._components.loads.ended(worker, message)
            case StoreHello():
                raise ProtocolError("a second hello in one session")
            case _:
                assert_never(message)
        return None

    def _from_peer(self, event: FromPeer) -> None:
        """Handle a peer's message. NodeHello is for the adapters. For a size class that is not open here the
        answer can only be no."""
        size_class = self._components.index.size_classes.get(event.size_class)
        peer, message = event.peer, event.message
        match message:
            case BlocksRequest() if size_class is None:
                refused = BlocksRefused(message.fetch_id, 0, NOT_HERE)
                self._context.emit(ToPeer(event.size_class, peer, refused))
            case BlocksRequest() if size_class is not None:
                self._components.leases.request(size_class, peer, message)
            case BlocksReleased() if size_class is not None:
                self._components.leases.released(size_class, peer, message)
            case TakeOver():
                self._take_over(event.size_class, peer, message)
            case BlocksGrant():
                self._components.peers.granted(peer.node_id, message)
            case BlocksRefused():
                self._components.peers.refused(peer.node_id, message)
            case _:
                pass

    def _take_over(self, block_bytes: int, peer: NodeRef, offer: TakeOver) -> None:
        """Take over blocks of a leaving peer, if they have a size that this host's workers have used."""
        size_class = self._components.index.size_classes.get(block_bytes)
        if size_class is not None and not self._components.drainer.is_draining:
            self._components.takeovers.offered(size_class, peer, offer)

    def _joined(self, hello: StoreHello) -> None:
        """Begin a worker's session. The adapter has reported the end of an earlier session of this id."""
        assert hello.worker_id not in self._workers
        reason = self._refuse(hello)
        size_class = None if reason else self._size_class(hello.block_bytes)
        if size_class is None:
            self._context.emit(ToStoreClient(hello.worker_id, StoreRefused(reason or "too many block sizes")))
            return
        holder = self._components.quotas.join(hello.worker_id)
        self._workers[hello.worker_id] = StoreClientState(hello.worker_id, size_class, holder)
        welcome = StoreWelcome(
            node_id=self._context.node.node_id,
            slot_bytes=size_class.slot_bytes,
            slot_count=size_class.arena.slot_count,
            has_checksums=self._context.config.checksums,
        )
        self._context.emit(ToStoreClient(hello.worker_id, welcome))

    def _refuse(self, hello: StoreHello) -> str:
        host_bytes = self._context.config.host_bytes
        if hello.wire_version != STORE_WIRE_VERSION:
            return f"wire version {hello.wire_version}; this store node speaks {STORE_WIRE_VERSION}"
        if len(self._workers) >= WORKERS_MAX:
            return f"{WORKERS_MAX} workers have sessions already"
        if hello.block_bytes <= 0 or slot_bytes_for(hello.block_bytes) * SLOTS_MIN > host_bytes:
            return (
                f"store.host_bytes={host_bytes} holds fewer than {SLOTS_MIN} blocks of "
                f"{hello.block_bytes} bytes"
            )
        return ""

    def _worker_lost(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.is_gone = True
            self._components.loads.worker_lost(worker)
            self._components.writes.worker_lost(worker)
            self._components.quotas.leave(worker.holder)
            self._components.index.was_freed = True

    def _size_class(self, block_bytes: int) -> SizeClass | None:
        """The size class of these blocks, opened if it is new; None if there are too many."""
        size_class = self._components.index.size_classes.get(block_bytes)
        if size_class is not None or len(self._components.index.size_classes) >= SIZE_CLASSES_MAX:
            return size_class
        config = self._context.config
        slot_bytes = slot_bytes_for(block_bytes)
        slot_count = config.host_bytes // slot_bytes
        ssd_slot_count = config.ssd_bytes // (slot_bytes + PAGE_BYTES) if config.ssd_dir else 0
        size_class = SizeClass(
            block_bytes=block_bytes,
            arena=HostSlots(slot_bytes, slot_count, self._make_generations(block_bytes, slot_count)),
            ssd=SsdSlots(ssd_slot_count),
            host_policy=make_eviction_policy(config.policy, max(1, slot_count)),
            ssd_policy=make_eviction_policy(config.policy, max(1, ssd_slot_count)),
        )
        self._components.index.size_classes[block_bytes] = size_class
        self._context.emit(OpenSizeClass(block_bytes, slot_bytes, slot_count, ssd_slot_count))
        return size_class

    def _clear(self, tier: Tier | None, tenant: str | None) -> None:
        for entry in list(self._components.index):
            if tenant is None or entry.facts.tenant == tenant:
                self._components.index.clear(entry, tier)


def _check_hashes(count: int) -> None:
    if count > HASHES_MAX:
        raise ProtocolError(f"a message about {count} blocks; {HASHES_MAX} at most")


def _check_facts(blocks: tuple[BlockFacts, ...]) -> None:
    for facts in blocks:
        if facts.depth < 0 or not math.isfinite(facts.recompute_s):
            raise ProtocolError(f"a block at depth {facts.depth} that takes {facts.recompute_s} s")
