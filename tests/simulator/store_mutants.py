"""Decisions of the store and of its workers, broken on purpose."""

import msgspec

from baton.core.hashing import chain
from baton.core.ids import BlockHash
from baton.core.store import FindBlocks, LoadBlocks, OfferBlocks
from engine.scheduling.sequence import Sequence
from kv_store.node.core import NodeCore
from kv_store.node.events import IoDone
from kv_store.node.host_tier import HostTier
from kv_store.node.index import Index
from kv_store.node.leases import Leases
from kv_store.node.loads import Loads as NodeLoads
from kv_store.node.peers import PeerFetches
from kv_store.node.publisher import Publisher
from kv_store.node.quotas import Quotas
from kv_store.node.size_classes import HostCopy
from kv_store.node.writes import Writes
from kv_transfer.read import ReadDone
from tests.simulator.mutant import Mutant, Patch
from worker.core import WorkerCore
from worker.core_loads import StoreLoads
from worker.core_offers import Offers
from worker.events import ToStore


def corrupt_copies_are_taken(patch: Patch) -> None:
    """A worker does not look at checksums."""
    copied = StoreLoads.copied
    patch.setattr(
        StoreLoads,
        "copied",
        lambda self, copy, done: copied(self, copy, msgspec.structs.replace(done, corrupt=())),
    )


def corrupt_reads_are_served(patch: Patch) -> None:
    """A node takes whatever the disk says."""
    handle = NodeCore.handle

    def trusting(self: NodeCore, event: object, *, now_s: float) -> list[object]:
        if isinstance(event, IoDone) and event.is_corrupt:
            event = IoDone(event.op_id, checksum=0, seconds=event.seconds)
        return handle(self, event, now_s=now_s)

    patch.setattr(NodeCore, "handle", trusting)


def loads_never_end(patch: Patch) -> None:
    """Blocks that were promoted or fetched stay pinned."""
    patch.setattr(StoreLoads, "_end_load", lambda self, load: [])


def unwritten_blocks_are_kept(patch: Patch) -> None:
    """A node indexes slots that the worker says it did not write."""
    written = Writes.written

    def all_of_them(self: Writes, worker: object, done: object) -> None:
        sums = tuple(0 if checksum is None else checksum for checksum in done.checksums)
        written(self, worker, msgspec.structs.replace(done, checksums=sums))

    patch.setattr(Writes, "written", all_of_them)


def half_written_blocks_are_kept(patch: Patch) -> None:
    """A node indexes what a worker was writing when it died."""

    def keep(self: Writes, worker: object) -> None:
        for writes in worker.offers.values():
            for write in writes:
                self._end(worker, write)
                self._index.add_host(worker.size_class, write.facts, write.slot, 0)
        worker.offers.clear()

    patch.setattr(Writes, "worker_lost", keep)


def a_lost_worker_keeps_its_pins(patch: Patch) -> None:
    """What a worker was loading when it died stays pinned."""
    patch.setattr(NodeLoads, "worker_lost", lambda self, worker: worker.loads.clear())


def offers_are_never_settled(patch: Patch) -> None:
    """The worker says nothing when it has written."""
    patch.setattr(Offers, "copied", lambda self, offer, done: [])


def salt_is_left_out(patch: Patch) -> None:
    """A worker asks the store for blocks by their tokens alone, and offers them so."""
    without: dict[BlockHash, BlockHash] = {}
    hashes_of, handle = Sequence.hashes_of, WorkerCore.handle

    def noted(self: Sequence, block_count: int) -> list[BlockHash]:
        found = hashes_of(self, block_count)
        root = BlockHash(bytes(16))
        plain = chain(root, self.tokens[: block_count * self.block_tokens], self.block_tokens)
        without.update(zip(found, plain, strict=False))
        return found

    def translated(action: object) -> object:
        message = getattr(action, "message", None)
        if isinstance(message, FindBlocks | LoadBlocks):
            hashes = tuple(without.get(one, one) for one in message.hashes)
            return ToStore(msgspec.structs.replace(message, hashes=hashes))
        if isinstance(message, OfferBlocks):
            blocks = tuple(
                msgspec.structs.replace(one, block_hash=without.get(one.block_hash, one.block_hash))
                for one in message.blocks
            )
            return ToStore(msgspec.structs.replace(message, blocks=blocks))
        return action

    def unsalted(self: WorkerCore, event: object, *, now_s: float) -> list[object]:
        return [translated(action) for action in handle(self, event, now_s=now_s)]

    patch.setattr(Sequence, "hashes_of", noted)
    patch.setattr(WorkerCore, "handle", unsalted)


