"""Decisions of the store and of its workers, broken on purpose."""

import msgspec

from kv_store.node.core import NodeCore
from kv_store.node.events import IoDone
from kv_store.node.loads import Loads as NodeLoads
from kv_store.node.writes import Writes
from tests.simulator.mutant import Mutant, Patch
from worker.core_loads import StoreLoads
from worker.core_offers import Offers


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
    patch.setattr(NodeLoads, "worker_lost", lambda self, worker: worker.loads.clear())


def offers_are_never_settled(patch: Patch) -> None:
    """The worker says nothing when it has written."""
    patch.setattr(Offers, "copied", lambda self, offer, done: [])


MUTANTS = (
    Mutant("corrupt copies are taken", corrupt_copies_are_taken, {2, 7}, known_seed=12),
    Mutant("corrupt reads are served", corrupt_reads_are_served, {2, 7}, known_seed=13),
    Mutant("loads never end", loads_never_end, {3}, known_seed=22),
    Mutant("unwritten blocks are kept", unwritten_blocks_are_kept, {2, 7}, known_seed=12),
    Mutant("half written blocks are kept", half_written_blocks_are_kept, {2, 3, 7}, known_seed=108),
    Mutant("a lost worker keeps its pins", a_lost_worker_keeps_its_pins, {0, 3}, known_seed=25),
    Mutant("offers are never settled", offers_are_never_settled, {3}, known_seed=12),
)
