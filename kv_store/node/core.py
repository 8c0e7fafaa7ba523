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
from kv_store.node.components import Parts
from kv_store.node.context import HASHES_MAX, SPACES_MAX, WORKERS_MAX, Context
from kv_store.node.counts import NodeStatus
from kv_store.node.events import (
    Clear,
    DirectoryForgot,
    Drain,
    DropWorker,
    FromPeer,
    FromWorker,
    IoDone,
    LookedUp,
    NodeAction,
    NodeEvent,
    OpenSpace,
    PeerLost,
    PeersChanged,
    SpaceOpened,
    Tick,
    ToPeer,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from kv_store.node.promotion import NOT_HERE
from kv_store.node.size_classes import PAGE_BYTES, Arena, Space, SsdSlots, slot_bytes_for
from kv_store.node.workers import ProtocolError, Worker
from kv_store.tiers.table import make_eviction_policy
from kv_transfer.read import ReadDone, ReadSettled

SLOTS_MIN = 4
"""A host memory that holds fewer blocks of a size has no use for it."""


def list_of_generations(space: int, slot_count: int) -> MutableSequence[int]:
    """A table of generations for a node whose arena no other host reads."""
    del space
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
        self._parts = Parts(self._context)
        self._workers = self._parts.workers

    def handle(self, event: NodeEvent, *, now_s: float) -> list[NodeAction]:
        """Handle an event. The actions are to be performed in order."""
        self._context.now_s = max(now_s, self._context.now_s)
        self._context.run_due()
        ttl_s = self._context.config.ttl_s
        if ttl_s > 0:
            self._parts.index.expire(ttl_s)
        self._dispatch(event)
        self._parts.settle()
        return self._context.take_actions()

    @property
    def next_tick_s(self) -> float | None:
        """The time by which a Tick is wanted. None means not before something happens."""
        ttl_s, oldest_s = self._context.config.ttl_s, self._parts.index.oldest_use_s
        timer_s = self._context.next_tick_s
        if ttl_s <= 0 or oldest_s is None:
            return timer_s
        return oldest_s + ttl_s if timer_s is None else min(timer_s, oldest_s + ttl_s)

    # --- accounts -------------------------------------------------------------------------------

    def status(self) -> NodeStatus:
        return status(self._parts)

    def check(self) -> None:
        """Check that accounts balance: every slot has one owner, every pin a reason, and when idle nothing is
        pinned."""
        check(self._parts)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, for anybody."""
        parts = self._parts
        return not (
            parts.bringer.demand_count
            or parts.bringer.fill_count
            or parts.writes.open_count
            or parts.ssd.io_count
            or parts.ssd.queued_count
            or parts.peers.fetch_count
            or parts.peers.pending_count
            or parts.lookups.pending_count
            or parts.leases.count
            or parts.takeovers.is_busy
        )

    @property
    def is_drained(self) -> bool:
        """Peers have read what they wanted after a Drain, or had time to. Ticks come when it may change."""
        return self._parts.drainer.is_drained

    # --- events ---------------------------------------------------------------------------------

    def _dispatch(self, event: NodeEvent) -> None:
        match event:
            case FromWorker(worker_id, message):
                self._from_worker(worker_id, message)
            case WorkerJoined(hello):
                self._joined(hello)
            case WorkerLost(worker_id):
                self._worker_lost(worker_id)
            case SpaceOpened():
                space = self._space(event.space)
                if space is not None:
                    self._parts.ssd.opened(space, event)
            case IoDone():
                self._parts.ssd.io_done(event)
            case DirectoryForgot():
                self._parts.publisher.snapshot()
            case Clear(tier, tenant):
                self._clear(tier, tenant)
            case FromPeer():
                self._from_peer(event)
            case PeerLost(space, peer, message):
                self._parts.peers.peer_lost(space, peer, message)
            case ReadDone():
                self._parts.peers.read_done(event)
            case ReadSettled(read_id):
                self._parts.peers.read_settled(read_id)
            case LookedUp():
                self._parts.lookups.looked_up(event)
            case PeersChanged(peers):
                self._parts.peers.peers_changed(peers)
            case Drain(budget_bytes):
                self._parts.writes.is_closed = True
                self._parts.loads.is_draining = True
                self._parts.drainer.drain(budget_bytes)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _from_worker(self, worker_id: str, message: WorkerToStore) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.is_dropped:
            return
        try:
            answer = self._heard(worker, message)
        except ProtocolError as e:
            worker.is_dropped = worker.is_gone = True  # its pins stay: it may be copying out of them
            self._context.counts.workers_dropped += 1
            self._context.emit(DropWorker(worker.worker_id, str(e)))
        else:
            if answer is not None:
                self._context.emit(ToWorker(worker.worker_id, answer))

    def _heard(self, worker: Worker, message: WorkerToStore) -> StoreToWorker | None:
        match message:
            case OfferBlocks():
                _check_facts(message.blocks)
                return self._parts.writes.offered(worker, message)
            case BlocksWritten():
                self._parts.writes.written(worker, message)
            case FindBlocks():
                _check_hashes(len(message.hashes))
                self._parts.finds.find(worker, message)
            case LoadBlocks():
                _check_hashes(len(message.hashes))
                return self._parts.loads.load(worker, message)
            case EndLoad():
                _check_hashes(len(message.corrupt))
                self._parts.loads.ended(worker, message)
            case StoreHello():
                raise ProtocolError("a second hello in one session")
            case _:
                assert_never(message)
        return None

    def _from_peer(self, event: FromPeer) -> None:
        """Handle a peer's message. NodeHello is for the adapters. For a size class that is not open here the
        answer can only be no."""
        space, peer, message = self._parts.index.spaces.get(event.space), event.peer, event.message
        match message:
            case BlocksRequest() if space is None:
                self._context.emit(ToPeer(event.space, peer, BlocksRefused(message.fetch_id, 0, NOT_HERE)))
            case BlocksRequest() if space is not None:
                self._parts.leases.request(space, peer, message)
            case BlocksReleased() if space is not None:
                self._parts.leases.released(space, peer, message)
            case TakeOver():
                self._take_over(event.space, peer, message)
            case BlocksGrant():
                self._parts.peers.granted(peer.node_id, message)
            case BlocksRefused():
                self._parts.peers.refused(peer.node_id, message)
            case _:
                pass

    def _take_over(self, block_bytes: int, peer: NodeRef, offer: TakeOver) -> None:
        """Take over blocks of a leaving peer, if they have a size that this host's workers have used."""
        space = self._parts.index.spaces.get(block_bytes)
        if space is not None and not self._parts.drainer.is_draining:
            self._parts.takeovers.offered(space, peer, offer)

    def _joined(self, hello: StoreHello) -> None:
        """Begin a worker's session. The adapter has reported the end of an earlier session of this id."""
        assert hello.worker_id not in self._workers
        reason = self._refuse(hello)
        space = None if reason else self._space(hello.block_bytes)
        if space is None:
            self._context.emit(ToWorker(hello.worker_id, StoreRefused(reason or "too many block sizes")))
            return
        holder = self._parts.shares.join(hello.worker_id)
        self._workers[hello.worker_id] = Worker(hello.worker_id, space, holder)
        welcome = StoreWelcome(
            node_id=self._context.node.node_id,
            slot_bytes=space.slot_bytes,
            slot_count=space.arena.slot_count,
            has_checksums=self._context.config.checksums,
        )
        self._context.emit(ToWorker(hello.worker_id, welcome))

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
            self._parts.loads.worker_lost(worker)
            self._parts.writes.worker_lost(worker)
            self._parts.shares.leave(worker.holder)
            self._parts.index.was_freed = True

    def _space(self, block_bytes: int) -> Space | None:
        """The size class of these blocks, opened if it is new; None if there are too many."""
        space = self._parts.index.spaces.get(block_bytes)
        if space is not None or len(self._parts.index.spaces) >= SPACES_MAX:
            return space
        config = self._context.config
        slot_bytes = slot_bytes_for(block_bytes)
        slot_count = config.host_bytes // slot_bytes
        ssd_slot_count = config.ssd_bytes // (slot_bytes + PAGE_BYTES) if config.ssd_dir else 0
        space = Space(
            block_bytes=block_bytes,
            arena=Arena(slot_bytes, slot_count, self._make_generations(block_bytes, slot_count)),
            ssd=SsdSlots(ssd_slot_count),
            host_policy=make_eviction_policy(config.policy, max(1, slot_count)),
            ssd_policy=make_eviction_policy(config.policy, max(1, ssd_slot_count)),
        )
        self._parts.index.spaces[block_bytes] = space
        self._context.emit(OpenSpace(block_bytes, slot_bytes, slot_count, ssd_slot_count))
        return space

    def _clear(self, tier: Tier | None, tenant: str | None) -> None:
        for entry in list(self._parts.index):
            if tenant is None or entry.facts.tenant == tenant:
                self._parts.index.clear(entry, tier)


def _check_hashes(count: int) -> None:
    if count > HASHES_MAX:
        raise ProtocolError(f"a message about {count} blocks; {HASHES_MAX} at most")


def _check_facts(blocks: tuple[BlockFacts, ...]) -> None:
    for facts in blocks:
        if facts.depth < 0 or not math.isfinite(facts.recompute_s):
            raise ProtocolError(f"a block at depth {facts.depth} that takes {facts.recompute_s} s")