def leases_of_peers_never_lapse(patch: Patch) -> None:
    """Blocks that a dead peer was to read are pinned for ever."""
    patch.setattr(Leases, "_lapse", lambda self, key: self._renew(key))


def fetched_slots_are_freed_early(patch: Patch) -> None:
    """Slots are used again while bytes of a fetch may still land there."""
    read_done = PeerFetches.read_done

    def settled(self: PeerFetches, done: ReadDone) -> None:
        read_done(self, msgspec.structs.replace(done, is_settled=True))

    patch.setattr(PeerFetches, "read_done", settled)


def pins_have_no_quota(patch: Patch) -> None:
    """Whoever loads may pin all of the host memory."""
    patch.setattr(Quotas, "fits", lambda self, holder, own_bytes, total_bytes: True)


def tenants_have_no_quota(patch: Patch) -> None:
    """One tenant's blocks may fill the host memory."""
    patch.setattr(HostTier, "_make_tenant_room", lambda self, size_class, tenant: None)


def pinned_slots_are_freed(patch: Patch) -> None:
    """A block that is dropped is freed at once, whoever reads it."""

    def free(self: Index, copy: HostCopy) -> None:
        if copy.is_gone and copy in copy.size_class.host_blocks:
            copy.size_class.host_blocks.remove(copy)
            self.free_slot(copy.size_class, copy.slot)

    patch.setattr(Index, "_free_if_over", free)


def what_left_stays_published(patch: Patch) -> None:
    """The directory is not told of blocks that left."""
    block_is = Publisher.block_is

    def stored_only(self: Publisher, block_hash: BlockHash, tier: object) -> None:
        if tier is not None:
            block_is(self, block_hash, tier)

    patch.setattr(Publisher, "block_is", stored_only)


def writes_of_a_lost_worker_stay(patch: Patch) -> None:
    """Slots that a worker was writing when it died are kept for it."""
    patch.setattr(Writes, "worker_lost", lambda self, worker: None)


MUTANTS = (
    Mutant("salt is left out of the look-up", salt_is_left_out, {0, 2, 7}),
    Mutant("leases of peers never lapse", leases_of_peers_never_lapse, {5}),
    Mutant("fetched slots are freed early", fetched_slots_are_freed_early, {2, 4, 7}),
    Mutant("pins have no quota", pins_have_no_quota, {3}),
    Mutant("tenants have no quota", tenants_have_no_quota, {3}),
    Mutant("pinned slots are freed", pinned_slots_are_freed, {0, 2, 3, 7}),
    Mutant("what left stays published", what_left_stays_published, {3}),
    Mutant("writes of a lost worker stay", writes_of_a_lost_worker_stay, {0, 3}),
    Mutant("corrupt copies are taken", corrupt_copies_are_taken, {2, 7}),
    Mutant("corrupt reads are served", corrupt_reads_are_served, {2, 7}),
    Mutant("loads never end", loads_never_end, {3}),
    Mutant("unwritten blocks are kept", unwritten_blocks_are_kept, {2, 7}),
    Mutant("half written blocks are kept", half_written_blocks_are_kept, {2, 3, 7}),
    Mutant("a lost worker keeps its pins", a_lost_worker_keeps_its_pins, {0, 3}),
    Mutant("offers are never settled", offers_are_never_settled, {3}),
)
