"""A store node of dictionaries beside one worker core: scripts decide what it answers and when."""

from dataclasses import dataclass, field

from baton.core.ids import NodeId
from baton.core.store import (
    BlocksReady,
    BlocksWritten,
    EndLoad,
    FindBlocks,
    FoundBlocks,
    FoundSpan,
    LoadBlocks,
    LoadFailed,
    OfferBlocks,
    Place,
    StoreWelcome,
    TakeBlocks,
    Tier,
)
from worker.events import CopyDone, CopyFromStore, CopyToStore, FromStore, StoreJoined, StoreLost, WorkerTick


def checksum(content):
    return hash(tuple(content)) & 0xFFFFFFFF


@dataclass
class DullStore:
    """Slots are never reused. A block's checksum is of what its writer copied. Workers of one host share
    `arena` and `slot_of`."""

    machine: object
    tier: Tier = Tier.HOST
    wait_s: float = 0.0
    block_s: float = 0.0
    now_s: float = 0.0
    arena: list = field(default_factory=list)
    slot_of: dict = field(default_factory=dict)
    """Block hash -> (slot, checksum)."""
    writing: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    loads: dict = field(default_factory=dict)
    """Open: LoadBlocks and how many of its blocks were told ready."""
    is_joined: bool = False
    heard: list = field(default_factory=list)
    """All messages of the worker."""

    def join(self):
        self.is_joined = True
        self._tell(StoreJoined(StoreWelcome(NodeId("n"), 4096, 1 << 16, has_checksums=True)))

    def lose(self):
        """What was on its way is lost with the session; until the next one nothing is heard."""
        self.is_joined = False
        self.machine.to_store.clear()
        self.loads.clear()
        self.writing.clear()
        self._tell(StoreLost())

    def _tell(self, event):
        self.machine.handle(event, self.now_s)

    def tell(self, message):
        self._tell(FromStore(message))

    # --- what can happen next ---------------------------------------------------------------------

    def choices(self):
        found = [("message", None)] if self.machine.to_store else []
        found += [("copy", copy_id) for copy_id in self.machine.copies]
        return found + [
            ("bring", load_id) for load_id, (load, told) in self.loads.items() if told < len(load.hashes)
        ]

    def perform(self, choice):
        what, which = choice
        if what == "message":
            self.answer(self.machine.to_store.popleft())
        elif what == "copy":
            self.finish_copy(which)
        else:
            self.bring(which)

    def run(self, *, events_max=2000):
        for _ in range(events_max):
            choices = self.choices()
            if not choices:
                return
            self.perform(choices[0])
        raise AssertionError("does not come to rest")

    def wait(self, seconds):
        self.now_s += seconds
        self._tell(WorkerTick())

    # --- messages ---------------------------------------------------------------------------------

    def answer(self, message):
        if not self.is_joined:
            return
        self.heard.append(message)
        match message:
            case OfferBlocks(offer_id, blocks):
                assert len({facts.block_hash for facts in blocks}) == len(blocks)
                new = [(i, facts) for i, facts in enumerate(blocks) if facts.block_hash not in self.slot_of]
                places = []
                for i, facts in new:
                    self.facts[facts.block_hash] = facts
                    places.append(Place(i, len(self.arena)))
                    self.arena.append(None)
                if places:
                    hashes = [facts.block_hash for _, facts in new]
                    self.writing[offer_id] = (hashes, [place.slot for place in places])
                self.tell(TakeBlocks(offer_id, tuple(places)))
            case BlocksWritten(offer_id, checksums):
                if offer_id in self.writing:
                    hashes, slots = self.writing.pop(offer_id)
                    for block_hash, slot, made in zip(hashes, slots, checksums, strict=True):
                        if made is not None:
                            assert made == checksum(self.arena[slot])
                            self.slot_of[block_hash] = (slot, made)
            case FindBlocks(find_id, hashes, held_count):
                self.tell(FoundBlocks(find_id, self.spans(hashes[held_count:])))
            case LoadBlocks(load_id, hashes):
                assert hashes
                self.loads[load_id] = (message, 0)
            case EndLoad(load_id, corrupt):
                self.loads.pop(load_id, None)
                for block_hash in corrupt:
                    self.slot_of.pop(block_hash, None)

    def spans(self, hashes):
        count = 0
        while count < len(hashes) and hashes[count] in self.slot_of:
            count += 1
        return (FoundSpan(self.tier, count, self.wait_s, self.block_s),) if count else ()

    def bring(self, load_id, count=1):
        load, told = self.loads[load_id]
        places = [self.slot_of.get(block_hash) for block_hash in load.hashes[told : told + count]]
        if None in places:
            self.fail(load_id)
            return
        self.loads[load_id] = (load, told + len(places))
        slots, checksums = zip(*places, strict=True)
        self.tell(BlocksReady(load_id, told, slots, checksums, (self.tier,) * len(slots)))

    def fail(self, load_id):
        load, told = self.loads[load_id]
        self.loads[load_id] = (load, len(load.hashes))
        self.tell(LoadFailed(load_id, told, "gone"))

    def finish_copy(self, copy_id, *, error="", seconds=0.001):
        copy = self.machine.copies.pop(copy_id)
        memory = self.machine.memory
        checksums, corrupt = [], []
        if not error and isinstance(copy, CopyToStore):
            for block, slot in zip(copy.blocks, copy.slots, strict=True):
                self.arena[slot] = list(memory[block])
                checksums.append(checksum(memory[block]))
        elif not error:
            assert isinstance(copy, CopyFromStore)
            for i, (slot, block) in enumerate(zip(copy.slots, copy.blocks, strict=True)):
                memory[block] = list(self.arena[slot])
                if copy.checksums[i] != checksum(memory[block]):
                    corrupt.append(i)
        self._tell(CopyDone(copy_id, tuple(checksums), tuple(corrupt), error, seconds))

    def spoil(self, block_hash):
        slot, _ = self.slot_of[block_hash]
        self.arena[slot] = [token + 1 for token in self.arena[slot]]
